"""The demo as its user runs it: a process with a model folder, a real server, and a second process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvstore.block import TierName
from prefill import cli
from prefill.demo.job import Job, run_elsewhere
from prefill.demo.workload import FIRST_TURNS
from prefill.errors import PrefillError
from prefill.model import load_model
from tests.support.models import save_tiny_model, tiny_config
from tests.support.workers import WorkerOptions, answer, assert_quiet, make_worker, request_of, watch

REPOSITORY = Path(__file__).resolve().parents[2]
USERS = 3
REQUESTS = USERS * (FIRST_TURNS + 1) + 1


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has the words of the demo's document, and room for all of it."""
    text = files("prefill.demo").joinpath("document.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    config = tiny_config(
        "llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=4096, eos_token_id=None
    )
    folder = save_tiny_model(config, tmp_path_factory.mktemp("models") / "tiny")
    make_tokenizer: Any = PreTrainedTokenizerFast  # it has no annotations
    make_tokenizer(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pools() -> Iterator[Path]:
    """Where the demo makes its pool files, and takes them away again."""
    with tempfile.TemporaryDirectory(prefix="prefill-demo-test-", dir="/dev/shm") as folder:
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def start_demo(model: Path, pools: Path, *options: str, **settings: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prefill", "demo", "--json", "--model", str(model), *options]
    settings |= {
        "OMP_NUM_THREADS": "1",
        "KVSTORE_POOL_PATH": str(pools / "pool"),
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_demo(model: Path, pools: Path, *options: str) -> subprocess.CompletedProcess[str]:
    with start_demo(model, pools, *options) as process:
        output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope="module")
def demo(model_folder: Path, pools: Path) -> subprocess.CompletedProcess[str]:
    return run_demo(model_folder, pools)


@pytest.fixture(scope="module")
def report(demo: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert demo.returncode == 0, demo.stderr
    found = json.loads(demo.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
@pytest.mark.redis
class TestDemo:
    """One run, looked at from several sides."""

    def test_stdout_is_one_object_and_nothing_else(self, demo: subprocess.CompletedProcess[str]) -> None:
        assert demo.stdout == json.dumps(json.loads(demo.stdout)) + "\n"
        assert "Traceback" not in demo.stderr
        told = demo.stderr.splitlines()
        assert told[:2] == ["loading the model", "turn 1"], "whoever sees no bar reads how far it is"
        assert "WARNING" not in demo.stderr

    def test_nothing_differs_from_a_run_without_a_cache(self, report: dict[str, Any]) -> None:
        assert report["identical"] is True
        assert [request["identical"] for request in report["requests"]] == [True] * REQUESTS

    def test_every_tier_has_hits(self, report: dict[str, Any]) -> None:
        assert all(tokens > 0 for tokens in report["hit_tokens"].values())
        first_of_new_process = request_named(report, "amber-4")["cached_tokens"]
        assert (first_of_new_process["device"], first_of_new_process["host"]) == (0, 0)
        assert first_of_new_process["redis"] > 1000

    def test_one_flipped_byte_is_one_corrupt_miss(self, report: dict[str, Any]) -> None:
        """The blocks before it still come from Redis, the ones behind it are computed."""
        assert report["corrupt_misses"] == 1
        intact, damaged = (request_named(report, name) for name in ("amber-4", "amber-4-again"))
        assert damaged["prompt_tokens"] == intact["prompt_tokens"]
        middle = (damaged["prompt_tokens"] - 1) // 16 // 2 * 16
        assert damaged["cached_tokens"] == {"device": 0, "host": 0, "redis": middle}
        assert damaged["output_tokens"] == intact["output_tokens"]

    def test_totals_are_sums_over_the_requests(self, report: dict[str, Any]) -> None:
        requests = report["requests"]
        for request in requests:
            cached = sum(request["cached_tokens"].values())
            assert cached + request["computed_tokens"] == request["prompt_tokens"]
            assert request["ttft_ms"] == pytest.approx(
                request["queue_ms"] + request["execution_ms"], abs=0.02
            )
        for tier, tokens in report["hit_tokens"].items():
            assert tokens == sum(each["cached_tokens"][tier] for each in requests)
        assert report["asked_tokens"] == sum(each["prompt_tokens"] for each in requests)
        assert report["hit_rate"] == sum(report["hit_tokens"].values()) / report["asked_tokens"]
        assert min(report["ttft_cold_ms"], report["ttft_warm_ms"]) > 0


def request_named(report: dict[str, Any], name: str) -> dict[str, Any]:
    [request] = [each for each in report["requests"] if each["request_id"] == name]
    assert isinstance(request, dict)
    return request


@pytest.mark.slow
def test_without_redis_there_is_one_warning_and_the_demo_goes_on(model_folder: Path, pools: Path) -> None:
    done = run_demo(model_folder, pools, "--redis-url", "redis://127.0.0.1:1/0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "is given up" in " ".join(done.stderr.split())
    report = json.loads(done.stdout)
    assert report["identical"] is True
    assert report["hit_tokens"]["redis"] == report["corrupt_misses"] == 0
    assert report["hit_tokens"]["device"] > 0
    assert len(report["requests"]) == REQUESTS - 1
    assert report["left_out"] == ["byte flipped"], "without a block to damage"


@pytest.mark.slow
@pytest.mark.redis
def test_sigterm_ends_all_processes_and_removes_all_files(
    model_folder: Path, pools: Path, tmp_path: Path
) -> None:
    """In the middle of it: beside the demo run a Redis server and the second worker."""
    with start_demo(model_folder, pools, TMPDIR=str(tmp_path)) as demo:
        while not (found := list(pools.glob("*/*.pool"))) or found[0].name != "second.pool":
            assert demo.poll() is None, demo.communicate()
            time.sleep(0.01)
        assert len(found) == 1, "the first worker is closed, its pool file is not gone"
        tasks = Path(f"/proc/{demo.pid}/task")
        children = [pid for each in tasks.glob("*/children") for pid in each.read_text().split()]
        assert len(children) == 2
        demo.send_signal(signal.SIGTERM)
        output, errors = demo.communicate(timeout=30)
    assert (demo.returncode, output) == (128 + signal.SIGTERM, "")
    assert "Traceback" not in errors
    assert [pid for pid in children if Path("/proc", pid).exists()] == []
    assert [*pools.iterdir(), *tmp_path.iterdir()] == []


# -- what is refused -------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pools: Path) -> Run:
    """The command line in this process: status, stdout and stderr."""

    def run(*options: str, **settings: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prefill", *options])
        for name, value in {"KVSTORE_POOL_PATH": str(pools / "pool"), **settings}.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"KVSTORE_POOL_BYTE": "1GiB"}, "KVSTORE_POOL_BYTE does not exist; did you mean KVSTORE_POOL_BYTES?"),
        (
            {"KVSTORE_REDIS_URL": "http://127.0.0.1"},
            "KVSTORE_REDIS_URL = 'http://127.0.0.1': expected redis://",
        ),
        ({"KVSTORE_REDIS_URL": "redis://127.0.0.1/?unheard_of=1"}, "/?unheard_of=1 is malformed"),
        ({"KVSTORE_POOL_PATH": "/no/such/folder/pool"}, "whose folder cannot take files (No such file"),
        (
            {"KVSTORE_POOL_BYTES": "1000TiB", "KVSTORE_EXTENT_BYTES": "1TiB"},
            "pool_bytes is 1099511627776000, but",
        ),
        (
            {"KVSTORE_POOL_BYTES": "8KiB", "KVSTORE_EXTENT_BYTES": "8KiB"},
            "does not fit an extent of 8192 bytes",
        ),
        ({"KVSTORE_DEVICE_BYTES": "1000TiB"}, "device_bytes is 1099511627776000, which cpu cannot allocate"),
        (
            {"KVSTORE_DEVICE_BYTES": "1MiB"},
            "blocks, expected at most 64, the device pool's; raise device_bytes to",
        ),
        (
            {"KVSTORE_DEVICE_BYTES": "1KiB"},
            "device_bytes is 1024, expected at least 16384, one block of 'tiny'",
        ),
        ({"KVSTORE_DEVICE": "cuda:99"}, "device is cuda:99, and torch finds"),
    ],
)
def test_a_bad_setting_is_one_message(
    run_here: Run, model_folder: Path, settings: dict[str, str], problem: str
) -> None:
    status, out, err = run_here("demo", "--json", "--model", str(model_folder), **settings)
    assert (status, out) == (2, "")
    assert problem in err
    assert err.count("error:") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--model", "/no/such/folder"), "model '/no/such/folder': there is no such folder; give a folder"),
        (("--redis-url", "redis://:6379"), "flag --redis-url = 'redis://:6379': expected redis://"),
    ],
)
def test_a_bad_option_is_one_message(run_here: Run, options: tuple[str, ...], problem: str) -> None:
    status, out, err = run_here("demo", "--json", *options)
    assert (status, out) == (2, "")
    assert problem in err
    assert err.count("error:") == 1


def test_a_model_without_a_tokenizer(run_here: Run, tmp_path: Path) -> None:
    folder = save_tiny_model(tiny_config("llama"), tmp_path / "mute")
    status, out, err = run_here("demo", "--json", "--model", str(folder))
    assert (status, out) == (2, "")
    assert "the model has no tokenizer, and the demo asks questions in words" in err


@pytest.mark.slow
def test_an_error_in_the_second_process_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(PrefillError, match="second worker ended with status 2; its message is above"):
        run_elsewhere(Job("tiny", {"pool_byte": 1}, []))
    assert "flag --pool-byte does not exist; did you mean --pool-bytes?" in capfd.readouterr().err


# -- the real model --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first run converts the model
def test_the_packaged_model_answers_from_the_cache_as_without(pytestconfig: pytest.Config) -> None:
    """About 300 tokens of the document, and a question."""
    cache_dir = pytestconfig.cache.mkdir("models")
    loaded = load_model(None, dtype=torch.float32, device="cpu", cache_dir=cache_dir)
    assert loaded.tokenizer is not None
    text = files("prefill.demo").joinpath("document.txt").read_text(encoding="utf-8")[:1300]
    first, second = (
        np.array(loaded.tokenizer(f"{text}\n{question}\n")["input_ids"], dtype=np.uint32)
        for question in ("What does the station measure?", "How many gauges are there?")
    )
    options = WorkerOptions(extent_bytes=64 << 20, host_extents=1)
    with make_worker(loaded, options) as worker, watch(loaded.model) as seen:
        expected = answer(worker.engine, request_of("cold", second, 12, reuse=False))
        rows = seen.rows()
        answer(worker.engine, request_of("first", first, 12))
        seen.clear()
        result = answer(worker.engine, request_of("second", second, 12))
        assert 250 < result.cached[TierName.DEVICE] < len(second) - 5
        assert result.tokens == expected.tokens
        torch.testing.assert_close(seen.rows(), rows, atol=1e-4, rtol=0)
        assert_quiet(worker)
