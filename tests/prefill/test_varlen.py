"""One attention call for all spans: what the kernel is given, run by a plain attention of its signature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._pytree import tree_map_only

from prefill.varlen import Kernel, Varlen, Way, varlen_on, way_for
from tests.support.varlen import packed_batch, plain_varlen, shape_of
from tests.support.workers import one_thread

HALF = shape_of(8, 4, 128, torch.bfloat16)
PARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5)


@given(
    parts=PARTS,
    heads=st.sampled_from([(1, 1), (2, 3), (3, 1)]),
    block_size=st.sampled_from([1, 7, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    room=st.sampled_from([0, 3000, 1 << 20]),
    fresh=st.booleans(),
)
def test_one_call_attends_as_calls_for_each_span_do(
    parts: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    room: int,
    *,
    fresh: bool,
) -> None:
    """Over pages where they are, and over gathered keys, whatever room these have."""
    if fresh:
        parts = [(0, tokens) for _, tokens in parts]
    batch = packed_batch(shape_of(*heads, 8, dtype), block_size, parts)
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    with one_thread():
        expected = batch.attend(None)
        assert expected.isfinite().all()
        for varlen in (Varlen(plain_varlen, Way.PAGED), Varlen(plain_varlen, Way.GATHERED, room)):
            torch.testing.assert_close(batch.attend(varlen), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("way", "keys", "calls"),
    [
        (Way.PAGED, 0, 1),
        (Way.GATHERED, 75, 1),
        (Way.GATHERED, 74, 2),
        (Way.GATHERED, 41, 2),
        (Way.GATHERED, 40, 3),
        (Way.GATHERED, 0, 3),
    ],
)
def test_a_step_is_one_call_a_layer_while_gathered_keys_have_room(way: Way, keys: int, calls: int) -> None:
    """For spans of 34, 36 and 5 keys."""
    seen = []

    def counted(query: torch.Tensor, *arguments: torch.Tensor | int, **named: object) -> object:
        seen.append(len(query))
        kernel: Kernel = plain_varlen
        return kernel(query, *arguments, **named)  # type: ignore[arg-type]

    batch = packed_batch(shape_of(2, 3, 8, torch.float32), 16, [(33, 1), (16, 20), (0, 5)])
    batch.attend(Varlen(counted, way, keys * batch.memory.spec.row_bytes))
    assert (len(seen), sum(seen)) == (calls, 26)


@pytest.mark.parametrize("way", [Way.PAGED, Way.GATHERED])
def test_torchs_kernel_takes_the_arguments(way: Way) -> None:
    """By its schema, on tensors without memory; on a GPU it is run (tests/gpu)."""

    def on_shapes(*arguments: Any, **named: Any) -> torch.Tensor:
        with FakeTensorMode() as mode:
            arguments, named = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, named))
            output: Any = varlen_attn(*arguments, **named)
        return torch.empty(output.shape, dtype=output.dtype)

    batch = packed_batch(shape_of(2, 3, 8, torch.bfloat16), 16, [(33, 1), (0, 5)])
    output = batch.attend(Varlen(on_shapes, way))
    assert (output.shape, output.dtype) == ((1, 6, 6, 8), torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "block_size", "pages", "capability", "way"),
    [
        ({}, 16, 1000, (9, 0), Way.GATHERED),
        ({}, 256, 1000, (9, 0), Way.PAGED),
        ({}, 512, 2**31 - 1, (8, 0), Way.PAGED),
        ({}, 512, 2**31, (8, 0), Way.GATHERED),
        ({}, 384, 1000, (12, 0), Way.GATHERED),
        ({"kv_dtype": "float16"}, 256, 1000, (8, 9), Way.PAGED),
        ({"head_size": 256}, 256, 1000, (9, 0), Way.PAGED),
        ({"kv_dtype": "float32"}, 256, 1000, (9, 0), Way.SPANS),
        ({"head_size": 12}, 256, 1000, (9, 0), Way.SPANS),
        ({"head_size": 264}, 16, 1000, (9, 0), Way.SPANS),
        ({"query_heads": 9}, 16, 1000, (9, 0), Way.SPANS),
        ({}, 256, 1000, (7, 5), Way.SPANS),
        ({}, 256, 1000, None, Way.SPANS),
    ],
)
def test_the_way_follows_from_what_the_kernel_can_read(
    changes: dict[str, object], block_size: int, pages: int, capability: tuple[int, int] | None, way: Way
) -> None:
    assert way_for(replace(HALF, **changes), block_size, pages, capability) is way  # type: ignore[arg-type]


def test_ordinary_memory_has_no_such_kernel() -> None:
    assert varlen_on(packed_batch(HALF, 256, [(0, 1)]).memory) is None
