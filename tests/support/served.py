"""A server with a prompt of which the first blocks are stored, and commands to ask about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.block import Chain
from kvstore.service.client import Client, ClientNamespace
from tests.support.clients import MAPPED, client_of, put
from tests.support.command_line import Asking
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import BLOCK_SIZE, make_chain, make_spec, tokens_of

LETTERS = "abcdefg"
STORED = 5
TAIL = 1
TOKENS = len(LETTERS) * BLOCK_SIZE + TAIL
HIT = STORED * BLOCK_SIZE


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    with sidecar() as running:
        yield running


@pytest.fixture(scope="module")
def asking(server: Sidecar) -> Asking:
    return Asking(server.address)


@pytest.fixture(scope="module")
def client(server: Sidecar) -> Iterator[Client]:
    with client_of(MAPPED, server.address) as made:
        yield made


@pytest.fixture
def model(client: Client, request: pytest.FixtureRequest) -> str:
    """A model of this test's own, of which the first five blocks of the prompt are stored."""
    name: str = request.node.name
    store(client.namespace(make_spec(name)), LETTERS[:STORED])
    return name


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompt.bin"
    path.write_bytes(prompt_ids().tobytes())
    return path


def prompt_ids() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return tokens_of(LETTERS, BLOCK_SIZE, TAIL)


def store(namespace: ClientNamespace, letters: str) -> Chain:
    chain = make_chain(make_spec(namespace.spec.namespace.model), letters)
    assert put(namespace, chain).committed_blocks == len(letters)
    return chain


def root_of(model: str) -> str:
    return make_spec(model).root.digest.hex()
