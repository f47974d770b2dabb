"""A redis in trouble, one trouble at a time, below a whole store: right bytes, on time, and nothing leaks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.block import WHOLE, MissCause, TierName
from kvstore.events import RequestSettled
from kvstore.store import StoreOptions
from kvstore.tiers.base import SaveOutcome
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_value import block_key
from tests.support.proxy import Behaviour, Fault, Proxy
from tests.support.redis_store import assert_loads, opened, payloads_of, rows_of
from tests.support.redis_traffic import LATE_SECONDS, Timed, Traffic
from tests.support.stores import Rig, RigOptions, make_chain, make_rig, make_spec
from tests.support.stores import payloads_of as payloads_in
from tests.support.tier_cases import checksum, soon
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, start_valkey, valkey

__all__ = ["shared_valkey", "start_valkey", "valkey"]

pytestmark = pytest.mark.redis

REPOSITORY = Path(__file__).parents[2]
SPEC = make_spec()
PROMPT = make_chain(SPEC, "abcdefghijkl")
ROWS = PROMPT.rows(WHOLE)
BUDGET_SECONDS = 0.3
RECOVERY_SECONDS = 10.0


@dataclass
class Scene:
    """A store that reaches its redis through a proxy."""

    server: ValkeyServer
    proxy: Proxy
    rig: Rig
    tier: RedisTier

    def put_back(self) -> None:
        """Store the prompt past the proxy."""
        with opened(self.server) as direct:
            payloads = payloads_in(ROWS)
            stored = direct.tier.save(ROWS, payloads, [checksum(each) for each in payloads], soon())
        assert stored == [SaveOutcome.STORED] * len(ROWS)

    def ask(self, request: str) -> RequestSettled:
        """One request for the prompt, of which the store itself has nothing."""
        pool = self.rig.host.pool
        for size in pool.extents.classes():
            pool.evict(size, len(ROWS))
        with Timed() as timed:
            lease = self.rig.store.acquire(request, PROMPT)
            self.rig.store.wait(lease, BUDGET_SECONDS)
        assert timed.seconds <= BUDGET_SECONDS + LATE_SECONDS
        self.rig.assert_promised(lease)
        self.rig.store.release(lease)
        return self.rig.events.of(RequestSettled)[-1]

    def finds(self, hits: dict[TierName, int]) -> bool:
        """Whether a request hits so much now."""
        return self.ask(f"at {time.monotonic()}").hit_tokens == hits

    def clients(self) -> int:
        """Connections that the store has."""
        return sum(client["name"] == "" for client in self.server.client.client_list()) - 1

    def bend(self, behaviour: Behaviour) -> None:
        """Have connections from now on behave so."""
        self.proxy.behaviour = behaviour
        self.server.client.client_kill_filter(_type="normal", skipme=True)


Act = Callable[[Scene], object]


def kill_clients(scene: Scene) -> None:
    scene.server.client.client_kill_filter(_type="normal", skipme=True)


def damage(scene: Scene, value: Callable[[bytes], bytes]) -> None:
    """Another value under the key of the fourth block."""
    key = block_key("kv", ROWS, 3)
    scene.server.client.set(key, value(scene.server.value(key)))


def bend(**behaviour: float | Fault) -> Act:
    return lambda scene: scene.bend(Behaviour(**behaviour))  # type: ignore[arg-type]


def restart(scene: Scene) -> None:
    scene.server.restart()
    scene.put_back()


def demote(scene: Scene) -> None:
    """Make the server a replica of nobody, which refuses to be written."""
    scene.server.client.replicaof("127.0.0.1", 1)


class Trouble(NamedTuple):
    """What happens and how it ends; which errors it may be counted as, and whether it costs hits."""

    begin: Act
    end: Act
    kinds: frozenset[str] = frozenset()
    costs: bool = True


BUSY = frozenset({"timeout", "busy"})
"""What any request may be counted as on a machine that has no time for it."""
SLOW = BUSY | {"connection"}
LOST = frozenset({"connection"})
STRAIGHT: Act = bend()
PUT_BACK: Act = Scene.put_back
TROUBLES = {
    "killed": Trouble(lambda scene: scene.server.kill(), restart, SLOW),
    "stopped": Trouble(lambda scene: scene.server.stop(), lambda scene: scene.server.resume(), SLOW),
    "clients killed": Trouble(kill_clients, lambda scene: None, LOST, costs=False),
    "key deleted": Trouble(lambda scene: scene.server.client.delete(block_key("kv", ROWS, 3)), PUT_BACK),
    "all deleted": Trouble(lambda scene: scene.server.client.flushall(), PUT_BACK),
    "truncated": Trouble(lambda scene: damage(scene, lambda value: value[:-1]), PUT_BACK),
    "garbage": Trouble(lambda scene: damage(scene, lambda value: b"?" * len(value)), PUT_BACK),
    "flipped": Trouble(
        lambda scene: damage(scene, lambda value: value[:-1] + bytes([value[-1] ^ 1])), PUT_BACK
    ),
    "replica": Trouble(
        demote,
        lambda scene: scene.server.client.replicaof("NO", "ONE"),
        frozenset({"readonly", "masterdown"}),
        costs=False,
    ),
    "delayed": Trouble(bend(delay_seconds=0.25), STRAIGHT, SLOW),
    "dripping": Trouble(bend(delay_seconds=0.01, piece_bytes=64), STRAIGHT, SLOW),
    "cut": Trouble(bend(bytes_before_fault=5000, fault=Fault.CLOSE), STRAIGHT, LOST),
    "half closed": Trouble(bend(bytes_before_fault=5000, fault=Fault.HALF_CLOSE), STRAIGHT, LOST),
    "stalled": Trouble(bend(bytes_before_fault=5000, fault=Fault.STALL), STRAIGHT, SLOW),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    one = ValkeyServer(tmp_path_factory.mktemp("chaos"), {})
    yield one
    one.close()


@pytest.fixture
def scene(server: ValkeyServer) -> Iterator[Scene]:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(server.port, Behaviour()))
        tier = RedisTier(RedisOptions(f"redis://127.0.0.1:{proxy.port}"), time.monotonic)
        options = StoreOptions(probe_seconds=0.1, flight_seconds=0.2)
        rig = stack.enter_context(
            make_rig(time.monotonic, [(SPEC, (WHOLE,))], RigOptions(redis=tier, store=options))
        )
        scene = Scene(server, proxy, rig, tier)
        server.clear()
        scene.put_back()
        yield scene


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_costs_hits_and_nothing_else(scene: Scene, name: str) -> None:
    """LMCache PR #5124 #3565 #4945 #5255; seen in 0.5.6: wrong bytes, hangs, no recovery."""
    trouble, whole = TROUBLES[name], {TierName.REDIS: PROMPT.prompt_tokens}
    finds_all = partial(scene.finds, whole)
    assert eventually(finds_all, RECOVERY_SECONDS)
    before = scene.tier.errors()
    trouble.begin(scene)
    try:
        hits = [scene.ask(f"meanwhile {number}").hit_tokens for number in range(3)]
    finally:
        trouble.end(scene)
    # On a busy machine hits may be missed for no other reason.
    assert hits != [whole] * 3 or not trouble.costs
    assert eventually(finds_all, RECOVERY_SECONDS)
    scene.rig.settle()
    scene.rig.store.check()
    assert len(scene.rig.store.lease_table) == 0
    assert set(scene.tier.errors() - before) <= trouble.kinds | BUSY
    assert scene.tier.status().healthy
    assert scene.clients() <= 3, "two for payloads and one for look-ups"


def test_keys_deleted_under_a_reader(valkey: ValkeyServer) -> None:
    """Seen in LMCache 0.5.6: a key that vanished hung its reader, or was answered with old memory."""
    rows, payloads = rows_of(20), payloads_of(20, 20_000)
    stop = threading.Event()

    def delete() -> None:
        with opened(valkey) as other:
            while not stop.is_set():
                for block in range(0, 20, 3):
                    other.tier.discard(rows.slice(block, block + 1), soon())

    with opened(valkey) as store:
        deleter = threading.Thread(target=delete)
        with Traffic(store.tier, rows, payloads) as traffic:
            deleter.start()
            time.sleep(0.4)
            stop.set()
            deleter.join()
        assert traffic.wrong == []
        assert {"None", "cold"} <= set(traffic.causes) <= {"None", "cold", "timeout"}
        assert set(store.tier.errors()) <= BUSY
        store.save(rows, payloads)
        assert_loads(store, rows, payloads)


NEWER = """
import sys, time
from kvstore.tiers import redis_value
from tests.support.redis_store import opened, payloads_of, rows_of
redis_value.VERSION = 2
redis_value.HEADER_ALIGNMENT = 512
rows, payloads = rows_of(6), payloads_of(6, 3000)
with opened(None, sys.argv[1]) as newer:
    newer.save(rows.slice(3, 6), payloads[3:])
    result, loaded = newer.load(rows, 3000)
    assert all(bytes(loaded[block]) == bytes(payloads[block]) for block in (3, 4, 5))
    print(*result.causes, newer.match(rows), dict(newer.tier.errors()))
"""


def test_two_versions_share_a_server_during_an_upgrade(valkey: ValkeyServer) -> None:
    """Each reads what its own version wrote; what the other wrote is a miss that stays."""
    rows, payloads = rows_of(6), payloads_of(6, 3000)
    with opened(valkey) as older:
        older.save(rows, payloads)
        run = subprocess.run(
            [sys.executable, "-c", NEWER, valkey.url],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.stdout.split() == ["version"] * 3 + ["None"] * 3 + ["6", "{}"], run.stderr
        values = [valkey.value(block_key("kv", rows, block)) for block in range(6)]
        result, loaded = older.load(rows, 3000)
        assert result.causes == [None] * 3 + [MissCause.VERSION] * 3
        assert all(bytes(loaded[block]) == bytes(payloads[block]) for block in range(3))
        assert older.match(rows) == 6
        assert [valkey.value(block_key("kv", rows, block)) for block in range(6)] == values
        assert older.tier.errors() == {}
        # Who computes a block again stores it in its own version.
        older.save(rows.slice(3, 4), payloads[3:4])
        assert older.load(rows, 3000)[0].causes == [None] * 4 + [MissCause.VERSION] * 2
