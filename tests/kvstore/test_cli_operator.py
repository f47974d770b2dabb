"""What operators' programs use and no command does: many prompts in one call, events, shares."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.block import HASH_BYTES, WHOLE, TierName
from kvstore.service.client import Client, Outcome
from kvstore.service.client.options import CallError
from kvstore.service.operator import Operator, PromptQuery, RequestError
from kvstore.service.reports import BlockEvent, EventBatch
from tests.support.clients import FAST, MAPPED, client_of
from tests.support.served import LETTERS, STORED, client, model, server, store
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import BLOCK_SIZE, make_chain, make_spec, tokens_of

__all__ = ["client", "model", "server"]


@pytest.fixture
def operator(server: Sidecar) -> Iterator[Operator]:
    with Operator(server.address) as opened:
        yield opened


def query(model: str, letters: str) -> PromptQuery:
    return PromptQuery(tokens_of(letters, BLOCK_SIZE).tobytes(), model=model)


def test_many_prompts_are_looked_up_in_one_call_in_order(operator: Operator, model: str) -> None:
    prompts = [query(model, letters) for letters in ("abx", "x", LETTERS, "")]
    found = operator.lookup_all(prompts, tiers=[TierName.HOST], max_blocks=4)
    assert [each.matched_tokens // BLOCK_SIZE for each in found] == [2, 0, 4, 0]
    assert found == [operator.lookup(each, tiers=[TierName.HOST], max_blocks=4) for each in prompts]


def test_one_operator_serves_several_threads(operator: Operator, model: str) -> None:
    found: list[int] = []

    def ask() -> None:
        found.extend(operator.lookup(query(model, LETTERS)).matched_tokens for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [STORED * BLOCK_SIZE] * 80


def test_events_tell_of_blocks_that_come_and_go_from_a_cursor_on() -> None:
    spec = make_spec("watched")
    chain = make_chain(spec, "abc")
    with sidecar() as alone, client_of(MAPPED, alone.address) as client, Operator(alone.address) as operator:
        first = next(operator.events())
        assert first == EventBatch(int(alone.serving["epoch"]), first.sequence, lost=False, events=())
        store(client.namespace(spec), "abc")
        operator.clear(namespace=spec.root.digest)
        events: list[BlockEvent] = []
        for batch in operator.events(epoch=first.epoch, sequence=first.sequence):
            events += batch.events
            if any(event.removed for event in events):
                break
        stored = [event for event in events if not event.removed]
        removed = [event for event in events if event.removed]
        assert b"".join(event.block_hashes for event in stored) == chain.hashes
        gone = b"".join(event.block_hashes for event in removed)
        assert {gone[at : at + HASH_BYTES] for at in range(0, len(gone), HASH_BYTES)} == {
            chain.hashes[at : at + HASH_BYTES] for at in range(0, len(chain.hashes), HASH_BYTES)
        }
        assert {(each.tier, each.namespace, each.shard) for each in events} == {
            (TierName.HOST, spec.root.digest, WHOLE)
        }
        assert removed[0].cause
        assert next(operator.events(epoch=1, sequence=5)).lost, "a cursor of another server's"


def test_a_share_can_be_set_while_the_server_runs(tmp_path: Path) -> None:
    token = "a" * 22
    tenants = tmp_path / "tenants.toml"
    (tmp_path / "tokens").write_text(token)
    tenants.write_text(
        f'[[tenant]]\nname = "ops"\ntoken_file = "tokens"\nsalt = "{"02" * 16}"\nadmin = true\n'
    )
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    with sidecar(tenants_file=str(tenants)) as guarded, Operator(guarded.address, token=token) as operator:
        operator.set_quota("ops", 1 << 20)
        assert [(each.name, each.share_bytes) for each in operator.status().tenants] == [("ops", 1 << 20)]
        with pytest.raises(RequestError, match="nobody"):
            operator.set_quota("nobody", 1)
        with Client(guarded.address, token=token, options=FAST) as client:
            assert client.namespace(make_spec("m")).register() is Outcome.OK


def test_errors_say_whose_fault_it_is(server: Sidecar, operator: Operator, model: str) -> None:
    with pytest.raises(RequestError, match=r"has no name; .* \(INVALID_ARGUMENT from unix:"):
        operator.pin("", query(model, "a"))
    with Operator(f"{server.address}-not", timeout_seconds=2.0) as lost:
        with pytest.raises(CallError, match="no server answers at") as raised:
            lost.status()
        assert raised.value.outcome is Outcome.UNREACHABLE
        with pytest.raises(CallError, match="no server answers at"):
            next(lost.events())
    long = PromptQuery(bytes(20 << 20), model=model)
    with pytest.raises(RequestError, match=r"the request has 209\d+ bytes, at most 16777216 are taken"):
        operator.lookup(long)
