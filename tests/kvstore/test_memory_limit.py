"""The memory that a pool may have, read from trees that look like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.errors import PoolError
from kvstore.tiers.memory_limit import MemoryLimit, check_memory, memory_limit

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V1_UNLIMITED = "9223372036854771712"


def make_tree(root: Path, groups: str, limits: dict[str, str]) -> Path:
    """``groups`` is what /proc/self/cgroup says, ``limits`` the files below /sys/fs/cgroup."""
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{k}": v for k, v in limits.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected", "source"),
    [
        ("0::/a/b", {"a/memory.max": "max", "a/b/memory.max": "4096"}, 4096, "/sys/fs/cgroup/a/b/memory.max"),
        ("0::/a/b", {"a/memory.max": "4096", "a/b/memory.max": "8192"}, 4096, "/sys/fs/cgroup/a/memory.max"),
        ("0::/", {"memory.max": "4096"}, 4096, "/sys/fs/cgroup/memory.max"),
        ("0::/unseen/in/here", {"memory.max": "4096"}, 4096, "/sys/fs/cgroup/memory.max"),
        ("0::/a:colon", {"a:colon/memory.max": "4096"}, 4096, "/sys/fs/cgroup/a:colon/memory.max"),
        (
            "5:cpu,memory:/a\n3:cpu:/b\n0::/",
            {
                "memory/memory.limit_in_bytes": V1_UNLIMITED,
                "memory/a/memory.limit_in_bytes": "4096",
                "memory/b/memory.limit_in_bytes": "1",
            },
            4096,
            "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
        ),
        ("0::/a", {"a/memory.max": "max"}, MACHINE, "the memory of this machine"),
        (
            "5:memory:/",
            {"memory/memory.limit_in_bytes": V1_UNLIMITED},
            MACHINE,
            "the memory of this machine",
        ),
    ],
)
def test_the_smallest_limit_is_found_and_named(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int, source: str
) -> None:
    limit = memory_limit(make_tree(tmp_path, groups, limits))
    assert limit.limit_bytes == expected
    assert limit.source.endswith(source)


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) == MemoryLimit(MACHINE, "the memory of this machine")


def test_this_very_process_has_one() -> None:
    assert 0 < memory_limit().limit_bytes <= MACHINE


def test_a_pool_beyond_it_is_refused_with_both_numbers(tmp_path: Path) -> None:
    limit = memory_limit(make_tree(tmp_path, "0::/a", {"a/memory.max": "4096"}))
    check_memory(4096, limit)
    with pytest.raises(
        PoolError,
        match=r"pool_bytes is 4097, but the limit of this control group in /sys/fs/cgroup/a/memory.max is "
        r"4096 bytes; lower pool_bytes, or raise that limit",
    ):
        check_memory(4097, limit)
