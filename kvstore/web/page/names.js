// Names of metrics, as kvstore/metric_table.py has them.

export const ASKED = "kvstore_asked_tokens_total";
export const HIT = "kvstore_hit_tokens_total";
export const MISS = "kvstore_miss_tokens_total";
export const POOL = "kvstore_pool_bytes";
export const EVICTED = "kvstore_evicted_blocks_total";
export const MOVED = "kvstore_transfer_bytes_total";
export const WHAT_IF_ASKED = "kvstore_whatif_asked_tokens_total";
export const WHAT_IF_MISSED = "kvstore_whatif_missed_tokens_total";
export const WHAT_IF_BYTES = "kvstore_whatif_capacity_bytes";
