"""vLLM's load generator asks ``prefill serve`` as it asks an engine of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.chat_model import save_chat_model
from tests.support.stores import pool_folder
from tests.vllm.engines import REPOSITORY, environment
from tests.vllm.servers import fetch, free_port

PROMPTS, NEW_TOKENS = 8, 6
BENCH_SECONDS = 120
# Both load torch for seconds, so the generator is started at the same time and waits for the server.
BENCH = (
    "bench serve --backend openai --endpoint /v1/completions --model tiny-chat "
    "--dataset-name prefix_repetition --prefix-repetition-prefix-len 96 --prefix-repetition-suffix-len 16 "
    f"--prefix-repetition-num-prefixes 2 --prefix-repetition-output-len {NEW_TOKENS} --num-prompts {PROMPTS} "
    "--max-concurrency 1 --ignore-eos --seed 1 --disable-tqdm --save-result --result-filename found.json "
    f"--ready-check-timeout-sec {BENCH_SECONDS}"
)


@contextmanager
def starting(model: Path, log: Path) -> Iterator[str]:
    """The URL of a worker that may not serve yet."""
    url = f"127.0.0.1:{free_port()}"
    sizes = "--pool-bytes 16MiB --extent-bytes 2MiB --device-bytes 4MiB"
    flags = f"--model {model} --listen none --http {url} {sizes}"
    with pool_folder() as folder, log.open("wb") as said:
        command = [sys.executable, "-m", "prefill", "serve", "--pool-path", f"{folder}/pool", *flags.split()]
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdout=said, stderr=said)
        try:
            yield f"http://{url}"
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(30)


def test_every_request_is_answered_and_prefixes_are_found_again(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path)
    with starting(model, tmp_path / "log") as url:
        flags = [*BENCH.split(), "--base-url", url, "--tokenizer", str(model), "--result-dir", str(tmp_path)]
        command = [sys.executable, str(REPOSITORY / "benchmarks" / "vllm_command.py"), *flags]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=BENCH_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        metrics = fetch(f"{url}/metrics")
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert (found["completed"], found["total_output_tokens"]) == (PROMPTS, PROMPTS * NEW_TOKENS)
    assert found["mean_ttft_ms"] > 0
    counted = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(counted['prefill_requests_total{api="completions",outcome="ok"}']) >= PROMPTS
    assert float(counted['prefill_tokens_total{source="device"}']) > 0
