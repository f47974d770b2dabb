"""Who gets in, who computes what in a step, and who gives way: decisions on plain data.

Nothing here knows blocks, models or clocks. The engine asks, and does what it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

PROMPTS_MAX = 8
"""Prompts that FAIR computes side by side."""

_CHUNK_MIN = 16
_DECODE_FIRST_SHARE = 4


class Policy(StrEnum):
    """Whose time comes first. In each of them every running decode gets its token in every step.

    Prompts are computed in order of arrival, but for CACHE_AWARE and FAIR. ``step_tokens`` bounds a
    step, and with it the time between two tokens of a running answer:

    - PREFILL_FIRST: prompts get all of it, decodes come on top, and prompts get in wherever there is
      room, at the price of later preemptions.
    - DECODE_FIRST: decodes count, and beside them prompts get a quarter of it at most.
    - FAIR: decodes count; the prompts under way share what is left, so that a short prompt is not
      held up by a long one.
    - CACHE_AWARE: decodes count; the longest cached prefix gets in first. Who has waited for
      ``aging_seconds`` is overtaken by nobody who came later.
    """

    PREFILL_FIRST = "prefill_first"
    DECODE_FIRST = "decode_first"
    FAIR = "fair"
    CACHE_AWARE = "cache_aware"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that waits. ``number`` is its place in the order of arrival, ``waited`` seconds."""

    name: str
    number: int
    waited: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A request that has memory: ``pending`` tokens are known and not computed."""

    name: str
    number: int
    pending: int
    prefilling: bool


@dataclass(frozen=True, slots=True)
class Share:
    """What one request computes in a step."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """``chunked`` False computes the whole suffix of a prompt at once, whatever ``step_tokens`` says."""

    step_tokens: int = 512
    policy: Policy = Policy.FAIR
    chunked: bool = True
    running_max: int = 64
    aging_seconds: float = 5.0


class Scheduler:
    """A function of what waits and what runs; it keeps no state."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options

    @property
    def asks_cache(self) -> bool:
        """Whether ``order`` looks at ``cached_tokens``."""
        return self._options.policy is Policy.CACHE_AWARE

    def order(self, waiting: Iterable[Candidate]) -> list[str]:
        """Names in the order in which they are to get in."""
        return [each.name for each in sorted(waiting, key=self._rank)]

    def takes_more(self, jobs: Sequence[Job]) -> bool:
        """Whether one more prompt would be computed in the next step."""
        if len(jobs) >= self._options.running_max:
            return False
        prompts = [job for job in jobs if job.prefilling]
        if self._options.policy is Policy.FAIR and self._options.chunked:
            return len(prompts) < PROMPTS_MAX
        budget = self._prompt_tokens(len(jobs) - len(prompts))
        return sum(job.pending for job in prompts) < budget

    def spare_blocks(self, running: int) -> int:
        """Blocks to leave free when a request gets in beside ``running`` ones, which will grow."""
        return 0 if self._options.policy is Policy.PREFILL_FIRST else running

    def share(self, jobs: Sequence[Job]) -> list[Share]:
        """The next step: a token of every decode, and chunks of prompts, in the order of ``jobs``."""
        decodes = [Share(job.name, 1) for job in jobs if not job.prefilling]
        prompts = [job for job in jobs if job.prefilling]
        budget = self._prompt_tokens(len(decodes))
        if not self._options.chunked:
            return decodes + _whole(prompts, budget)
        if self._options.policy is Policy.FAIR:
            return decodes + _even(prompts, budget)
        return decodes + _in_turn(prompts, budget)

    @staticmethod
    def victim(jobs: Iterable[Job]) -> str:
        """Who loses its memory when one of ``jobs`` lacks a block: the newest, perhaps that one itself."""
        return max(jobs, key=lambda job: job.number).name

    def _rank(self, candidate: Candidate) -> tuple[int, int, int]:
        if not self.asks_cache:
            return 0, 0, candidate.number
        if candidate.waited >= self._options.aging_seconds:
            return 0, 0, candidate.number
        return 1, -candidate.cached_tokens, candidate.number

    def _prompt_tokens(self, decodes: int) -> int:
        """Prompt tokens of a step beside ``decodes``: never so few that prompts stand still."""
        size, policy = self._options.step_tokens, self._options.policy
        if policy is Policy.PREFILL_FIRST:
            return size
        left = size - decodes
        if policy is Policy.DECODE_FIRST and decodes:
            left = min(left, size // _DECODE_FIRST_SHARE)
        return max(left, min(_CHUNK_MIN, size))


def _whole(prompts: Sequence[Job], budget: int) -> list[Share]:
    """Whole prompts in turn while they fit; the first one always."""
    shares: list[Share] = []
    for job in prompts:
        budget -= job.pending
        if budget < 0 and shares:
            break
        shares.append(Share(job.name, job.pending))
    return shares


def _in_turn(prompts: Sequence[Job], budget: int) -> list[Share]:
    """As much of each as is left for it."""
    shares: list[Share] = []
    for job in prompts:
        if budget <= 0:
            break
        shares.append(Share(job.name, min(job.pending, budget)))
        budget -= job.pending
    return shares


def _even(prompts: Sequence[Job], budget: int) -> list[Share]:
    """The same for each; what a short one leaves is for the longer ones."""
    shares: list[Share] = []
    by_length = sorted(prompts, key=lambda job: job.pending)
    for place, job in enumerate(by_length):
        tokens = min(job.pending, budget // (len(by_length) - place))
        if tokens:
            shares.append(Share(job.name, tokens))
        budget -= tokens
    return shares
