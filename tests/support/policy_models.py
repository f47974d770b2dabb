"""Slow models of policies over single blocks: lists of names, looked through from the front each time."""

from __future__ import annotations

from collections.abc import Iterable


def first_leaf(names: Iterable[str], leaves: Iterable[str]) -> str | None:
    allowed = set(leaves)
    return next((name for name in names if name in allowed), None)


class SlowLFU:
    def __init__(self) -> None:
        self.uses: dict[str, int] = {}
        self.used_at: dict[str, tuple[int, int]] = {}
        self.ghosts: dict[str, int] = {}
        self.now = 0

    def request(self, names: list[str], hits: int) -> None:
        for group in (names[:hits], names[hits:]):
            self.now += 1
            for depth, name in enumerate(group):
                before = self.uses[name] if name in self.uses else self.ghosts.pop(name, 0)
                self.uses[name] = before + 1
                self.used_at[name] = (self.now, -depth)

    def victim(self, leaves: list[str]) -> str:
        name = min(leaves, key=lambda each: (self.uses[each], self.used_at[each]))
        resident = len(self.uses)
        self.ghosts[name] = self.uses.pop(name)
        while len(self.ghosts) > 4 * resident:
            del self.ghosts[next(iter(self.ghosts))]
        return name


class SlowS3FIFO:
    def __init__(self) -> None:
        self.small: list[str] = []
        self.main: list[str] = []
        self.uses: dict[str, int] = {}
        self.ghosts: list[str] = []

    def request(self, names: list[str], hits: int) -> None:
        for name in names[:hits]:
            self.uses[name] = min(3, self.uses[name] + 1)
        for name in reversed(names[hits:]):
            self.uses[name] = 0
            if name in self.ghosts:
                self.ghosts.remove(name)
                self.main.append(name)
            else:
                self.small.append(name)

    def victim(self, leaves: list[str]) -> str:
        small_first = len(self.small) >= 0.1 * (len(self.small) + len(self.main))
        ways = (self._from_small, self._from_main)
        for way in ways if small_first else reversed(ways):
            name = way(leaves)
            if name is not None:
                self.ghosts = self.ghosts[max(0, len(self.ghosts) - len(self.main)) :]
                return name
        raise AssertionError("there are leaves")

    def _from_small(self, leaves: list[str]) -> str | None:
        while (name := first_leaf(self.small, leaves)) is not None:
            self.small.remove(name)
            if self.uses[name] <= 1:
                self.ghosts.append(name)
                return name
            self.uses[name] = 0
            self.main.append(name)
        return None

    def _from_main(self, leaves: list[str]) -> str | None:
        while (name := first_leaf(self.main, leaves)) is not None:
            self.main.remove(name)
            if self.uses[name] == 0:
                return name
            self.uses[name] -= 1
            self.main.append(name)
        return None


class SlowARC:
    def __init__(self) -> None:
        self.recent: list[str] = []
        self.frequent: list[str] = []
        self.recent_ghosts: list[str] = []
        self.frequent_ghosts: list[str] = []
        self.target = 0.0
        self.room = 0

    def request(self, names: list[str], hits: int) -> None:
        # Tails first, so that heads are the most recent.
        for name in reversed(names[:hits]):
            (self.recent if name in self.recent else self.frequent).remove(name)
            self.frequent.append(name)
        self.room = max(self.room, len(self.recent) + len(self.frequent) + len(names) - hits)
        queues = {name: self._queue_for(name) for name in names[hits:]}
        for name in reversed(names[hits:]):
            queues[name].append(name)

    def victim(self, leaves: list[str]) -> str:
        ways = [(self.recent, self.recent_ghosts), (self.frequent, self.frequent_ghosts)]
        if len(self.recent) <= self.target:
            ways.reverse()
        for queue, ghosts in ways:
            name = first_leaf(queue, leaves)
            if name is not None:
                queue.remove(name)
                ghosts.append(name)
                break
        assert name is not None, "there are leaves"
        _keep_last(self.recent_ghosts, self.room - len(self.recent))
        resident = len(self.recent) + len(self.frequent)
        _keep_last(self.frequent_ghosts, 2 * self.room - resident - len(self.recent_ghosts))
        return name

    def _queue_for(self, name: str) -> list[str]:
        recent, frequent = len(self.recent_ghosts), len(self.frequent_ghosts)
        if name in self.recent_ghosts:
            self.target = min(float(self.room), self.target + max(1.0, frequent / recent))
            self.recent_ghosts.remove(name)
            return self.frequent
        if name in self.frequent_ghosts:
            self.target = max(0.0, self.target - max(1.0, recent / frequent))
            self.frequent_ghosts.remove(name)
            return self.frequent
        return self.recent


def _keep_last(names: list[str], count: int) -> None:
    del names[: max(0, len(names) - max(0, count))]
