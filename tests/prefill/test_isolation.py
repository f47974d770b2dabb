"""Equal tokens are not always equal prompts: salts, pictures, embeddings and other weights keep apart.

Cases 3, 6 and 7 of what users of such systems run into (vllm #44701; LMCache #3301 #4086 #690;
LMCache #4825, sglang #37160), here through the engine: what one request computed, another whose
identity differs must compute itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hashing import ContentItem, Extras
from kvstore.block import TierName
from prefill.assemble import Worker
from prefill.model import LoadedModel
from tests.support.valkey import ValkeyServer, shared_valkey, valkey
from tests.support.workers import (
    BLOCK_SIZE,
    WorkerOptions,
    answer,
    assert_quiet,
    load_tiny,
    make_worker,
    prompt_of,
    request_of,
    watch,
)

__all__ = ["shared_valkey", "valkey"]

PICTURE, OTHER_PICTURE = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))
LENGTH = 100
USABLE = 96


def picture(digest: bytes, start: int = 0, length: int = 20) -> Extras:
    return Extras(items=(ContentItem(digest, start, length),))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def worker(loaded: LoadedModel) -> Iterator[Worker]:
    with make_worker(loaded) as worker:
        yield worker


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (None, None, USABLE),
        (Extras(request_salt=b"a"), Extras(request_salt=b"a"), USABLE),
        (None, Extras(request_salt=b"a"), 0),
        (Extras(request_salt=b"a"), Extras(request_salt=b"b"), 0),
        (picture(PICTURE), picture(PICTURE), USABLE),
        (None, picture(PICTURE), 0),
        (picture(PICTURE), picture(OTHER_PICTURE), 0),
        (picture(PICTURE), picture(PICTURE, length=40), 32),
        (picture(PICTURE), picture(PICTURE, start=1), 0),
        (picture(PICTURE, start=40), picture(OTHER_PICTURE, start=40), 32),
        (Extras(request_salt=PICTURE), Extras(embeddings=(PICTURE,)), 0),
        (Extras(embeddings=(PICTURE,)), Extras(embeddings=(OTHER_PICTURE,)), 0),
        (Extras(embeddings=(None, PICTURE)), Extras(embeddings=(None, OTHER_PICTURE)), 16),
    ],
)
def test_equal_tokens_share_blocks_up_to_where_they_differ(
    worker: Worker, first: Extras | None, second: Extras | None, shared: int
) -> None:
    prompt = prompt_of(LENGTH)
    answer(worker.engine, request_of("first", prompt, extras=first))
    result = answer(worker.engine, request_of("second", prompt, extras=second))
    assert result.cached == ({TierName.DEVICE: shared} if shared else {})
    assert_quiet(worker)


def test_an_answer_belongs_to_its_salt(worker: Worker) -> None:
    """Blocks that are filled while decoding go on in the chain of their prompt, extras and all."""
    prompt, extras = prompt_of(40), Extras(request_salt=b"a")
    said = answer(worker.engine, request_of("turn 1", prompt, 40, extras=extras)).tokens
    dialogue = np.concatenate([prompt, np.array(said, dtype=np.uint32), prompt_of(5, seed=1)])
    without = answer(worker.engine, request_of("without", dialogue))
    same = answer(worker.engine, request_of("same", dialogue, extras=extras))
    assert (without.cached, same.cached) == ({}, {TierName.DEVICE: 64})
    assert_quiet(worker)


@pytest.mark.redis
def test_two_models_on_one_redis(
    tmp_path: Path,
    valkey: ValkeyServer,
) -> None:
    """Weights apart, tokens alike: neither hits, deletes nor overwrites what is the other's."""
    models = [load_tiny("llama", tmp_path, seed=seed) for seed in (1, 2)]
    prompt, options = prompt_of(LENGTH), WorkerOptions(redis_url=valkey.url)
    answers = []
    for loaded in models:
        with make_worker(loaded, options) as worker:
            result = answer(worker.engine, request_of("cold", prompt))
            assert result.cached == {}
            answers.append(result.tokens)
            assert_quiet(worker)
    assert answers[0] != answers[1]
    kept = everything_in(valkey)
    assert len(kept) == 2 * (LENGTH // BLOCK_SIZE)
    for loaded, expected in zip(models, answers, strict=True):
        with make_worker(loaded, options) as worker, watch(loaded.model) as seen:
            result = answer(worker.engine, request_of("warm", prompt))
            assert result.cached == {TierName.REDIS: USABLE}
            assert (result.tokens, seen.tokens[0]) == (expected, LENGTH - USABLE)
    assert everything_in(valkey) == kept
    assert valkey.calls().get("del", 0) == valkey.calls().get("unlink", 0) == 0


def everything_in(server: ValkeyServer) -> dict[bytes, bytes]:
    return {bytes(key): server.value(bytes(key)) for key in server.client.scan_iter()}
