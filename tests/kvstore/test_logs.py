"""Logs: two formats, repeats limited, a file that can be rotated, and no name of a prompt in any of them."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from kvstore.block import WHOLE
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.logs import REPEATS_MAX, WINDOW_SECONDS, Throttle, logging_to
from kvstore.v1 import admin_pb2
from tests.support.command_line import spawn
from tests.support.serve_command import fails_to_serve
from tests.support.stubs import (
    Credentials,
    Peer,
    dialled,
    fork,
    opened,
    payload_of,
    refused,
    spec,
    tokens_of,
)
from tests.support.tenants import Entry, write_tenants
from tests.support.valkey import ValkeyServer, shared_valkey, valkey

__all__ = ["shared_valkey", "valkey"]

ROOT = "0123456789abcdef" * 2
log = logging.getLogger("kvstore.tests.logs")


def said(path: Path) -> list[str]:
    return path.read_text().splitlines()


def record(created: float, template: str = "node %s is slow", name: str = "kvstore.x") -> logging.LogRecord:
    made = logging.makeLogRecord({"name": name, "msg": template, "args": ("a",), "levelno": logging.WARNING})
    made.created = created
    return made


class Buffer:
    """Something that an error had in reach."""


class TestFormats:
    def test_lines_for_people(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        with logging_to(path, level="info", as_json=False):
            log.info("%d blocks", 3)
            log.debug("not shown")
        (line,) = said(path)
        assert line.endswith(" INFO kvstore.tests.logs: 3 blocks")

    def test_one_object_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        with logging_to(path, level="debug", as_json=True):
            log.debug('a "quoted"\nline')
            try:
                raise ConfigError(f"namespace {ROOT} is wrong")
            except ConfigError:
                log.exception("%s failed", "it")
        first, second = map(json.loads, said(path))
        assert set(first) == {"time", "level", "logger", "message"}
        assert (first["level"], first["message"]) == ("debug", 'a "quoted"\nline')
        assert (second["logger"], second["message"]) == ("kvstore.tests.logs", "it failed")
        assert second["exception"].endswith("ConfigError: namespace (hidden) is wrong")
        assert second["time"].endswith("+00:00")

    @pytest.mark.parametrize("as_json", [True, False])
    def test_roots_and_hashes_are_hidden_wherever_they_stand(self, tmp_path: Path, *, as_json: bool) -> None:
        path = tmp_path / "log"
        with logging_to(path, level="info", as_json=as_json):
            log.info("root %s, upper %s, with 0x%s", ROOT, ROOT.upper(), ROOT)
            log.error(f"namespace {ROOT}")
            log.info("epoch %d, pool %s", 2**63, "/dev/shm/pool")
            log.info("request chatcmpl-%s ended", "0" * 32)
        text = path.read_text()
        assert ROOT not in text.lower()
        assert text.count("(hidden)") == 4
        assert str(2**63) in text, "numbers are no names"
        assert f"chatcmpl-{'0' * 32} ended" in text, "clients complain by these"

    def test_bytes_as_python_shows_them_are_hidden_too(self, tmp_path: Path) -> None:
        """A KeyError of a block's name has no other text."""
        path = tmp_path / "log"
        with logging_to(path, level="info", as_json=False):
            for name in (bytes(range(16)), b"'" + bytes(range(240, 256)), bytes.fromhex(ROOT)):
                log.warning("no %s, nor key_%s_b", KeyError(name), name.hex())
            log.warning("the reply is %s", b"+OK")
        first, second, third, short = said(path)
        for line in (first, second, third):
            assert line.endswith(" no (hidden), nor key_(hidden)_b")
        assert "b'+OK'" in short

    def test_what_went_before_is_as_it_was(self, tmp_path: Path) -> None:
        root = logging.getLogger()
        before = (root.level, list(root.handlers))
        with logging_to(tmp_path / "log", level="error", as_json=False):
            assert root.level == logging.ERROR
        assert (root.level, list(root.handlers)) == before

    def test_a_caller_that_gave_up_is_no_error_of_the_servers(self, tmp_path: Path) -> None:
        path, of_grpc = tmp_path / "log", logging.getLogger("grpc._cython.cygrpc")
        with logging_to(path, level="info", as_json=False):
            of_grpc.error(
                "ExecuteBatchError raised in core by servicer method [/kvstore.v1.BlockService/Acquire]"
            )
            of_grpc.error("something else")
        (line,) = said(path)
        assert line.endswith("something else")


class TestRepeats:
    def test_the_first_few_a_minute_are_shown_and_the_rest_counted(self) -> None:
        throttle = Throttle()
        shown = [throttle.filter(record(100.0 + at)) for at in range(30)]
        assert shown == [True] * REPEATS_MAX + [False] * (30 - REPEATS_MAX)
        late = record(100.0 + WINDOW_SECONDS)
        assert throttle.filter(late)
        assert late.left_out == 30 - REPEATS_MAX  # type: ignore[attr-defined]
        again = record(101.0 + WINDOW_SECONDS)
        assert throttle.filter(again)
        assert again.left_out == 0  # type: ignore[attr-defined]

    def test_kinds_are_limited_each_for_itself(self) -> None:
        throttle = Throttle()
        for at in range(REPEATS_MAX + 5):
            throttle.filter(record(float(at)))
        assert not throttle.filter(record(20.0))
        assert throttle.filter(record(20.0, template="another"))
        assert throttle.filter(record(20.0, name="kvstore.y"))

    def test_memory_is_bounded_however_many_kinds_there_are(self) -> None:
        throttle = Throttle()
        for number in range(5000):
            throttle.filter(record(0.0, template=f"made up {number}"))
        assert len(throttle) == 1024

    def test_what_is_left_out_keeps_nothing_alive_that_an_error_had_in_reach(self) -> None:
        """A traceback has its frames, whose buffers would keep shared memory from being closed."""
        throttle, kept = Throttle(), list[weakref.ref[Buffer]]()

        def failing(buffer: Buffer) -> logging.LogRecord:
            kept.append(weakref.ref(buffer))
            made = record(1.0)
            try:
                raise ConfigError("no")
            except ConfigError as error:
                made.exc_info, made.args = (ConfigError, error, error.__traceback__), (error,)
            return made

        for _ in range(REPEATS_MAX + 3):
            throttle.filter(failing(Buffer()))
        gc.collect()
        assert not any(each() is not None for each in kept)
        (last,) = throttle.left_out()
        assert last.getMessage() == "node no is slow"

    def test_what_was_left_out_is_told_at_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        with logging_to(path, level="info", as_json=True):
            for number in range(REPEATS_MAX + 7):
                log.info("again %d", number)
        lines = [json.loads(line) for line in said(path)]
        assert len(lines) == REPEATS_MAX + 1
        assert (lines[-1]["message"], lines[-1]["left_out"]) == (f"again {REPEATS_MAX + 6}", 6)
        assert not any("left_out" in line for line in lines[:-1])


class TestFile:
    def test_a_file_that_is_moved_away_is_opened_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        with logging_to(path, level="info", as_json=False):
            log.info("one")
            path.rename(tmp_path / "log.1")
            log.info("two")
        assert [len(said(tmp_path / name)) for name in ("log", "log.1")] == [1, 1]

    def test_while_it_cannot_be_opened_whoever_logs_goes_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The store logs in the middle of its work, and must not be stopped by a log."""
        folder = tmp_path / "logs"
        folder.mkdir()
        with logging_to(folder / "log", level="info", as_json=False):
            log.info("one")
            folder.rename(tmp_path / "old")
            log.info("two")
            log.info("three")
            folder.mkdir()
            log.info("four")
        assert [line[-4:] for line in said(folder / "log")] == ["four"]
        assert [line[-3:] for line in said(tmp_path / "old" / "log")] == ["one"]
        told = capsys.readouterr().err.splitlines()
        assert [line.rpartition(" ")[2] for line in told] == ["two", "three"]

    def test_what_a_full_disk_does_not_take_is_told_on_stderr(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with logging_to(Path("/dev/full"), level="info", as_json=False):
            for number in range(3):
                log.info("%d of %s", number, ROOT)
        told = capsys.readouterr().err.splitlines()
        assert [line.partition(": ")[2] for line in told] == [f"{number} of (hidden)" for number in range(3)]

    def test_one_that_cannot_be_written_is_an_error_at_the_start(self, tmp_path: Path) -> None:
        message = fails_to_serve(log_file=tmp_path / "nowhere" / "log")
        assert "log_file = " in message
        assert "cannot be written (No such file or directory)" in message


class TestServer:
    def test_no_name_of_a_prompt_and_no_secret_is_logged(self, tmp_path: Path, valkey: ValkeyServer) -> None:
        """What a busy server says at its most talkative, with errors of every kind."""
        tenant = Entry("ops", "admin = true")
        path = tmp_path / "log"
        with server(tmp_path, path, valkey, tenant) as address:
            with dialled(address, Credentials(token=tenant.token)) as raw:
                peer = raw.register(spec("busy"))
                busy(peer, valkey)
                chain, prompt = peer.chain(PROMPT), PROMPT
            with dialled(address, Credentials(token="wrong" * 5)) as stranger, refused(UNAUTHENTICATED):
                stranger.status()
        text = path.read_text()
        messages = [json.loads(line) for line in text.splitlines()]
        assert {"debug", "info", "warning"} <= {each["level"] for each in messages}
        assert any("redis" in each["logger"] for each in messages), "the outage is told of"
        told = {each["message"].partition(" = ")[0] for each in messages}
        assert set(Config.model_fields) <= told, "no setting is taken for a repeat of another"
        names = [
            chain.root.digest,
            *opened(chain.hashes),
            tenant.salt,
            payload_of(chain.hashes[:16], WHOLE, 16),
        ]
        for name in names:
            assert name.hex() not in text.lower()
            assert repr(name)[2:-1] not in text
        numbers = prompt.tolist()
        for first, second in pairwise(numbers):
            assert f"{first}, {second}" not in text
            assert f"{first} {second}" not in text
        for secret in (tenant.token, "wrong" * 5):
            assert secret not in text


PROMPT = tokens_of(8, tail=3)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@contextmanager
def server(folder: Path, log_file: Path, valkey: ValkeyServer, tenant: Entry) -> Iterator[str]:
    """As a user starts it; its address."""
    socket = f"unix:{folder}/socket"
    settings: dict[str, str | Path] = {
        "pool-path": folder / "pool",
        "pool-bytes": "4MiB",
        "extent-bytes": "1MiB",
        "listen": socket,
        "http-listen": "none",
        "redis-url": valkey.url,
        "tenants-file": write_tenants(folder / "tenants.toml", tenant),
        "log-file": log_file,
        "log-format": "json",
        "log-level": "debug",
        "drain-seconds": "100ms",
        "record": folder / "trace.jsonl",
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with spawn("serve", *flags, "--json") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield socket
        process.terminate()
        assert process.wait(20) == 0


def busy(peer: Peer, valkey: ValkeyServer) -> None:
    """Hits, misses, requests that are refused, and a redis that fails."""
    peer.write(PROMPT)
    peer.assert_holds(PROMPT)
    peer.acquire(fork(PROMPT, 3), "fork")
    peer.explain(PROMPT)
    raw = peer.raw
    with refused(grpc.StatusCode.NOT_FOUND):
        raw.admin.Clear(admin_pb2.ClearRequest(namespace=bytes(range(16))))
    with refused(grpc.StatusCode.FAILED_PRECONDITION):
        peer.hold(PROMPT, "twice")
        peer.acquire(fork(PROMPT, 3), "twice")
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        peer.look_up(PROMPT, tiers=[99])
    raw.admin.Clear(admin_pb2.ClearRequest())
    with valkey.frozen():
        for seed in range(5):
            peer.acquire(tokens_of(4, seed=seed + 10), f"silent-{seed}", wait_seconds=5.0)
