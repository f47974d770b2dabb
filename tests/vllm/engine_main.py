"""A vLLM engine as a process: one JSON command a line on stdin, one JSON answer a line on a pipe."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    settings, answers = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w")
    llm = LLM(**settings)
    engine = Engine(llm)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


class Engine:
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._adapters: dict[str, int] = {}

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 8,
        salt: str | None = None,
        adapter: str | None = None,
        logprobs: int | None = None,
        params: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        lora = None
        if adapter is not None:
            number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
            lora = LoRARequest(Path(adapter).name, number, adapter)
        asked = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        began = time.perf_counter()
        outputs = self._llm.generate(asked, sampling, lora_request=lora, use_tqdm=False)
        seconds = time.perf_counter() - began
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens or 0,
                "reason": output.outputs[0].finish_reason,
                "seconds": seconds,
                "logprobs": [
                    {str(token): value.logprob for token, value in each.items()}
                    for each in output.outputs[0].logprobs or ()
                ],
            }
            for output in outputs
        ]

    def start(self, prompt: list[int], name: str, tokens: int = 8) -> bool:
        """Add a request without running it."""
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return True

    def abort(self, name: str) -> bool:
        self._llm.llm_engine.abort_request([name])
        return True

    def step(self, times: int = 1) -> list[float]:
        """Run some steps; how long each took."""
        spent = []
        for _ in range(times):
            began = time.perf_counter()
            self._llm.llm_engine.step()
            spent.append(time.perf_counter() - began)
        return spent

    def busy(self) -> bool:
        return bool(self._llm.llm_engine.has_unfinished_requests())

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            for bound, count in getattr(metric, "buckets", {}).items():
                name = f"{metric.name}_bucket_{bound}"
                found[name] = found.get(name, 0) + count
            value = getattr(metric, "value", None)
            if value is not None:
                labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
                name = metric.name + (json.dumps(labels, sort_keys=True) if labels else "")
                found[name] = found.get(name, 0) + value
        return found

    def forget(self) -> bool:
        """Empty the engine's own cache; False while anything uses it."""
        self.step()  # in which it hears of saves that are over
        return bool(self._llm.reset_prefix_cache())

    def reset(self) -> bool:
        """New weights, as far as caches are concerned."""
        self.step()
        return bool(self._llm.reset_prefix_cache(reset_connector=True))


if __name__ == "__main__":
    main()
