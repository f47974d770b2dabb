"""A model over three tiers: one worker prefills a prompt, another takes it over through Redis.

Run it with ``.venv/bin/python examples/handoff.py`` after ``make demo`` has installed what it needs.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore.config import Config
from kvstore.tiers.redis_embedded import EmbeddedRedis
from prefill.assemble import Worker, build_worker, load_configured
from prefill.handoff import Handoff
from prefill.output import StepOutput
from prefill.request import Request

TEXT = "A prefix cache keeps what a model has computed of a prompt, so that nobody computes it twice. " * 40


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, EmbeddedRedis.start() as redis:
        settings = {"redis_url": redis.url, "redis_acquire_seconds": 10.0}
        config = Config(pool_path=Path(folder) / "first", **settings)
        loaded = load_configured(None, config, Path.home() / ".cache" / "prefix-kvstore")
        assert loaded.tokenizer is not None
        tokens = np.array(loaded.tokenizer(TEXT)["input_ids"], dtype=np.uint32)

        def request(name: str) -> Request:
            return Request(name, tokens, max_new_tokens=12, arrived=time.monotonic())

        first = build_worker(loaded, config, clock=time.monotonic)
        second = build_worker(
            loaded, Config(pool_path=Path(folder) / "second", **settings), clock=time.monotonic
        )
        for name in ("cold", "warm"):
            tell(name, first, request(name))

        first.engine.submit_prefill(request("handed over"))
        [done] = finish(first)
        assert done.handoff is not None
        message = done.handoff.to_bytes()
        first.store.drain(30.0)  # whole blocks go through Redis, the unfinished tail in the message
        second.engine.resume(Handoff.from_bytes(message))
        admitted, *others, last = finish(second)
        assert admitted.admitted  # the second worker holds its own lease now
        first.engine.acknowledge("handed over")
        assert last.result is not None
        result = last.result
        print(
            f"handed over: {len(message)} bytes, {result.computed_tokens} prompt tokens computed again, "
            f"{len(others) + 1} tokens said by the second worker"
        )
        print(loaded.tokenizer.decode(result.tokens))
        first.close()
        second.close()


def tell(name: str, worker: Worker, request: Request) -> None:
    [result] = worker.engine.run([request])
    milliseconds = result.ttft_seconds * 1000
    print(
        f"{name}: {result.cached_tokens} of {result.prompt_tokens} tokens cached, TTFT {milliseconds:.0f} ms"
    )


def finish(worker: Worker) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while not worker.engine.idle:
        outputs += worker.engine.step()
    return outputs


if __name__ == "__main__":
    main()
