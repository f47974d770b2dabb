"""What the parts of ``service.py`` share on the client's side: prompts, messages, bare stubs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray
from service_processes import BLOCK_SIZE, Running

from kvstore.block import Chain
from kvstore.service.client import Client, ClientNamespace, ClientOptions
from kvstore.v1 import admin_pb2, admin_pb2_grpc, lookup_pb2, types_pb2

LOOKUP = "/kvstore.v1.LookupService/Lookup"
# A benchmark shall be slow rather than give up beside a busy neighbour.
PATIENT = ClientOptions(rpc_seconds=30.0)

Tokens = NDArray[np.uint32]


@dataclass(frozen=True)
class Question:
    """A look-up as it travels, and the answer that is right: all of the prompt, compared or not."""

    message: bytes
    matched_tokens: int
    verified_tokens: int


def draw_prompts(count: int, tokens: int, seed: int) -> list[Tokens]:
    """Prompts that have nothing in common."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2**17, tokens).astype(np.uint32) for _ in range(count)]


def open_client(server: Running) -> Client:
    return Client(server.address, token=server.token, options=PATIENT)


def clear_blocks(server: Running) -> int:
    """Make the server forget all blocks but those that somebody holds; their number."""
    with grpc.insecure_channel(server.address) as channel:
        clear = admin_pb2_grpc.AdminServiceStub(channel).Clear
        cleared = clear(admin_pb2.ClearRequest(), metadata=server.metadata, timeout=30.0)
    held: int = cleared.held_blocks
    return held


def write_prompts(namespace: ClientNamespace, prompts: list[Tokens]) -> None:
    """Make prompts resident."""
    for tokens in prompts:
        with namespace.write(tokens) as staged:
            for payload in staged.payloads:
                payload[:8] = 1
        blocks = len(tokens) // BLOCK_SIZE
        assert staged.committed_blocks == blocks, (staged.outcome, staged.committed_blocks, blocks)


def by_tokens(namespace: ClientNamespace, tokens: Tokens) -> Question:
    """The server hashes, matches, and compares token ids."""
    prompt = types_pb2.Prompt(namespace=_root(namespace), token_ids=tokens.tobytes())
    message = lookup_pb2.LookupRequest(prompt=prompt).SerializeToString()
    return Question(message, len(tokens), len(tokens))


def by_hashes(namespace: ClientNamespace, tokens: Tokens) -> Question:
    """The server matches hashes, and has nothing to compare."""
    assert namespace.root is not None
    hashes = Chain.of(namespace.root, tokens).hashes
    prompt = types_pb2.Prompt(namespace=_root(namespace), block_hashes=hashes, prompt_tokens=len(tokens))
    message = lookup_pb2.LookupRequest(prompt=prompt).SerializeToString()
    return Question(message, len(tokens), 0)


class Stub:
    """A blocking stub that sends bytes as they are, and the token."""

    def __init__(self, server: Running) -> None:
        self._metadata = server.metadata
        self._channel = grpc.insecure_channel(
            server.address, options=(("grpc.use_local_subchannel_pool", 1),)
        )
        self._lookup: Callable[..., lookup_pb2.LookupResponse] = self._channel.unary_unary(
            LOOKUP, request_serializer=None, response_deserializer=lookup_pb2.LookupResponse.FromString
        )

    def asks(self, questions: list[Question]) -> Callable[[], None]:
        """A function that asks the next question, round and round, and checks the answer."""
        turn = itertools.cycle(questions)

        def ask() -> None:
            question = next(turn)
            answer = self._lookup(question.message, metadata=self._metadata, timeout=30.0)
            assert answer.matched_tokens == question.matched_tokens, answer
            assert answer.verified_tokens == question.verified_tokens, answer

        return ask

    def sends(self, questions: list[Question]) -> Callable[[], object]:
        """The same bytes to a server that does not answer them."""
        turn = itertools.cycle(questions)
        return lambda: self._lookup(next(turn).message, metadata=self._metadata, timeout=30.0)

    def close(self) -> None:
        self._channel.close()


def looks_up(namespace: ClientNamespace, prompts: list[Tokens]) -> Callable[[], None]:
    """The same through the client, which hashes first and sends token ids and hashes."""
    turn: Iterator[Tokens] = itertools.cycle(prompts)

    def ask() -> None:
        tokens = next(turn)
        found = namespace.lookup(tokens)
        assert found.matched_tokens == found.verified_tokens == len(tokens), found

    return ask


def _root(namespace: ClientNamespace) -> bytes:
    assert namespace.root is not None
    return namespace.root.digest
