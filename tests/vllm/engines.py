"""Engines as processes, for tests: started, asked, and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 32
"""The smallest that vLLM's CPU attention takes."""
MODULE = "kvstore.connectors.vllm.connector"


def transfer_config(address: str, **options: Any) -> dict[str, Any]:
    """What ``--kv-transfer-config`` says."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, **options},
    }


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
    }


@dataclass(frozen=True, slots=True)
class Output:
    """What an engine made of one prompt. ``cached`` counts tokens it did not compute."""

    tokens: list[int]
    cached: int
    reason: str
    seconds: float
    logprobs: list[dict[str, float]] = field(repr=False)


class Engine:
    """A running engine; each method is one command."""

    def __init__(self, process: subprocess.Popen[bytes], answers: TextIO, log: Path) -> None:
        self._process = process
        self._answers = answers
        self._log = log

    @property
    def log(self) -> str:
        """All that it said so far, beside its answers."""
        return self._log.read_text(errors="replace")

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Begin a command; ``answer`` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        line = self._answers.readline()
        assert line, f"the engine ended with {self._process.wait(30)}:\n{self.log[-4000:]}"
        return json.loads(line)

    def generate(self, *prompts: list[int], **options: Any) -> list[Output]:
        return [Output(**each) for each in self.ask("generate", prompts=prompts, **options)]

    def one(self, prompt: list[int], **options: Any) -> Output:
        [output] = self.generate(prompt, **options)
        return output

    def metrics(self) -> dict[str, float]:
        """Values of vLLM's metrics by name, with those labels that tell more than which engine it is."""
        found: dict[str, float] = self.ask("metrics")
        return found

    def counted(self, name: str) -> float:
        """One of the connector's own."""
        return self.metrics().get(f"vllm:kvstore_{name}", 0.0)


@contextmanager
def engine(model: Path, folder: Path, **settings: Any) -> Iterator[Engine]:
    """A running engine on ``model``; its log is kept in ``folder``."""
    chosen = {
        "model": str(model),
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "seed": 0,
    } | settings
    log = folder / f"engine-{os.urandom(4).hex()}.log"
    reading, writing = os.pipe()
    with log.open("wb") as said, os.fdopen(reading) as answers:
        process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("engine_main.py")),
                json.dumps(chosen),
                str(writing),
            ],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            pass_fds=(writing,),
        )
        os.close(writing)
        with process:
            try:
                running = Engine(process, answers, log)
                running.answer()
                yield running
                assert process.stdin is not None
                process.stdin.close()
                process.wait(60)
            finally:
                process.kill()
