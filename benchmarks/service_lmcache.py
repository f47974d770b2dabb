"""LMCache's server asked for resident prompts: a program of its own, for an interpreter that has LMCache.

Written for lmcache 0.5.6. A look-up is Lookup and WaitPrefetchStatus, which hands over its result; the locks
that it takes are given back outside the measured time. Prints one object: median seconds by prompt length.
"""

from __future__ import annotations

import importlib
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

CHUNK_TOKENS = 16
START_SECONDS = 60.0
STOP_SECONDS = 20.0
REPLY_SECONDS = 60.0


def main(lengths: list[int], rounds: int) -> None:
    """Start a server, fill it, ask it; one line on stdout at the end."""
    rpc, http, metrics = (free_port() for _ in range(3))
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--transport", "grpc"]
    command += ["--port", str(rpc), "--http-port", str(http), "--prometheus-port", str(metrics)]
    command += ["--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven"]
    command += ["--l1-size-gb", "2", "--l1-init-size-gb", "2", "--eviction-policy", "LRU"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await_health(server, f"http://127.0.0.1:{http}/healthcheck")
        found = {length: measure(f"grpc://localhost:{rpc}", length, rounds) for length in lengths}
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    print(json.dumps(found))


def measure(url: str, length: int, rounds: int) -> float:
    """Median seconds to look up one resident prompt of ``length`` tokens."""
    bench = "lmcache.cli.commands.bench.server_bench"
    client_module, config_module, helpers = (
        importlib.import_module(f"{bench}.{name}") for name in ("client", "config", "helpers")
    )
    blocks = length // CHUNK_TOKENS + 1
    config = config_module.BenchConfig(
        rpc_url=url,
        http_url="",
        mode="cpu",
        transfer_mode="engine_driven",
        tp_size=1,
        use_mla=False,
        num_tokens=length - 1,  # the number of the sequence comes before them
        kvcache_shape_spec=f"(2,{blocks},{CHUNK_TOKENS},1,8):float16:1",
        num_blocks=blocks,
        block_size=CHUNK_TOKENS,
    )
    client = client_module.ServerBenchClient(config, lambda _: None)
    client.start()
    try:
        stored = client.create_request(0, "store", "cold")
        result = client.store(stored, 0, stored.num_full_tokens)
        assert result.succeeded, result
        calls = client._req_client  # noqa: SLF001 - its own client, with its own codec
        seconds = []
        for number in range(rounds + 1):
            name = f"look-up-{length}-{number}"
            key = helpers._make_key(stored.token_ids, name, end=stored.num_full_tokens)  # noqa: SLF001
            started = time.perf_counter()
            calls.lookup(key, 1).result(REPLY_SECONDS)
            hit = calls.wait_prefetch_status(key.request_id, REPLY_SECONDS).result(REPLY_SECONDS)
            seconds.append(time.perf_counter() - started)
            assert hit == stored.total_chunks, (hit, stored.total_chunks)
            calls.free_lookup_locks(key, 1).result(REPLY_SECONDS)
            calls.end_session(key.request_id).result(REPLY_SECONDS)
        return statistics.median(seconds[1:])
    finally:
        client.close()


def await_health(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server's HTTP port says that it is well."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"LMCache's server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=1.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"LMCache's server was not healthy within {START_SECONDS:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main([int(length) for length in sys.argv[2:]], int(sys.argv[1]))
