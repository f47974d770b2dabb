"""One call of the tier as exchanges with the servers that it concerns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from kvstore.block import MissCause
from kvstore.tiers.redis_keys import RowKeys, Span
from kvstore.tiers.redis_match import ask_counts, read_counts
from kvstore.tiers.redis_node import BusyError, Lane, Loan, Node, NotReadyError
from kvstore.tiers.redis_topology import Route, Share, Topology
from kvstore.tiers.redis_wire import ErrorReply, Wire

_ASKING = b"*1\r\n$6\r\nASKING\r\n"
# A slot that moved may be on its way again: MOVED, then ASK.
_MOST_HOPS = 2

Q = TypeVar("Q")
A = TypeVar("A")
Exchange = Callable[[Wire, Sequence[Q], list[A | ErrorReply | MissCause]], None]
"""Asks some questions over a wire and appends their answers, also where it raises on the way."""

Count = int | ErrorReply | MissCause


class Errand(NamedTuple):
    """Some of the questions of a call, by their places in it, for one server; ``hops`` from the first."""

    route: Route
    at: Sequence[int]
    hops: int = 0


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
        errands = [Errand(Route(node), at) for node, at in shares]
        last = self.run(lane, errands, (questions, answers), deadline, exchange)
        return [answers.get(i, last) for i in range(len(questions))]

    def run(
        self,
        lane: Lane,
        errands: Iterable[Errand],
        asked: tuple[Sequence[Q], dict[int, A | ErrorReply | MissCause]],
        deadline: float,
        exchange: Exchange[Q, A],
    ) -> A | ErrorReply | MissCause:
        """Do errands one by one, and what they lead to. ``asked`` is questions, and answers by place.

        Returns the last answer, which stands for those that are missing.
        """
        questions, answers = asked
        left = deque(errands)
        last: A | ErrorReply | MissCause = MissCause.UNAVAILABLE
        while left:
            errand = left.popleft()
            got = self._visit(lane, errand.route, [questions[i] for i in errand.at], deadline, exchange)
            answers.update(zip(errand.at, got, strict=True))
            again = self.followed(errand, got)
            left.extend(again)
            last = got[-1]
            if not again and (
                isinstance(last, ErrorReply) or last in (MissCause.TIMEOUT, MissCause.UNAVAILABLE)
            ):
                break
        return last

    def followed(self, errand: Errand, got: Sequence[A | ErrorReply | MissCause]) -> list[Errand]:
        """Where to ask once more what was answered with an error that points elsewhere."""
        if errand.hops == _MOST_HOPS or not any(isinstance(answer, ErrorReply) for answer in got):
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
        return [Errand(route, at, errand.hops + 1) for route, at in places.items()]

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


class LookUp:
    """How many keys of some spans exist, in one round after another by ``deadline``.

    The servers of one round are all asked before the first one is read. Connections are kept from
    round to round, hence a context manager. Only the first is waited for: who holds one and waits for
    another might wait for somebody who does the same.
    """

    def __init__(self, topology: Topology, keys: RowKeys, deadline: float) -> None:
        self._topology = topology
        self._exchanges = Exchanges(topology)
        self._keys = keys
        self._deadline = deadline
        self._loans: dict[Node, Loan] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back(error)

    def counts(
        self, spans: Sequence[Span], meanwhile: Callable[[], object] | None = None
    ) -> Sequence[int | MissCause]:
        """See ``Counts``."""
        return [
            answer if isinstance(answer, int) else self._known(span, answer)
            for span, answer in zip(spans, self._ask(spans, meanwhile), strict=True)
        ]

    def _known(self, span: Span, answer: Count) -> int | MissCause:
        if not isinstance(answer, ErrorReply):
            return answer
        # Some keys of a slot on its way are here and some there: each has to be asked for alone. A
        # proxy before a cluster may take no more than a segment.
        if answer.code == "TRYAGAIN":
            finer = [(block, block + 1) for block in range(*span)]
        elif answer.code == "CROSSSLOT":
            finer = self._keys.segments(span)
        else:
            return MissCause.UNAVAILABLE
        return _sum(self._ask(finer))

    def _ask(self, spans: Sequence[Span], meanwhile: Callable[[], object] | None = None) -> Sequence[Count]:
        tags = b"".join([self._keys.tag(start) for start, _ in spans])
        try:
            shares = self._topology.shares(tags, self._deadline)
        except OSError as error:
            return [_cause(error)] * len(spans)
        sent, errands, last = self._send(shares, spans)
        if meanwhile is not None:
            meanwhile()
        answers: dict[int, Count] = {}
        heard = True
        for node, at in sent:
            if not heard:
                # Of no use without what was lost before it: whoever borrows the wire next drops it.
                self._loans[node].wire.owe(len(at))
                continue
            got = self._read(node, len(at))
            if len(got) == len(spans) and all(isinstance(count, int) for count in got):
                return got
            answers.update(zip(at, got, strict=True))
            errands += self._exchanges.followed(Errand(Route(node), at), got)
            if isinstance(got[-1], MissCause):
                heard, last = False, got[-1]
        if errands and heard:
            self._give_back(None)
            self._exchanges.run(Lane.PROBE, errands, (spans, answers), self._deadline, self._ask_and_read)
        return [answers.get(i, last) for i in range(len(spans))]

    def _send(
        self, shares: Sequence[Share], spans: Sequence[Span]
    ) -> tuple[list[Share], list[Errand], MissCause]:
        """Ask everybody: who was asked, who has no connection free at once, why others were not asked."""
        sent: list[Share] = []
        postponed: list[Errand] = []
        for node, at in shares:
            try:
                if node not in self._loans:
                    patient = not self._loans
                    self._loans[node] = node.lend(Lane.PROBE, self._deadline, patient=patient)
                ask_counts(self._loans[node].wire, self._keys, [spans[i] for i in at])
            except NotReadyError:
                postponed.append(Errand(Route(node), at))
                continue
            except OSError as error:
                # What follows in a chain is of no use without this.
                self._lose(node, error)
                return sent, postponed, _cause(error)
            sent.append((node, at))
        return sent, postponed, MissCause.UNAVAILABLE

    def _read(self, node: Node, replies: int) -> list[Count]:
        got: list[Count] = []
        try:
            read_counts(self._loans[node].wire, replies, got)
        except OSError as error:
            self._lose(node, error)
            got += [_cause(error)] * (replies - len(got))
        return got

    def _lose(self, node: Node, error: OSError) -> None:
        loan = self._loans.pop(node, None)
        if loan is not None:
            loan.end(error)
        if not isinstance(error, BusyError):
            self._topology.lost(node)

    def _give_back(self, error: BaseException | None) -> None:
        while self._loans:
            self._loans.popitem()[1].end(error)

    def _ask_and_read(self, wire: Wire, spans: Sequence[Span], got: list[Count]) -> None:
        ask_counts(wire, self._keys, spans)
        read_counts(wire, len(spans), got)


def _cause(error: OSError) -> MissCause:
    return MissCause.TIMEOUT if isinstance(error, TimeoutError) else MissCause.UNAVAILABLE


def _sum(answers: Sequence[Count]) -> int | MissCause:
    total = 0
    for answer in answers:
        if not isinstance(answer, int):
            return answer if isinstance(answer, MissCause) else MissCause.UNAVAILABLE
        total += answer
    return total
