"""Stores above a remote tier that has some prompts, and ways to let its answers through one by one."""

from __future__ import annotations

from contextlib import AbstractContextManager

from kvstore.block import WHOLE, Shard
from kvstore.events import RequestSettled
from kvstore.lease import Lease
from kvstore.spec import NamespaceSpec
from kvstore.store import StoreOptions
from kvstore.tiers.base import Tier
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import HeldTier
from tests.support.stores import SPLIT, FakeClock, Rig, RigOptions, make_chain, make_rig, make_spec

SPEC = make_spec()
DIVIDED = make_spec("divided")
BATCH_OF_TWO = StoreOptions(batch_bytes=2048, threads=1)


def rig_over(tier: Tier, *, host_extents: int = 2) -> AbstractContextManager[Rig]:
    """An empty store above ``tier``: a device tier of 8 blocks and a host tier of 12 an extent."""
    options = RigOptions(host_extents, 1, 16 << 10, 8 << 10, tier, BATCH_OF_TWO)
    return make_rig(FakeClock(), [(SPEC, (WHOLE,)), (DIVIDED, SPLIT)], options)


def filled_tier() -> DictTier:
    """A tier with the prompts ``abcdef`` and ``abxy`` of one rank, and ``abcd`` of two."""
    tier = DictTier()
    with rig_over(tier) as writer:
        for letters in ("abcdef", "abxy"):
            writer.write(make_chain(SPEC, letters))
        for shard in SPLIT:
            writer.write(make_chain(DIVIDED, "abcd"), shard)
        writer.settle()
    assert len(tier.values) == 8 + 2 * 4
    return tier


def key_of(block: int, *, spec: NamespaceSpec = SPEC, shard: Shard = WHOLE) -> tuple[bytes, str, bytes]:
    """Where the tier has a block of ``abcdef``."""
    return spec.root.digest, str(shard), make_chain(spec, "abcdef").rows(shard).hash_at(block)


def damage(tier: DictTier, key: tuple[bytes, str, bytes]) -> None:
    """Other bytes where the payload was."""
    tier.values[key] = tier.values[key]._replace(payload=bytes(1024))


def step(rig: Rig, held: HeldTier, calls: int = 1) -> None:
    """Let calls through and collect what they brought."""
    for _ in range(calls):
        held.let_one_through()
        assert rig.woken.acquire(timeout=10)
        rig.store.pump()


def finish(rig: Rig, held: HeldTier) -> None:
    """Let everything through."""
    held.open()
    rig.settle()


def settle(rig: Rig, lease: Lease) -> RequestSettled:
    """End a request: what it asked for is what it hit and what it missed."""
    rig.store.release(lease)
    event = rig.events.of(RequestSettled)[-1]
    assert event.asked_tokens == sum(event.hit_tokens.values()) + sum(event.miss_tokens.values())
    return event
