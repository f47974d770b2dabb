"""The store over tiers: what a process embeds, and what the sidecar serves."""

from kvstore.store.options import Demotion, StoreOptions
from kvstore.store.parts import Tiers
from kvstore.store.probe import BlockReport, Explanation, Lookup
from kvstore.store.tiered import TieredStore
from kvstore.store.write import BlockStatus, Write

__all__ = [
    "BlockReport",
    "BlockStatus",
    "Demotion",
    "Explanation",
    "Lookup",
    "StoreOptions",
    "TieredStore",
    "Tiers",
    "Write",
]
