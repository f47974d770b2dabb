"""How much memory this process may have: the machine's, or what its control group leaves of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvstore.errors import PoolError

_V1, _V2 = "memory.limit_in_bytes", "memory.max"
_CGROUPS = PurePosixPath("sys/fs/cgroup")


class MemoryLimit(NamedTuple):
    """A number of bytes, and who sets it."""

    limit_bytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The smallest limit that holds for this process. ``root`` is where ``proc`` and ``sys`` are.

    Pages of a tmpfs count against the control group whose process touches them first, so a pool
    beyond its limit ends in the out-of-memory killer. Every group up to the root may set one.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([MemoryLimit(machine, "the memory of this machine"), *_group_limits(root)])


def check_memory(pool_bytes: int, limit: MemoryLimit) -> None:
    """Raise PoolError where a pool is larger than a limit."""
    if pool_bytes > limit.limit_bytes:
        raise PoolError(
            f"pool_bytes is {pool_bytes}, but {limit.source} is {limit.limit_bytes} bytes; "
            "lower pool_bytes, or raise that limit"
        )


def _group_limits(root: Path) -> Iterator[MemoryLimit]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # a kernel without control groups
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _limits_above(root, _CGROUPS, group, _V2)
        elif "memory" in controllers.split(","):
            yield from _limits_above(root, _CGROUPS / "memory", group, _V1)


def _limits_above(root: Path, mount: PurePosixPath, group: str, name: str) -> Iterator[MemoryLimit]:
    """Limits of a group and those around it.

    In a container the path may be the host's, of which only the mount itself is there to be read:
    then that is the container's own group.
    """
    place = PurePosixPath(group.lstrip("/"))
    for each in (place, *place.parents):
        file = mount / each / name
        try:
            text = (root / file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text != "max":
            yield MemoryLimit(int(text), f"the limit of this control group in /{file}")
