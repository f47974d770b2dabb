"""What scheduler and workers tell each other about blocks, apart from how it travels. Picklable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hashing import Extras
from kvstore.hints import NO_HINTS, Hints
from kvstore.service.client import Ticket
from kvstore.spec import NamespaceSpec


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Fill the engine's blocks ``block_ids``, as ``groups`` lists them, with the blocks of ``ticket``.

    Without a ticket nothing can be read any more, and all of them are to be reported.
    """

    request_id: str
    spec: NamespaceSpec
    ticket: Ticket | None
    block_ids: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class SaveJob:
    """Store blocks ``first_block`` … of a prompt: whole blocks of ``token_ids`` (u32 LE).

    ``block_ids`` are the engine's blocks from block 0 on, as ``groups`` lists them: what is stored is
    right only if all of them are.
    """

    job_id: int
    spec: NamespaceSpec
    extras: Extras | None
    token_ids: bytes
    first_block: int
    block_ids: list[int]
    hints: Hints = NO_HINTS


@dataclass(slots=True, eq=False)
class Orders:
    """What the workers are to do in one step.

    ``verdicts`` say of saves that are filled whether to publish them. ``idle`` is a step without
    tokens: there is time to wait a moment for what is under way.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    verdicts: dict[int, bool] = field(default_factory=dict)
    idle: bool = False


@dataclass(slots=True, eq=False)
class Progress:
    """What became of orders, over any number of ranks.

    By request id, ``loaded`` are ranks whose load is over and ``good_blocks`` the blocks that every
    one of them has. By job id, ``computed`` are ranks that computed the blocks of a save in this
    step, ``ended`` ranks that are through with it, and ``stored`` those of them whose blocks are all
    stored now.
    """

    loaded: Counter[str] = field(default_factory=Counter)
    good_blocks: dict[str, int] = field(default_factory=dict)
    computed: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    refusal: str = ""

    def __bool__(self) -> bool:
        return bool(self.loaded or self.computed or self.ended or self.refusal)

    def load_over(self, request_id: str, blocks: int) -> None:
        self.loaded[request_id] += 1
        self.good_blocks[request_id] = blocks

    def add(self, other: Progress) -> None:
        """Take the progress of another rank, or of a later step, into this one."""
        self.loaded += other.loaded
        self.computed += other.computed
        self.ended += other.ended
        self.stored += other.stored
        self.refusal = self.refusal or other.refusal
        merge_minimum(self.good_blocks, other.good_blocks)


def merge_minimum(into: dict[str, int], others: Mapping[str, int]) -> None:
    for name, value in others.items():
        into[name] = min(value, into.get(name, value))
