"""Runs of parent and child: whose they are, what of them may go, in which order they were used."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy

_Places = NDArray[np.int64]
_NOBODY = -1
_BRANCHLESS = np.minimum(np.arange(1024, dtype=np.int32), 1).tobytes()
_UNPINNED = bytes(len(_BRANCHLESS))
"""Children, and pins, of the blocks of most runs, tail first: to compare bytes costs less than arithmetic."""


def owned_runs(owner_of: NDArray[np.int64], slots: SlotArray) -> Iterable[tuple[int, int, int]]:
    """(Owner, start, stop) for each stretch of a prompt's blocks with one owner, in order.

    An owner's blocks hang together, so each has one stretch.
    """
    owners = owner_of[slots]
    first = int(owners[0])
    if first == owners[-1]:
        return ((first, 0, len(slots)),)
    starts = [0, *((owners[1:] != owners[:-1]).nonzero()[0] + 1).tolist()]
    return zip(owners[starts].tolist(), starts, [*starts[1:], len(slots)], strict=True)


def leading_leaves(occupancy: Occupancy, tail_first: SlotArray) -> SlotArray:
    """The longest start of a run, tail first, of which each is a leaf once its predecessors are gone."""
    children, pins = occupancy.children[tail_first], occupancy.pins[tail_first]
    size = children.nbytes
    if children.tobytes() == _BRANCHLESS[:size] and pins.tobytes() == _UNPINNED[:size]:
        return tail_first
    children[1:] -= occupancy.parent[tail_first[:-1]] == tail_first[1:]
    blocked = (children + pins).nonzero()[0]
    return tail_first[: blocked[0]] if len(blocked) else tail_first


def runs_by_use(
    slots: SlotArray, parents: SlotArray, used_at: NDArray[np.float64], lost: NDArray[np.bool_]
) -> list[tuple[float, SlotArray]]:
    """Cut blocks into (time, run) of parent and child that were used at one time, oldest first.

    ``parents`` are the slots of the blocks' parents, -1 where one is not resident; a parent that is
    must be among ``slots``. ``lost`` are blocks that had one: they and what hangs from them cannot be
    reached, so they go first. Within a run parents come first. A block is as recent as the most recent
    block that hangs from it.
    """
    if not len(slots):
        return []
    above = _places(slots, parents)
    used = _latest_below(above, used_at)
    path, top, depth = _paths(above, used)
    order = np.lexsort((depth, path, used))
    cuts = np.flatnonzero((np.diff(path[order]) != 0) | (np.diff(used[order]) != 0)) + 1
    runs = np.split(order, cuts)
    heads = np.array([run[0] for run in runs])
    # Within one time the deepest go first, so that a run comes after what hangs from it.
    ranked = np.lexsort((-depth[heads], used[heads], ~lost[top[heads]]))
    return [(float(used[heads[at]]), slots[runs[at]]) for at in ranked.tolist()]


def runs_below(parents: NDArray[np.int32], tops: SlotArray) -> list[SlotArray]:
    """``tops`` and all that hang from them, in runs of parent and child, in the order in which they may go.

    ``parents`` is that of every slot, -1 where it has none; ``tops`` have none.
    """
    by_parent = np.argsort(parents, kind="stable")
    sorted_parents = parents[by_parent]
    found, level = [tops], tops
    while len(level):
        first = np.searchsorted(sorted_parents, level, side="left")
        last = np.searchsorted(sorted_parents, level, side="right")
        level = np.concatenate([by_parent[start:stop] for start, stop in zip(first, last, strict=True)])
        found.append(level)
    slots = np.concatenate(found)
    nothing = np.zeros(len(slots))
    runs = runs_by_use(slots, parents[slots].astype(np.int64), nothing, nothing.astype(np.bool_))
    return [run for _, run in runs]


def _places(slots: SlotArray, parents: SlotArray) -> _Places:
    """Where each block's parent is among ``slots``."""
    place = np.full(int(max(slots.max(), parents.max())) + 2, _NOBODY, dtype=np.int64)
    place[slots] = np.arange(len(slots))
    return np.asarray(place[parents])  # -1 reads the last entry, which is nobody's


def _latest_below(above: _Places, used_at: NDArray[np.float64]) -> NDArray[np.float64]:
    """The latest use of each block and of all that hang from it, by doubling steps upwards."""
    used = used_at.copy()
    reach = above
    while (climbing := np.flatnonzero(reach != _NOBODY)).size:
        np.maximum.at(used, reach[climbing], used[climbing])
        reach = _step(reach, reach)
    return used


def _paths(above: _Places, used: NDArray[np.float64]) -> tuple[_Places, _Places, _Places]:
    """(end of its path, top of its tree, depth) of each block.

    The path of a block goes on with its most recent child, to the end that names it.
    """
    places = np.arange(len(above))
    children = np.flatnonzero(above != _NOBODY)
    by_use = children[np.argsort(used[children], kind="stable")]
    end = places.copy()
    end[above[by_use]] = by_use  # of several children the last one stays
    while (further := end[end] != end).any():
        end = np.where(further, end[end], end)
    top = np.where(above == _NOBODY, places, above)
    depth = (above != _NOBODY).astype(np.int64)
    while (further := top[top] != top).any():
        depth = depth + np.where(further, depth[top], 0)
        top = top[top]
    return end, top, depth


def _step(first: _Places, then: _Places) -> _Places:
    return np.where(first == _NOBODY, _NOBODY, then[first])
