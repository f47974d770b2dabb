"""Blocks between an engine's paged cache and slots in host memory, by way of a bounded staging area.

The way down is gather, then DMA; the way up is DMA, then scatter. Both run on one stream of the mover's,
beside the engine's: within it each step follows the one before, which is what lets the staging area be used
again, and the kernels take a fraction of what the bus takes. Going up, layers are sent in groups with a
fence after each, so that a model may compute its first layers while the others are on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvstore.tiers.device_copy import Integers, PagedBlocks

Fence: TypeAlias = Any
"""What a mover gives for "all that was asked until now": for ``wait``, or for its own kind of stream."""

_PITCH_MAX = 2**31 - 1
"""CUDA copies no rows that are further apart (``cudaDevAttrMaxPitch``), as slots of a large pool may be."""


class MoverError(Exception):
    """A mover does not work on this machine, for the reason that the message names."""


class Rows(NamedTuple):
    """``height`` pieces of ``width`` bytes, each ``pitch`` bytes after the one before on either side."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


class Mover(Protocol):
    """Does what it is asked in order, later; addresses are of device or host memory."""

    staging: Integers
    """Addresses of the slots of the staging area, equally far apart."""

    def gather(self, layers: tuple[int, int], block_ids: Integers, slots: Integers) -> None:
        """Copy layers [first, stop) of blocks from the paged cache to slots on the device."""

    def scatter(self, layers: tuple[int, int], block_ids: Integers, slots: Integers) -> None:
        """Copy layers [first, stop) of blocks from slots on the device to the paged cache."""

    def copy_rows(self, copies: Iterable[Rows]) -> None:
        """Copy between device and host memory."""

    def follow(self, fence: Fence) -> None:
        """What is asked from now on happens after a fence of another stream (None: of none)."""

    def fence(self) -> Fence: ...

    def wait(self, fence: Fence) -> None:
        """Return when what came before the fence has happened."""


class Transfers:
    """Loads and saves of one paged cache. Its owner keeps host slots and blocks as they are meanwhile.

    It says nothing of what the bytes are: who reads host slots re-checks their generations after the
    last fence has passed.
    """

    def __init__(self, paged: PagedBlocks, mover: Mover) -> None:
        self._paged = paged
        self._mover = mover

    def load(
        self, host_slots: Integers, block_ids: Integers, *, groups: int = 1, after: Fence = None
    ) -> list[tuple[int, Fence]]:
        """Begin to copy host slots into blocks: (first layer that is not there yet, fence) a group."""
        return list(self.load_in_turn(host_slots, block_ids, groups=groups, after=after))

    def load_in_turn(
        self, host_slots: Integers, block_ids: Integers, *, groups: int, after: Fence = None
    ) -> Iterator[tuple[int, Fence]]:
        """As ``load``, but a group's copies are submitted only when it is taken from the iterator.

        So whoever submits a group's layers before taking the next one has the device compute while the
        host submits copies.
        """
        self._mover.follow(after)
        for layers in self._paged.groups(groups):
            start, stop = self._span(layers)
            for part in self._pieces(len(block_ids)):
                staged = self._staged(part)
                self._mover.copy_rows(rows_between(staged + start, host_slots[part] + start, stop - start))
                self._mover.scatter(layers, block_ids[part], staged)
            yield layers[1], self._mover.fence()

    def save(self, block_ids: Integers, host_slots: Integers, *, after: Fence = None) -> Fence:
        """Begin to copy blocks, as they are after a fence of the engine's, into host slots."""
        self._mover.follow(after)
        layers = (0, self._paged.layers)
        size = self._paged.payload_bytes
        for part in self._pieces(len(block_ids)):
            staged = self._staged(part)
            self._mover.gather(layers, block_ids[part], staged)
            self._mover.copy_rows(rows_between(host_slots[part], staged, size))
        return self._mover.fence()

    def wait(self, fence: Fence) -> None:
        self._mover.wait(fence)

    def _span(self, layers: tuple[int, int]) -> tuple[int, int]:
        first, stop = layers
        return self._paged.spans[first][0], self._paged.spans[stop - 1][1]

    def _pieces(self, blocks: int) -> Iterator[slice]:
        room = len(self._mover.staging)
        return (slice(at, min(at + room, blocks)) for at in range(0, blocks, room))

    def _staged(self, part: slice) -> Integers:
        return self._mover.staging[: part.stop - part.start]


def rows_between(targets: Integers, sources: Integers, width: int) -> Iterator[Rows]:
    """The fewest copies of ``width`` bytes from each source to its target: evenly spaced ones are one.

    A pitch cannot be shorter than a row, nor longer than CUDA takes.
    """
    steps = np.stack([np.diff(targets), np.diff(sources)])
    fit: list[bool] = np.all((steps >= width) & (steps <= _PITCH_MAX), axis=0).tolist()
    changes = np.flatnonzero(np.diff(steps, axis=1).any(axis=0)) + 1
    ends, last = [*changes.tolist(), steps.shape[1]], steps.shape[1]
    places, origins, (to_steps, from_steps) = targets.tolist(), sources.tolist(), steps.tolist()
    at, spacing = 0, 0
    while at < len(places):
        end, pitch = at, (width, width)
        if at < last and fit[at]:
            while ends[spacing] <= at:
                spacing += 1
            end, pitch = ends[spacing], (to_steps[at], from_steps[at])
        yield Rows(places[at], pitch[0], origins[at], pitch[1], width, end - at + 1)
        at = end + 1
