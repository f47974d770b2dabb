"""Engine tensors as bytes: each layout that can be served, and those that cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.connectors.vllm.errors import UnsupportedError
from kvstore.connectors.vllm.groups import NULL_BLOCK, CacheGroups
from kvstore.connectors.vllm.layout import (
    EngineBlocks,
    GroupedBlocks,
    byte_rows,
    golden_round_trip,
    map_blocks,
)
from kvstore.tiers.device_copy import PagedBlocks

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 6, 2, 32, 64, 3
_AXES = {"L": 0, "B": 1, "H": 2, "N": 3, "C": 4}
_SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH}


def tensors_of(layout: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Logical views [B, H, N, C], one a layer, of memory in the order that ``layout`` spells."""
    memory = torch.zeros([_SIZES[axis] for axis in layout], dtype=dtype)
    logical = memory.permute(*(layout.index(axis) for axis in "LBHNC"))
    return {f"layer.{number}": logical[number] for number in range(LAYERS)}


def latent(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """One plane of latents, [B, N, C], as MLA has it."""
    return {f"layer.{number}": torch.zeros(BLOCKS, TOKENS, 576, dtype=dtype) for number in range(LAYERS)}


def randomize(tensors: dict[str, torch.Tensor]) -> None:
    for seed, tensor in enumerate(tensors.values()):
        generator = torch.Generator().manual_seed(seed)
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator).to(tensor.dtype))


def payloads(blocks: EngineBlocks, count: int) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    return [np.zeros(blocks.payload_bytes, dtype=np.uint8) for _ in range(count)]


SERVED = {
    "LBHNC": tensors_of("LBHNC"),
    "LBNHC": tensors_of("LBNHC"),
    "BLHNC": tensors_of("BLHNC"),
    "BLNHC": tensors_of("BLNHC"),
    "float32": tensors_of("LBHNC", torch.float32),
    "fp8": tensors_of("LBNHC", torch.float8_e4m3fn),
    "MLA": latent(),
    "MLA with a head": {name: tensor[:, None] for name, tensor in latent().items()},
}


@pytest.mark.parametrize("tensors", SERVED.values(), ids=SERVED)
def test_blocks_go_from_one_engine_to_another(tensors: dict[str, torch.Tensor]) -> None:
    """Whatever is in blocks 4, 0, 2 of one engine is afterwards in blocks 1, 5, 3 of another."""
    if next(iter(tensors.values())).dtype is not torch.float8_e4m3fn:
        randomize(tensors)
    there = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in tensors.items()}
    there = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_() for name, t in there.items()
    }
    source, target = EngineBlocks(tensors, BLOCKS), EngineBlocks(there, BLOCKS)
    moved = payloads(source, 3)
    source.gather([4, 0, 2], moved)
    target.scatter(moved, [1, 5, 3])
    for name, tensor in tensors.items():
        assert torch.equal(there[name][[1, 5, 3]].float(), tensor[[4, 0, 2]].float())
        assert not there[name][[0, 2, 4]].float().any(), "another block changed"


GROUPS = CacheGroups(TOKENS, (("full.0", "full.1"), ("window.0",), ("window.1", "window.2")), 40)


def grouped(layout: str) -> dict[str, torch.Tensor]:
    """The groups' n-th layers share memory, as vLLM has it: a block is of one of the groups."""
    tensors = list(tensors_of(layout).values())
    return {name: tensors[place] for names in GROUPS.layers for place, name in enumerate(names)}


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_blocks_of_groups_of_layers(layout: str) -> None:
    """What no window sees is copied nowhere, and not into the block that stands for it."""
    tensors, there = grouped(layout), grouped(layout)
    randomize(tensors)
    source, target = map_blocks(tensors, GROUPS, BLOCKS), map_blocks(there, GROUPS, BLOCKS)
    assert isinstance(source, GroupedBlocks)
    assert source.payload_bytes == 5 * HEADS * TOKENS * WIDTH * 2
    moved = [np.zeros(source.payload_bytes, dtype=np.uint8) for _ in range(2)]
    source.gather([1, 2, 3, 4, 5, 1], moved)
    targets = [2, NULL_BLOCK, 1, 3, 4, 5]
    target.scatter(moved, targets)
    assert target.loaded_bytes(targets) == 9 * HEADS * TOKENS * WIDTH * 2, "one layer of ten less"
    pairs = {"full.0": {1: 2, 4: 3}, "window.0": {5: 4}, "window.1": {3: 1, 1: 5}, "window.2": {3: 1, 1: 5}}
    for name, blocks in pairs.items():
        for one, other in blocks.items():
            assert torch.equal(there[name][other], tensors[name][one])
    assert not there["full.0"][NULL_BLOCK].any()
    assert not there["full.1"][4].any(), "of a group with one layer"


def test_a_payload_is_the_memory_of_a_block_layer_after_layer() -> None:
    tensors = tensors_of("BLHNC")
    randomize(tensors)
    blocks = EngineBlocks(tensors, BLOCKS)
    [payload] = payloads(blocks, 1)
    blocks.gather([2], [payload])
    first = next(iter(tensors.values()))
    start, size = first.stride(0) * 2 * 2, first.stride(0) * 2
    memory = np.frombuffer(bytes(first.untyped_storage()), dtype=np.uint8)
    assert payload.tobytes() == memory[start : start + size].tobytes()


def test_kernel_blocks_that_are_parts_of_the_engines() -> None:
    """A backend may count blocks of 16 tokens where the engine counts blocks of 32."""
    tensor = torch.arange(BLOCKS * 2 * HEADS * 16 * WIDTH).reshape(BLOCKS * 2, HEADS, 16, WIDTH)
    rows = byte_rows("layer", tensor, BLOCKS)
    assert rows.shape == (BLOCKS, 2 * HEADS * 16 * WIDTH * 8)
    assert torch.equal(rows.view(torch.int64), tensor.reshape(BLOCKS, -1))
    golden_round_trip({"layer": tensor}, EngineBlocks({"layer": tensor}, BLOCKS), 1)


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_scatter_a_block_are_refused(layout: str) -> None:
    with pytest.raises(UnsupportedError, match=r"not one run of bytes.*VLLM_KV_CACHE_LAYOUT"):
        EngineBlocks(tensors_of(layout), BLOCKS)


def test_tensors_that_do_not_count_blocks_first_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"shape \(2, 6, 32\) for 6 blocks"):
        EngineBlocks({"layer": torch.zeros(2, BLOCKS, TOKENS)}, BLOCKS)


def test_a_gpu_without_room_for_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on without a store; tensors that have no memory stand for those of a GPU."""

    def full(paged: PagedBlocks, *, staging_bytes: int) -> None:
        raise torch.OutOfMemoryError(f"{staging_bytes} bytes of {paged.device}")

    monkeypatch.setattr("kvstore.connectors.vllm.layout.mover_for", full)
    tensors = {name: tensor.to("meta") for name, tensor in tensors_of("LBHNC").items()}
    with pytest.raises(UnsupportedError, match=r"no 128 MiB left to copy.*lower --gpu-memory-utilization"):
        EngineBlocks(tensors, BLOCKS)


class TestGoldenRoundTrip:
    @pytest.mark.parametrize("tensors", SERVED.values(), ids=SERVED)
    def test_leaves_the_cache_as_it_was(self, tensors: dict[str, torch.Tensor]) -> None:
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        golden_round_trip(tensors, EngineBlocks(tensors, BLOCKS), 1)
        for name, tensor in tensors.items():
            assert torch.equal(tensor.float(), before[name].float())

    def test_refuses_a_mapping_of_other_tensors(self) -> None:
        """The bytes are of one cache and the tensors of another: the pattern does not come back."""
        tensors = tensors_of("LBHNC")
        elsewhere = {name: tensor.clone() for name, tensor in tensors.items()}

        class Wrong(EngineBlocks):
            def scatter(self, payloads: object, block_ids: object, fence: object = None) -> None:
                for tensor in tensors.values():
                    tensor[1] = 7

        with pytest.raises(UnsupportedError, match=r"layer\.0 does not survive a round trip"):
            golden_round_trip(tensors, Wrong(elsewhere, BLOCKS), 1)
