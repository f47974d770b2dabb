"""Makes docs/img/status.png: the live page of a server under a generated workload, as Chromium shows it.

The payloads mean nothing and the models are names only: this shows the page, not what a model would hit.

PYTHONPATH=. python docs/picture.py   # six minutes, most of them waiting
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from tests.support.chromium import chromium_tab
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import Peer, dialled, spec, tokens_of
from tests.support.valkey import ValkeyServer

PICTURE = Path(__file__).with_name("img") / "status.png"
SECONDS = 330
TURN_SECONDS = 0.06
DOCUMENTS = 24
DOCUMENT_BLOCKS = 40
QUESTION_BLOCKS = 4
NEW_SHARE = 0.15
"""Of requests: about a document that nobody asks about again."""
OUTAGE = range(180, 200)
"""Seconds in which Redis does not answer."""
WIDTH, SCALE = 1160, 0.9


def ask(peer: Peer, number: int, chance: random.Random) -> None:
    """One request: a question about a document, most often about one of the first."""
    document = min(int(chance.expovariate(0.2)), DOCUMENTS - 1)
    if chance.random() < NEW_SHARE:
        document = DOCUMENTS + number
    prompt = tokens_of(DOCUMENT_BLOCKS + QUESTION_BLOCKS, seed=document, tail=5)
    prompt[DOCUMENT_BLOCKS * 16 :] += number % 7  # one of seven questions
    answer = peer.acquire(prompt, f"r{number}", wait_seconds=0.2)
    if answer.lease_id:
        peer.release(answer.lease_id)
    if answer.blocks < DOCUMENT_BLOCKS + QUESTION_BLOCKS:
        peer.write(prompt)


def work(server: Sidecar, valkey: ValkeyServer) -> None:
    chance = random.Random(7)
    with dialled(server.address) as raw:
        peers = [
            raw.register(spec(model, payload_bytes=32 << 10))
            for model in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-14B")
        ]
        for turn in range(int(SECONDS / TURN_SECONDS)):
            second = int(turn * TURN_SECONDS)
            if second == OUTAGE.start:
                valkey.stop()
            if second == OUTAGE.stop:
                valkey.resume()
            ask(chance.choices(peers, (3, 1))[0], turn, chance)
            time.sleep(TURN_SECONDS * chance.uniform(0.5, 1.5))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        valkey = ValkeyServer(Path(folder), {"maxmemory": "200mb"})
        try:
            settings = {"pool_bytes": "32MiB", "redis_url": valkey.url}
            with sidecar(**settings) as server, chromium_tab() as tab:
                work(server, valkey)
                tab.resize(WIDTH, 900, SCALE)
                tab.open(server.serving["http"])
                tab.await_true("document.body?.dataset.drawn === '1'")
                tab.evaluate("document.querySelector('input[value=\"300\"]').click()")
                PICTURE.parent.mkdir(exist_ok=True)
                PICTURE.write_bytes(tab.picture("#what-if-section"))
        finally:
            valkey.close()


if __name__ == "__main__":
    main()
