"""The tenants file is read again while the server runs: SIGHUP says that it has changed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from kvstore.service.client import Client
from kvstore.v1 import admin_pb2
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import make_spec
from tests.support.stubs import YOURS, Credentials, dialled, refused, spec, tokens_of
from tests.support.tenants import Entry, write_tenants
from tests.support.valkey import eventually

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PROMPT = tokens_of(8, tail=3)
SHARE_BYTES = 20 * 60_032
"""Of 20 blocks of 60,000 bytes."""

SEARCH = Entry("search")
CHAT = Entry("chat", f"share_bytes = {SHARE_BYTES}\n")
OPS = Entry("ops", "admin = true\n")


class Reread(NamedTuple):
    """A server whose tenants file can be written anew."""

    server: Sidecar
    path: Path
    log: Path

    def __call__(self, *entries: Entry) -> str:
        """Make these the tenants; what the server says of it."""
        write_tenants(self.path, *entries)
        return self.told("is read again")

    def told(self, words: str) -> str:
        """Have the server read the file that is there; the line with these words that it logs then."""

        def lines() -> list[str]:
            return [line for line in self.log.read_text().splitlines() if words in line]

        known = len(lines())
        self.server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: len(lines()) > known)
        return lines()[-1]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reread]:
    folder = tmp_path_factory.mktemp("tenants")
    path, log = write_tenants(folder / "tenants.toml", SEARCH, CHAT, OPS), folder / "log"
    with sidecar(tenants_file=str(path), pool_bytes="4MiB", log_file=str(log)) as server:
        yield Reread(server, path, log)


@pytest.fixture
def reread(running: Reread) -> Reread:
    """The three tenants, whatever there was before."""
    running(SEARCH, CHAT, OPS)
    return running


def test_new_tokens_and_tenants_are_let_in_and_old_ones_are_not(reread: Reread) -> None:
    with dialled(reread.server.address, Credentials(SEARCH.token)) as raw:
        peer = raw.register(spec("changed"))
        peer.write(PROMPT)
        moved, late = SEARCH._replace(token_of="another"), Entry("late")
        assert reread(moved, late, OPS).endswith("3 tenants; new: late; gone: chat")
        with refused(UNAUTHENTICATED, "unknown"):
            peer.matched(PROMPT)
    with dialled(reread.server.address, Credentials(moved.token)) as raw:
        assert raw.register(spec("changed")).matched(PROMPT) == 128, "it is the same tenant"
    with dialled(reread.server.address, Credentials(CHAT.token)) as raw, refused(UNAUTHENTICATED):
        raw.register(spec("gone"))
    with dialled(reread.server.address, Credentials(late.token)) as raw:
        assert raw.register(spec("changed")).matched(PROMPT) == 0


def test_shares_are_those_of_the_file(reread: Reread) -> None:
    with (
        dialled(reread.server.address, Credentials(OPS.token)) as ops,
        dialled(reread.server.address, Credentials(SEARCH.token)) as raw,
        dialled(reread.server.address, Credentials(CHAT.token)) as other,
    ):
        ops.admin.Clear(admin_pb2.ClearRequest())
        large = spec("shares", payload_bytes=60_000)
        theirs, pushing = raw.register(large), other.register(large)
        prompts = [tokens_of(10, seed=seed) for seed in (1, 2)]
        for prompt in prompts:
            theirs.write(prompt)
        ops.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant="ops", share_bytes=1 << 20))
        guaranteed = SEARCH._replace(fields=f"share_bytes = {SHARE_BYTES}\n")
        reread(guaranteed, CHAT._replace(fields=""), OPS)
        shares = {each.name: each.share_bytes for each in ops.status().tenants}
        assert shares == {"search": SHARE_BYTES, "chat": 0, "ops": 0}
        for seed in range(10, 20):
            pushing.write(tokens_of(10, seed=seed))  # more than the pool holds
        assert [theirs.matched(prompt) for prompt in prompts] == [160, 160]


def test_who_is_gone_keeps_nothing_and_finds_its_blocks_when_it_is_back(reread: Reread) -> None:
    boss = Entry("boss", "admin = true\n")
    reread(SEARCH, boss, OPS)
    with dialled(reread.server.address, Credentials(boss.token)) as raw:
        peer = raw.register(spec("kept"))
        peer.write(PROMPT)
        raw.admin.Pin(admin_pb2.PinRequest(name="all", prompt=peer.prompt(PROMPT)))
        reread(SEARCH, OPS)
        with dialled(reread.server.address, Credentials(OPS.token)) as ops:
            listed = ops.admin.ListNamespaces(admin_pb2.ListNamespacesRequest()).namespaces
            assert not ops.status().pins
            assert "boss" not in {each.tenant for each in listed}
        reread(SEARCH, boss, OPS)
        with refused(NOT_FOUND, "register it first"):
            peer.matched(PROMPT)
        assert peer.again().matched(PROMPT) == 128
        reread(SEARCH, boss._replace(salt_of="another"), OPS)
        with refused(NOT_FOUND, "register it first"):
            peer.matched(PROMPT)
        assert peer.again().answer.namespace != peer.answer.namespace


def test_a_client_learns_that_it_may_map_the_pool_and_that_it_may_no_more(reread: Reread) -> None:
    prompt = PROMPT.tolist()
    with Client(reread.server.address, token=SEARCH.token) as client:
        first = client.namespace(make_spec("first", payload_bytes=1024))
        for number, fields in enumerate(["", "maps_pool = true\n", ""]):
            reread(SEARCH._replace(fields=fields), OPS)
            for namespace in (client.namespace(make_spec(f"{number}", payload_bytes=1024)), first):
                with namespace.write(prompt) as staged:
                    for payload in staged.payloads:
                        payload[:] = number
                with namespace.acquire(prompt) as lease:
                    assert len(lease.views()) == len(prompt) // namespace.spec.block_size
                assert namespace.mapped == bool(fields)
        assert not client.failures


def test_a_client_that_is_taken_for_one_that_streams_registers_again(reread: Reread) -> None:
    """As between the registration of one of its threads and the next call of another."""
    maps = SEARCH._replace(fields="maps_pool = true\n")
    reread(maps, OPS)
    prompt = PROMPT.tolist()
    with (
        Client(reread.server.address, token=maps.token) as client,
        dialled(reread.server.address, Credentials(maps.token)) as raw,
    ):
        namespace = client.namespace(make_spec("taken", payload_bytes=1024))
        with namespace.write(prompt) as staged:
            staged.copy_in([bytes(1024)] * len(staged.payloads))
        with namespace.acquire(prompt) as lease:
            ticket = lease.ticket()
        assert ticket is not None
        raw.register(spec("taken"), client=ticket.number)
        with namespace.acquire(prompt) as lease:
            assert len(lease.views()) == len(prompt) // namespace.spec.block_size


def test_whoever_watches_events_learns_no_more_of_them(reread: Reread) -> None:
    with (
        dialled(reread.server.address, Credentials(OPS.token)) as raw,
        dialled(reread.server.address, Credentials(SEARCH.token)) as other,
    ):
        watched = raw.admin.WatchEvents(admin_pb2.WatchEventsRequest())
        next(watched)
        reread(SEARCH)
        other.register(spec("watched")).write(PROMPT)
        with refused(UNAUTHENTICATED, "unknown"):
            next(watched)


def test_a_file_that_is_not_right_changes_nothing(reread: Reread) -> None:
    reread.path.write_text('[[tenant]]\nname = "search"\nadmin = 1\n[[tenant]]\nname = 3\n')
    line = reread.told("the tenants are still those that were read before")
    assert "tenant search: admin: expected a valid boolean; " in line
    assert "tenant 3: name: expected" in line
    write_tenants(reread.path, SEARCH, Entry("large", 'share_bytes = "5MiB"\n'))
    line = reread.told("the tenants are still those that were read before")
    assert "add up to 5 MiB (large 5 MiB), expected at most pool_bytes = 4 MiB" in line
    with dialled(reread.server.address, Credentials(SEARCH.token)) as raw:
        assert raw.register(spec("still")).write(PROMPT) == [YOURS] * 8
    reread(CHAT)
    with dialled(reread.server.address, Credentials(SEARCH.token)) as raw, refused(UNAUTHENTICATED):
        raw.register(spec("still"))
