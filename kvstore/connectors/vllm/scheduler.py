"""The connector in the scheduler's process: what to load, what to save, and who holds the lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from kvstore.block import TierName
from kvstore.connectors.vllm.groups import CacheGroups
from kvstore.connectors.vllm.hints import hints_of
from kvstore.connectors.vllm.identity import Adapters, adapted, request_extras, with_new_weights
from kvstore.connectors.vllm.known import KnownBlocks
from kvstore.connectors.vllm.lookups import NOTHING, Answer, Lookups, Question
from kvstore.connectors.vllm.messages import LoadJob, Orders, Progress
from kvstore.connectors.vllm.saves import Prefix, Saves
from kvstore.connectors.vllm.tally import Tally
from kvstore.connectors.vllm.tracking import EngineRequest, Load, Tracked
from kvstore.errors import HintsError
from kvstore.hints import NO_HINTS, Hints
from kvstore.service.client import Outcome
from kvstore.spec import NamespaceSpec

_log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 0.002
"""What a step may wait for answers of the sidecar, all requests together: most come in less."""
_IDLE_PATIENCE_SECONDS = 0.003
"""The same where the step before had nothing to compute: the engine would ask again at once, and take
from whoever works at the answer what each of its empty steps costs."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the engine's set-up asks for."""

    spec: NamespaceSpec
    groups: CacheGroups
    ranks: int
    loads: bool
    saves: bool
    asynchronous: bool
    lookup_seconds: float
    request_hints: bool = True


class SchedulerSide:
    """Answers the engine's scheduler; never blocks it for longer than ``_PATIENCE_SECONDS`` a step."""

    def __init__(
        self,
        policy: Policy,
        lookups: Lookups,
        tally: Tally,
        clock: Callable[[], float],
        mark: Callable[[], str],
    ) -> None:
        """``mark`` makes a string that is new everywhere, for weights without a name."""
        self._policy = policy
        self._base = policy.spec
        self._block_size = policy.spec.block_size
        self._lookups = lookups
        self._tally = tally
        self._clock = clock
        self._mark = mark
        self._adapters = Adapters()
        self._known = KnownBlocks(clock)
        self._width = policy.groups.width
        self._saves = Saves(policy.ranks, self._width, stored=self._known.add)
        self._failures = 0
        self._told: set[str] = set()
        self._requests: dict[str, Tracked] = {}
        self._loads: dict[str, Load] = {}
        self._new_loads: list[LoadJob] = []
        self._patience = self._patience_left = _IDLE_PATIENCE_SECONDS
        self.refusal = ""

    @property
    def saves(self) -> Saves:
        return self._saves

    @property
    def failures(self) -> dict[Outcome, int]:
        return self._lookups.failures

    # What the scheduler asks before it allocates.

    def new_request(self, request: EngineRequest) -> None:
        """Know a request; one that its first tokens do not name is not served."""
        if self.refusal or request.prompt_embeds is not None or request.resumable:
            return
        items = [
            (each.identifier, each.mm_position.offset, each.mm_position.length)
            for each in request.mm_features
        ]
        spec = self._base if request.lora_request is None else None
        extras = request_extras(request.cache_salt, items)
        self._requests[request.request_id] = Tracked(request, spec, extras, self._hints(request))

    def _hints(self, request: EngineRequest) -> Hints:
        """What the request says; nothing, and one line, where it says what cannot be."""
        if not self._policy.request_hints:
            return NO_HINTS
        try:
            return hints_of(request.kv_transfer_params)
        except HintsError as error:
            name = str(error).partition(" ")[0]
            if name not in self._told:
                self._told.add(name)
                _log.warning("kvstore ignores the hints of request %s: %s", request.request_id, error)
            return NO_HINTS

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load behind the engine's own ``local_tokens``; None asks to be asked again."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.local_blocks = local_tokens // self._block_size
        # After a load of all tokens vLLM computes the last one again, from windows that were allocated for
        # the one after it and may begin a token too late.
        whole = self._policy.asynchronous and self._policy.groups.window is None
        longest = request.num_tokens - (0 if whole else 1)
        wanted = longest // self._block_size
        # An adapter's namespace is known only once it was asked for, also by who just saves.
        unwanted = tracked.spec is not None and not self._policy.loads
        unwanted = unwanted or request.skip_reading_prefix_cache or tracked.failed
        if unwanted or wanted <= tracked.local_blocks:
            self._drop_answer(tracked)
            tracked.saved_blocks = self._known_blocks(request, tracked.local_blocks)
            return 0, False
        answer = self._answer(tracked)
        if answer is None:
            return None, False
        tracked.saved_blocks = self._known_blocks(request, tracked.local_blocks)
        if tracked.saved_blocks >= answer.first_block:
            tracked.saved_blocks = answer.end
        new_blocks = min(wanted, answer.end) - tracked.local_blocks
        if new_blocks <= 0 or not self._policy.loads:
            return 0, False
        return new_blocks * self._block_size, self._policy.asynchronous

    def _known_blocks(self, request: EngineRequest, blocks: int) -> int:
        """Leading blocks that need not be saved; none where the store may have lost some."""
        failures = sum(self._lookups.failures.values())
        if failures > self._failures:
            self._failures = failures
            self._known.clear()
        return self._known.leading(request.block_hashes, blocks)

    def _answer(self, tracked: Tracked) -> Answer | None:
        answer = tracked.answer or self._new_answer(tracked)
        if answer is not None and tracked.local_blocks < answer.first_block:
            self._drop_answer(tracked)  # what the engine had when it asked, it has no longer
            return None
        return answer

    def _new_answer(self, tracked: Tracked) -> Answer | None:
        if tracked.pending is None:
            tracked.pending = self._lookups.ask(self._question(tracked))
            self._tally.add("lookups", 1)
        began = self._clock()
        answer = tracked.pending.poll(max(0.0, self._patience_left))
        now = self._clock()
        self._patience_left -= now - began
        if answer is None:
            if now - tracked.pending.asked_at < self._policy.lookup_seconds:
                return None
            self._lookups.forget(tracked.pending)
            self._tally.add("late_lookups", 1)
            answer = NOTHING
        tracked.pending, tracked.answer = None, answer
        self._know(tracked, answer)
        if answer.spec is not None and not tracked.stale:
            tracked.spec = answer.spec
        return answer

    def _question(self, tracked: Tracked) -> Question:
        request, base = tracked.request, self._base

        def spec() -> NamespaceSpec:
            lora = request.lora_request
            if lora is None:
                return base
            return adapted(base, self._adapters.adapter_of(lora.lora_name, lora.lora_path))

        return Question(
            request.request_id,
            spec,
            list(request.all_token_ids),
            tracked.extras,
            tracked.local_blocks,
            tracked.hints,
        )

    def _know(self, tracked: Tracked, answer: Answer) -> None:
        if not tracked.stale:
            self._known.add(tracked.request.block_hashes[answer.first_block : answer.end])

    def _drop_answer(self, tracked: Tracked, used_blocks: int = 0) -> None:
        if tracked.pending is not None:
            self._lookups.forget(tracked.pending)
            tracked.pending = None
        if tracked.answer is not None:
            self._lookups.release(tracked.answer, used_blocks)
            tracked.answer = None

    # What the scheduler has decided.

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], external_tokens: int) -> None:
        """The request has its blocks; ``external_tokens`` of them are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        count = external_tokens // self._block_size
        ticket = None
        if count and tracked.answer is not None and tracked.answer.lease is not None:
            ticket = tracked.answer.lease.ticket()
        first = tracked.local_blocks
        targets = list(block_ids[first * self._width : (first + count) * self._width])
        if tracked.answer is None or tracked.spec is None or not count:
            # What the engine has itself by now was of use to it, wherever it came from.
            begun = 0 if tracked.answer is None else tracked.answer.first_block
            self._drop_answer(tracked, max(0, first - begun))
            return
        first -= tracked.answer.first_block
        self._loads[request.request_id] = Load(tracked.answer, first, count, good_blocks=count)
        # A lease that was lost in between has none, or a shorter one; then the workers say so.
        part = None if ticket is None or ticket.blocks < first + count else ticket.part(first, count)
        self._new_loads.append(LoadJob(request.request_id, tracked.spec, part, targets))
        tracked.answer = None
        self._tally.add("hits", 1)

    def hit_tiers(self, request_id: str, tokens: int) -> dict[TierName, int]:
        """Where the tokens of a load come from; the slowest tiers hold the end of a run."""
        load = self._loads.get(request_id)
        if load is None or load.answer.lease is None:
            return {}
        found: dict[TierName, int] = {}
        place = 0
        for tier, blocks in load.answer.lease.hit_blocks.items():
            first, place = max(place, load.first_block), place + blocks
            stop = min(place, load.first_block + load.blocks)
            if stop > first:
                found[tier] = (stop - first) * self._block_size
        return found if sum(found.values()) == tokens else {}

    def orders(self, scheduled: Iterable[tuple[str, int]], table_of: Callable[[str], list[int]]) -> Orders:
        """For the step in which each of the requests computes so many tokens."""
        if self._patience_left < self._patience:
            self._tally.waited(self._patience - self._patience_left)
        idle = True
        for request_id, tokens in scheduled:
            idle = False
            tracked = self._requests.get(request_id)
            if tracked is not None:
                end = self._due(tracked, tracked.request.num_computed_tokens + tokens)
                if end // self._block_size > tracked.saved_blocks:
                    self._save(tracked, end, table_of(request_id))
        self._patience = self._patience_left = _IDLE_PATIENCE_SECONDS if idle else _PATIENCE_SECONDS
        loads, self._new_loads = self._new_loads, []
        saves, verdicts = self._saves.take_orders()
        return Orders(loads, saves, verdicts if self._policy.ranks > 1 else {}, idle)

    def _due(self, tracked: Tracked, computed_tokens: int) -> int:
        """How far a request is to be saved in the step after which so many of its tokens are computed."""
        if not self._savable(tracked):
            return 0
        # Of what is generated some may be taken back; it is saved when the request ends.
        end = min(computed_tokens, tracked.request.num_prompt_tokens)
        patience = self._policy.groups.unsaved_blocks
        if patience is not None:
            # Or before windows let go of it.
            certain = min(computed_tokens, tracked.request.num_tokens)
            if certain // self._block_size - tracked.saved_blocks >= patience:
                end = max(end, certain)
        return end

    def _savable(self, tracked: Tracked) -> bool:
        return self._policy.saves and tracked.spec is not None and not tracked.stale

    def _save(self, tracked: Tracked, tokens: int, block_ids: Sequence[int]) -> None:
        assert tracked.spec is not None
        blocks = tokens // self._block_size
        count = blocks * self._block_size
        tracked.token_ids.extend(tracked.request.all_token_ids[len(tracked.token_ids) : count])
        prefix = Prefix(
            tracked.request.request_id,
            tracked.spec,
            tracked.extras,
            tracked.token_ids[:count].tobytes(),
            list(block_ids[: blocks * self._width]),
            tracked.request.block_hashes[:blocks],
            tracked.hints,
        )
        if not self._saves.begin(prefix, tracked.saved_blocks):
            self._tally.add("refused_saves", 1)
        tracked.saved_blocks = blocks

    # What came of it.

    def progressed(self, progress: Progress, bad_blocks: Set[int]) -> None:
        """A step is over: what its ranks did, and the engine's blocks that could not be loaded."""
        self.refusal = self.refusal or progress.refusal
        if bad_blocks:
            self._tally.add("failed_load_blocks", len(bad_blocks))
        for request_id, first_block in self._saves.update(progress, bad_blocks):
            self._tally.add("dropped_saves", 1)
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.saved_blocks = min(tracked.saved_blocks, first_block)
        for request_id, ranks in progress.loaded.items():
            load = self._loads.get(request_id)
            if load is None:
                continue
            load.ranks += ranks
            load.good_blocks = min(load.good_blocks, progress.good_blocks[request_id])
            if load.ranks >= self._policy.ranks:
                self._end_load(request_id, load)

    def _end_load(self, request_id: str, load: Load) -> None:
        del self._loads[request_id]
        good = load.first_block + load.good_blocks
        self._lookups.release(load.answer, good, range(load.first_block, good))
        complete = load.good_blocks == load.blocks
        if complete or not self._policy.groups.hybrid:
            self._tally.add("loaded_tokens", load.good_blocks * self._block_size)
        else:  # with several tables of blocks vLLM takes all of a load or nothing, and is told of no block
            self._tally.add("failed_load_blocks", load.blocks)
        tracked = self._requests.get(request_id)
        if tracked is not None and not complete:
            # What was not right in the store is stored again.
            tracked.failed = True
            tracked.saved_blocks = min(tracked.saved_blocks, load.answer.first_block + good)
            self._known.clear()

    def finished(self, request: EngineRequest, block_ids: Sequence[int]) -> None:
        """A request has ended, in whatever state; save what it computed and is not saved."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._drop_answer(tracked)
        if request.request_id in self._loads or not block_ids:
            return  # its blocks are not filled yet
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        end = min(computed, request.num_tokens - 1, len(block_ids) // self._width * self._block_size)
        if self._savable(tracked) and end // self._block_size > tracked.saved_blocks:
            self._save(tracked, end, block_ids)

    def reset(self) -> None:
        """The weights are others now: nothing that is stored is right for them."""
        self._base = with_new_weights(self._policy.spec, self._mark())
        self._known.clear()
        self._saves.disown()
        for tracked in self._requests.values():
            self._drop_answer(tracked)
            tracked.saved_blocks = 0
            tracked.spec = self._base if tracked.request.lora_request is None else None
            # What it has computed by now is of the old weights, and of no namespace.
            tracked.stale = tracked.request.num_computed_tokens > 0

    def close(self) -> None:
        for tracked in self._requests.values():
            self._drop_answer(tracked)
        for load in self._loads.values():
            self._lookups.release(load.answer, 0)
        self._lookups.close()
