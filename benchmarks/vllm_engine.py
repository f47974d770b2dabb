"""One vLLM engine as a process, for ``vllm_ttft.py``: prompts in, seconds to the first token out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The default reserves a core, which on two of them is half.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class First(NamedTuple):
    """A prompt's first token: when it came, of how many cached tokens, and what the connector took of it."""

    seconds: float
    cached: int
    scheduler_seconds: float
    worker_seconds: float


class Engine:
    """A running engine."""

    def __init__(self, process: subprocess.Popen[str], answers: TextIO) -> None:
        self._process = process
        self._answers = answers

    def first(self, prompt: list[int]) -> First:
        """Send a prompt and wait for one token."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        seconds, cached, scheduler, worker = self.answer()
        return First(seconds, int(cached), scheduler, worker)

    def answer(self) -> list[float]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine ended with status {self._process.wait()}; its messages are above")
        answer: list[float] = json.loads(line)
        return answer


@contextmanager
def engine(**settings: object) -> Iterator[Engine]:
    """A fresh engine with these arguments of ``LLM``, in the process that it makes for itself."""
    reading, writing = os.pipe()
    root = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(settings), str(writing)],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        pass_fds=(writing,),
        text=True,
    )
    os.close(writing)
    with process, os.fdopen(reading) as answers:
        try:
            running = Engine(process, answers)
            running.answer()
            yield running
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def spans() -> tuple[float, float]:
    """What the connector has spent of the scheduler's and of the workers' time by now."""
    from prometheus_client import REGISTRY  # noqa: PLC0415 - only in the engine's process

    found = {"scheduler": 0.0, "worker": 0.0}
    for family in REGISTRY.collect():
        for sample in family.samples:
            for side in found:
                if sample.name == f"vllm:kvstore_{side}_seconds_total":
                    found[side] += sample.value
    return found["scheduler"], found["worker"]


def main() -> None:
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - only in the engine's process

    answers = os.fdopen(int(sys.argv[2]), "w")
    settings: dict[str, Any] = json.loads(sys.argv[1])
    llm = LLM(enforce_eager=True, disable_log_stats=False, **settings)
    print(json.dumps([]), file=answers, flush=True)
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    for line in sys.stdin:
        before = spans()
        began = time.perf_counter()
        [output] = llm.generate({"prompt_token_ids": json.loads(line)}, once, use_tqdm=False)
        seconds = time.perf_counter() - began
        spent = [after - known for after, known in zip(spans(), before, strict=True)]
        print(json.dumps([seconds, output.num_cached_tokens or 0, *spent]), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
