"""``kvstore size``: what a model's cache takes, from its own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hashing import KVShape, Namespace
from kvstore.block import WHOLE
from kvstore.spec import NamespaceSpec
from kvstore.store import BlockStatus
from tests.support.command_line import kvstore_here
from tests.support.stores import FakeClock, RigOptions, make_chain, make_rig

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
QWEN_MOE = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float32"}
STARCODER = {"n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True, "torch_dtype": "float16"}
WITH_IMAGES = {
    "architectures": ["Some"],
    "text_config": {**LLAMA_8B, "dtype": "torch.float16"},
    "vision_config": {"num_hidden_layers": 2},
}
HYBRID = {**QWEN_MOE, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
SLIDING = {**QWEN_MOE, "layer_types": ["full_attention", "sliding_attention"] * 24}


def model(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def facts(*arguments: str | Path) -> dict[str, Any]:
    done = kvstore_here("size", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusal(*arguments: str | Path, **environ: str) -> str:
    done = kvstore_here("size", *arguments, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (LLAMA_8B, 32 * 2 * 8 * 128 * 2),
        (QWEN_MOE, 48 * 2 * 4 * 128 * 2),
        (DEEPSEEK_V3, 61 * (512 + 64) * 2),
        (GPT2, 12 * 2 * 768 * 4),
        (STARCODER, 40 * 2 * 128 * 2),
        (WITH_IMAGES, 32 * 2 * 8 * 128 * 2),
        (HYBRID, 1 * 2 * 4 * 128 * 2),
        (SLIDING, 24 * 2 * 4 * 128 * 2),
    ],
)
def test_a_token_of_every_kind_of_model(tmp_path: Path, config: dict[str, Any], token_bytes: int) -> None:
    found = facts("--model", model(tmp_path, config), "--tokens", "1000")
    assert (found["token_bytes"], found["block_bytes"]) == (token_bytes, token_bytes * 16)
    assert (found["tokens"], found["blocks"], found["block_size"]) == (1000, 62, 16)
    shape = KVShape(found["layers"], found["planes"], found["kv_heads"], found["head_size"])
    namespace = Namespace("m", "r", found["kv_dtype"], "layout", 16, shape)
    assert NamespaceSpec(namespace).payload_bytes_on() == found["block_bytes"], "as servers compute it"


def test_a_pool_of_that_size_holds_them() -> None:
    """And one that is smaller by a block does not: what comes beside the payload is not guessed."""
    shape = ("--layers", "2", "--kv-heads", "2", "--head-size", "8", "--block-size", "4")
    found = facts(*shape, "--tokens", "400")
    assert (found["block_bytes"], found["blocks"]) == (4 * 128, 100)
    spec = NamespaceSpec(Namespace("m", "r", "bfloat16", "test", 4, KVShape(2, 2, 2, 8)))
    prompt = make_chain(spec, "".join(chr(0x4E00 + block) for block in range(100)))
    for size, fits in ((found["pool_bytes"], True), (found["pool_bytes"] * 98 // 100, False)):
        extent = -(-size // 4096) * 4096
        with make_rig(FakeClock(), [(spec, (WHOLE,))], RigOptions(1, extent_bytes=extent)) as rig:
            assert (rig.write(prompt).count(BlockStatus.YOURS) == 100) == fits


def test_a_fleet_has_pools_of_its_own_and_one_redis(tmp_path: Path) -> None:
    one = facts("--model", model(tmp_path, LLAMA_8B), "--tokens", "1600")
    three = facts("--model", tmp_path / "config.json", "--tokens", "1600", "--replicas", "3")
    assert three["fleet_pool_bytes"] == 3 * one["pool_bytes"] == 3 * one["fleet_pool_bytes"]
    assert three["redis_bytes"] == one["redis_bytes"] > 1600 * one["token_bytes"]


def test_another_dtype_and_block_size(tmp_path: Path) -> None:
    found = facts("--model", model(tmp_path, LLAMA_8B), "--kv-dtype", "float8_e4m3fn", "--block-size", "128")
    assert (found["token_bytes"], found["block_bytes"]) == (65_536, 65_536 * 128)


def test_a_model_in_the_local_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--meta--Llama" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    model(snapshot, LLAMA_8B)
    done = kvstore_here("size", "--model", "meta/Llama", "--tokens", "2048", HF_HOME=str(tmp_path))
    assert done.returncode == 0
    assert "meta/Llama: 32 layers, 8 KV heads of 128, keys and values, bfloat16\n" in done.stdout
    assert "128.0 KiB" in done.stdout
    assert "128 whole blocks" in done.stdout


def test_what_is_not_counted_is_said(tmp_path: Path) -> None:
    done = kvstore_here("size", "--model", model(tmp_path, HYBRID))
    assert "3 layers of 4 are not counted: linear_attention\n" in done.stdout


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "num_hidden_layers is not there, expected a number above 0"),
        ({**LLAMA_8B, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**LLAMA_8B, "num_attention_heads": "many"}, "num_attention_heads is 'many'"),
        ({"num_hidden_layers": 2, "num_attention_heads": 2}, "hidden_size is not there"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim is not there"),
        ({**LLAMA_8B, "torch_dtype": "int3"}, "the KV dtype is 'int3', expected one of bfloat16"),
        ([], "holds no JSON object"),
    ],
)
def test_a_configuration_that_does_not_tell(tmp_path: Path, config: Any, words: str) -> None:
    message = refusal("--model", model(tmp_path, config))
    assert words in message
    assert "--kv-dtype" in message or "--layers, --kv-heads and --head-size" in message


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    message = refusal("--model", "nobody/nothing", HF_HUB_CACHE=str(tmp_path))
    assert "'nobody/nothing'" in message
    assert "no such model" in message
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in refusal("--model", tmp_path)


@pytest.mark.parametrize("arguments", [(), ("--layers", "2"), ("--model", "m", "--layers", "2")])
def test_half_a_shape(arguments: tuple[str, ...]) -> None:
    assert "give --model, or all of --layers, --kv-heads and --head-size" in refusal(*arguments)


def test_a_dtype_that_does_not_exist() -> None:
    message = refusal("--layers", "1", "--kv-heads", "1", "--head-size", "1", "--kv-dtype", "bf16")
    assert "'bf16'" in message
    assert "--kv-dtype" in message
