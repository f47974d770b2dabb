"""What tells engines' blocks apart, as far as it needs no engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hashing import KVShape
from kvstore.connectors.vllm.errors import UnsupportedError
from kvstore.connectors.vllm.identity import (
    Adapters,
    EngineIdentity,
    adapted,
    digest_weights,
    request_extras,
    weights_revision,
    with_new_weights,
)
from kvstore.connectors.vllm.options import ConnectorOptions
from kvstore.errors import ConfigError

BASE = EngineIdentity(
    model="m",
    weights_id="w",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    layout="vllm0.32/LBHNC/cpu-vec",
    block_size=32,
    kv_shape=KVShape(4, 2, 2, 32),
    payload_bytes=4096,
    settings={"config": {"rope_theta": 10000.0, "_name_or_path": "/a"}, "quantization": None},
)

CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"weights_id": "v"},
    "dtype": {"dtype": "float32"},
    "KV dtype": {"kv_dtype": "fp8_e4m3"},
    "layout": {"layout": "vllm0.32/LBHNC/cpu-amx"},
    "block size": {"block_size": 128},
    "rope": {"settings": {"config": {"rope_theta": 20000.0}, "quantization": None}},
    "quantization": {"settings": {"config": {"rope_theta": 10000.0}, "quantization": "fp8"}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_bytes_changes_the_root(change: dict[str, Any]) -> None:
    """dtype, revision, layout and block size are in the namespace (sglang #33268 #36420, dynamo #14416)."""
    assert replace(BASE, **change).spec().root != BASE.spec().root


def test_where_a_model_lies_does_not_matter() -> None:
    moved = {"config": {"rope_theta": 10000.0, "_name_or_path": "/b"}, "quantization": None}
    assert replace(BASE, settings=moved).spec().root == BASE.spec().root


def test_adapters_and_replaced_weights_are_other_namespaces() -> None:
    spec = BASE.spec()
    specs = [spec, adapted(spec, "a@1"), adapted(spec, "a@2"), with_new_weights(spec, "x")]
    assert len({each.root.digest for each in specs}) == 4
    again = with_new_weights(with_new_weights(spec, "x"), "y")
    assert again == with_new_weights(spec, "y")


class TestWeights:
    def test_a_folder_is_named_by_what_is_in_it(self, tmp_path: Path) -> None:
        first, second = tmp_path / "a", tmp_path / "b"
        for folder, content in ((first, b"one"), (second, b"one")):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(content)
        assert weights_revision(str(first), None, None) == weights_revision(str(second), None, None)
        (second / "model.safetensors").write_bytes(b"two")
        assert weights_revision(str(first), None, None) != weights_revision(str(second), None, None)

    def test_any_changed_tensor_of_a_long_file_shows(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        with file.open("wb") as opened:
            opened.truncate(2**27)
        before = digest_weights(tmp_path)
        for start in (0, 2**26 + 12345, 2**27 - 2**20):
            with file.open("r+b") as opened:
                opened.seek(start)
                opened.write(b"x" * 2**20)
            changed = digest_weights(tmp_path)
            assert changed != before
            before = changed

    def test_the_hubs_cache_knows_the_revision(self, tmp_path: Path) -> None:
        folder = tmp_path / "snapshots" / "abc123"
        folder.mkdir(parents=True)
        assert weights_revision(str(folder), None, None) == "abc123"
        assert weights_revision("org/model", "def456", None) == "def456"
        assert weights_revision(str(folder), None, "mine") == "mine"

    def test_weights_that_nothing_names_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="set weights_id"):
            weights_revision("org/model", None, None)
        with pytest.raises(UnsupportedError, match="set weights_id"):
            digest_weights(tmp_path)

    def test_a_reloaded_adapter_is_another(self, tmp_path: Path) -> None:
        """Id and version (vllm #44250, LMCache #2961)."""
        file = tmp_path / "adapter_model.safetensors"
        file.write_bytes(b"one")
        adapters = Adapters()
        first = adapters.adapter_of("a", str(tmp_path))
        assert adapters.adapter_of("a", str(tmp_path)) == first
        file.write_bytes(b"other")
        assert adapters.adapter_of("a", str(tmp_path)) != first
        with pytest.raises(UnsupportedError, match="has no files"):
            adapters.adapter_of("a", str(tmp_path / "nowhere"))


class TestExtras:
    def test_salts_and_media_are_part_of_the_hash(self) -> None:
        """LoRA name, salt and media cannot collide: each has a field of its own (vllm #44701)."""
        assert request_extras(None, []) is None
        assert request_extras("", []) is None
        kinds = [
            request_extras("a", []),
            request_extras("b", []),
            request_extras(None, [("a", 0, 5)]),
            request_extras(None, [("a", 1, 5)]),
            request_extras(None, [("b", 0, 5)]),
        ]
        encoded = {each.encode_block(0, 32) for each in kinds if each is not None}
        assert len(encoded) == len(kinds)


class TestOptions:
    def test_defaults_and_given_ones(self) -> None:
        assert ConnectorOptions.parse({}).address.startswith("unix:")
        options = ConnectorOptions.parse({"address": "127.0.0.1:1", "lookup_seconds": 2})
        assert (options.address, options.lookup_seconds) == ("127.0.0.1:1", 2)

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"adress": "x"}, "did you mean address?"),
            ({"zzz": 1}, "there are address"),
            ({"map_pool": "yes"}, "expected true or false"),
            ({"lookup_seconds": 0}, "expected a number of seconds above 0"),
            ({"redis_seconds": True}, "expected a number of seconds above 0"),
            ({"address": 7}, "expected a non-empty string"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, given: dict[str, Any], told: str) -> None:
        """An unknown key: an error with the nearest valid name (LMCache #1244)."""
        with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
            ConnectorOptions.parse(given)

    def test_a_token_file_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="cannot read the token"):
            ConnectorOptions.parse({"token_file": "/nowhere"}).open_client()
