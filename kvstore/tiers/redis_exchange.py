"""One call of the tier as exchanges with the servers that it concerns, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvstore.block import MissCause
from kvstore.tiers.redis_commands import RowKeys, Span, count
from kvstore.tiers.redis_node import BusyError, Lane
from kvstore.tiers.redis_topology import Route, Topology
from kvstore.tiers.redis_wire import ErrorReply, Wire

_ASKING = b"*1\r\n$6\r\nASKING\r\n"
# A slot that moved may be on its way again: MOVED, then ASK.
_MOST_HOPS = 2

Q = TypeVar("Q")
A = TypeVar("A")
Exchange = Callable[[Wire, Sequence[Q], list[A | ErrorReply | MissCause]], None]
"""Asks some questions over a wire and appends their answers, also where it raises on the way."""


class _Errand(NamedTuple):
    route: Route
    at: Sequence[int]
    hops: int


class Exchanges:
    """Puts questions about blocks to the servers that have them, and follows where those point."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def ask(
        self, lane: Lane, tagged: tuple[bytes, Sequence[Q]], deadline: float, exchange: Exchange[Q, A]
    ) -> list[A | ErrorReply | MissCause]:
        """One answer a question; ``tagged`` are their segment tags, packed, and the questions.

        TIMEOUT and UNAVAILABLE stand for an exchange that failed. After a server whose last answer
        is that or an error, no other is asked: what follows in a chain is of no use without it.
        """
        tags, questions = tagged
        if not questions:
            return []
        try:
            shares = self._topology.shares(tags, deadline)
        except OSError as error:
            return [_cause(error)] * len(questions)
        answers: dict[int, A | ErrorReply | MissCause] = {}
        errands = deque(_Errand(Route(node), at, 0) for node, at in shares)
        last: A | ErrorReply | MissCause = MissCause.UNAVAILABLE
        while errands:
            errand = errands.popleft()
            got = self._visit(lane, errand.route, [questions[i] for i in errand.at], deadline, exchange)
            answers.update(zip(errand.at, got, strict=True))
            again = self._followed(errand, got)
            errands.extend(again)
            last = got[-1]
            if not again and (
                isinstance(last, ErrorReply) or last in (MissCause.TIMEOUT, MissCause.UNAVAILABLE)
            ):
                break
        return [answers.get(i, last) for i in range(len(questions))]

    def counts(self, keys: RowKeys, spans: Sequence[Span], deadline: float) -> list[int | MissCause]:
        """How many keys of each span exist; a span lies within one segment. Else why that is not known."""

        def exchange(wire: Wire, asked: Sequence[Span], got: list[int | ErrorReply | MissCause]) -> None:
            got.extend(count(wire, keys, asked))

        def ask(asked: Sequence[Span]) -> list[int | ErrorReply | MissCause]:
            tags = b"".join(keys.tag(start) for start, _ in asked)
            return self.ask(Lane.PROBE, (tags, asked), deadline, exchange)

        answers = ask(spans)
        return [
            # Some keys of a slot on its way are here and some there: each has to be asked for alone.
            _sum(ask([(block, block + 1) for block in range(*span)]))
            if isinstance(answer, ErrorReply) and answer.code == "TRYAGAIN"
            else _known(answer)
            for span, answer in zip(spans, answers, strict=True)
        ]

    def _visit(
        self, lane: Lane, route: Route, questions: Sequence[Q], deadline: float, exchange: Exchange[Q, A]
    ) -> list[A | ErrorReply | MissCause]:
        got: list[A | ErrorReply | MissCause] = []
        try:
            with route.node.borrow(lane, deadline) as wire:
                wire.preface = _ASKING if route.asking else b""
                exchange(wire, questions, got)
                return got
        except OSError as error:
            if not isinstance(error, BusyError):
                self._topology.lost(route.node)
            return got + [_cause(error)] * (len(questions) - len(got))

    def _followed(self, errand: _Errand, got: Sequence[A | ErrorReply | MissCause]) -> list[_Errand]:
        if errand.hops == _MOST_HOPS:
            return []
        routes: dict[ErrorReply, Route | None] = {}
        places: dict[Route, list[int]] = {}
        for i, answer in zip(errand.at, got, strict=True):
            if not isinstance(answer, ErrorReply):
                continue
            if answer not in routes:
                routes[answer] = self._topology.follow(answer, errand.route.node)
            route = routes[answer]
            if route is not None:
                places.setdefault(route, []).append(i)
        return [_Errand(route, at, errand.hops + 1) for route, at in places.items()]


def _cause(error: OSError) -> MissCause:
    return MissCause.TIMEOUT if isinstance(error, TimeoutError) else MissCause.UNAVAILABLE


def _known(answer: int | ErrorReply | MissCause) -> int | MissCause:
    return MissCause.UNAVAILABLE if isinstance(answer, ErrorReply) else answer


def _sum(answers: Sequence[int | ErrorReply | MissCause]) -> int | MissCause:
    total = 0
    for answer in map(_known, answers):
        if isinstance(answer, MissCause):
            return answer
        total += answer
    return total
