"""One process writes a prompt's blocks, another finds and reads them; starts ``kvstore serve`` by itself."""

import multiprocessing
import subprocess
import sys
import tempfile

from hashing import KVShape, Namespace
from kvstore.service.client import Client
from kvstore.spec import NamespaceSpec

SPEC = NamespaceSpec(Namespace("my-model", "2026-11", "bfloat16", "LPNHD", 16, KVShape(24, 2, 8, 64)))
PROMPT = list(range(1000))


def write(address: str) -> None:
    with Client(address) as client, client.namespace(SPEC).write(PROMPT) as staged:
        for number, payload in enumerate(staged.payloads):  # numpy views of the server's memory
            payload[:] = number


def read(address: str) -> None:
    with Client(address) as client, client.namespace(SPEC).acquire(PROMPT + PROMPT) as lease:
        found = [int(view[0]) for view in lease.views()]  # in place, and held until the lease ends
        print(f"{lease.tokens} of {2 * len(PROMPT)} tokens are cached, in blocks {found}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        flags = f"--json --pool-path {folder}/pool --listen unix:{folder}/socket --http-listen none"
        serve = [sys.executable, "-m", "kvstore", "serve", *flags.split()]
        with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()  # one line, as soon as it serves
            for step in (write, read):
                process = multiprocessing.Process(target=step, args=(f"unix:{folder}/socket",))
                process.start()
                process.join()
            server.terminate()
