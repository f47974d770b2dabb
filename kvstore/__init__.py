"""Blocks of KV cache in tiers: found by prompt, leased, written in two phases, moved up and down."""
