"""Where does the time of one look-up by token ids go?

The whole call and the empty handler's are those of servers; the steps between them are timed by
themselves, in this process, with the functions that the server calls. What is left is the way
through the service: the token, the metrics, the event loop.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from report import Report, interleaved_medians
from service_calls import Stub, Tokens, by_tokens, draw_prompts, open_client, write_prompts
from service_processes import BLOCK_SIZE, Processes, spec_of

from kvstore.block import WHOLE, Chain
from kvstore.evict.lru import LRU
from kvstore.service.codec import TIERS, chain_of
from kvstore.store import Lookup, TieredStore, Tiers
from kvstore.tiers.host import HostTier
from kvstore.v1 import lookup_pb2

TOKENS = 32_768
ROUNDS = 200
PAYLOAD_BYTES = 64
POOL_BYTES = 64 << 20


def measure_split(report: Report, processes: Processes) -> None:
    """A call in its parts, in milliseconds and as a share of the whole."""
    server, empty = processes.sidecar(pool_bytes=str(POOL_BYTES)), processes.empty()
    spec, prompts = spec_of("split", PAYLOAD_BYTES), draw_prompts(1, TOKENS, seed=11)
    ours, bare = Stub(server), Stub(empty)
    with open_client(server) as client, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        namespace = client.namespace(spec)
        write_prompts(namespace, prompts)
        processes.settle()
        questions = [by_tokens(namespace, tokens) for tokens in prompts]
        host = HostTier(
            Path(folder) / "pool",
            pool_bytes=POOL_BYTES,
            extent_bytes=POOL_BYTES,
            make_evictor=LRU,
            clock=time.monotonic,
        )
        store = TieredStore(Tiers(host), clock=time.monotonic)
        calls = {"whole call": ours.asks(questions), "empty handler": bare.sends(questions)}
        steps = _steps(store, prompts[0])
        medians = interleaved_medians(calls | steps, ROUNDS)
        store.close()
    ours.close()
    bare.close()
    whole = medians["whole call"]
    # Parsing is part of what the empty handler costs.
    known = medians["empty handler"] + sum(medians[step] for step in steps if step != "parse")
    for step, seconds in {**medians, "service": whole - known}.items():
        report.result(
            part="split", case=f"{TOKENS:,} tokens, {step}", ms=seconds * 1e3, share=seconds / whole
        )


def _steps(store: TieredStore, tokens: Tokens) -> dict[str, Callable[[], object]]:
    spec = spec_of("split", PAYLOAD_BYTES)
    store.register(spec)
    chain = Chain.of(spec.root, tokens)
    with store.write(chain):
        pass
    request = lookup_pb2.LookupRequest()
    request.prompt.namespace, request.prompt.token_ids = spec.root.digest, tokens.tobytes()
    message, found = request.SerializeToString(), store.lookup(chain, (WHOLE,))
    assert found.verified == len(tokens), found
    return {
        "parse": lambda: lookup_pb2.LookupRequest.FromString(message),
        "hash": lambda: chain_of(request.prompt, spec.root),
        "match and compare": lambda: store.lookup(chain, (WHOLE,)),
        "encode": lambda: _encode(chain, found),
    }


def _encode(chain: Chain, found: Lookup) -> bytes:
    tiers = [
        lookup_pb2.TierTokens(tier=TIERS[tier], served_tokens=found.served.get(tier), leading_tokens=alone)
        for tier, alone in found.alone.items()
    ]
    answer = lookup_pb2.LookupResponse(
        block_size=BLOCK_SIZE,
        prompt_blocks=len(chain),
        blocks_read=len(chain),
        matched_tokens=found.matched,
        verified_tokens=found.verified,
        tiers=tiers,
    )
    packed: bytes = answer.SerializeToString()
    return packed
