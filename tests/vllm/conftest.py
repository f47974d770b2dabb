"""Models, and what an engine without a store makes of the prompts of the tests.

Modules that need no engine run wherever torch is; the others in the environment of ``make test-vllm``.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.support.models import save_tiny_model
from tests.vllm.engines import engine
from tests.vllm.prompts import CROWD, CROWD_TOKENS, PROMPTS

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_engine_*.py"]


def tiny_llama() -> LlamaConfig:
    """Random weights, spread so wide that greedy output is stable and tells prompts apart."""
    return LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tiny_llama(), tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape under the same name, with other weights."""
    return save_tiny_model(tiny_llama(), tmp_path_factory.mktemp("other") / "tiny-llama0", seed=2027)


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What an engine without a store generates, by prompt."""
    with engine(model, tmp_path_factory.mktemp("plain")) as running:
        outputs = running.generate(*PROMPTS.values())
        assert all(output.cached == 0 for output in outputs)
        found = {name: output.tokens for name, output in zip(PROMPTS, outputs, strict=True)}
        crowd = running.generate(*CROWD, tokens=CROWD_TOKENS)
        return found | {f"crowd{place}": output.tokens for place, output in enumerate(crowd)}


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters of the tiny model."""
    return [save_adapter(tmp_path_factory.mktemp(f"adapter-{name}"), seed) for seed, name in enumerate("ab")]


def save_adapter(folder: Path, seed: int) -> Path:
    """Random values on all query and value projections, large enough to change what is generated."""
    generator = torch.Generator().manual_seed(seed)
    config, rank, found = tiny_llama(), 8, {}
    for layer in range(config.num_hidden_layers):
        for name, width in (("q_proj", 256), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            found[f"{prefix}.lora_A.weight"] = torch.randn(rank, 256, generator=generator)
            found[f"{prefix}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    save_file(found, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
