"""Capacities as they are given to ``simulate``: blocks, or sizes of a model's KV cache."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvstore.commands.model_shape import find_config, read_shape
from kvstore.commands.simulate_options import SimulateOptions
from kvstore.errors import ConfigError
from kvstore.quantity import parse_bytes
from kvstore.simulate import Workload
from kvstore.spec import DTYPE_BYTES

UNLIMITED = "unlimited"
_BLOCKS = re.compile(r"(\d+)([km]?)")
_SCALES = {"": 1, "k": 1_000, "m": 1_000_000}


def token_bytes(options: SimulateOptions, environ: Mapping[str, str]) -> int | None:
    """Bytes of a token's KV cache; None where neither a model nor a number was given."""
    if options.bytes_per_token is not None or options.model is None:
        return options.bytes_per_token
    cache = read_shape(find_config(options.model, environ))
    if cache.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"--model {options.model} has the KV dtype {cache.dtype!r}, expected one of "
            f"{', '.join(sorted(DTYPE_BYTES))}; give --bytes-per-token instead"
        )
    shape = cache.shape
    return shape.layers * shape.planes * shape.kv_heads * shape.head_size * DTYPE_BYTES[cache.dtype]


def capacities(flag: str, text: str, workload: Workload, a_token: int | None) -> list[int | None]:
    """Blocks of each comma-separated capacity, None for unlimited."""
    return [_capacity(flag, part.strip(), workload, a_token) for part in text.split(",")]


def _capacity(flag: str, text: str, workload: Workload, a_token: int | None) -> int | None:
    if text.lower() == UNLIMITED:
        return None
    found = _BLOCKS.fullmatch(text.lower())
    blocks = int(found[1]) * _SCALES[found[2]] if found else _blocks_in(flag, text, workload, a_token)
    if blocks < 1:
        raise ConfigError(f"{flag} names {text!r}, expected room for at least one block; raise it")
    return blocks


def _blocks_in(flag: str, text: str, workload: Workload, a_token: int | None) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} names {text!r}, expected a number of blocks above zero, such as 500, 30k or 1m, a size "
            f"such as 64GiB, or {UNLIMITED}; correct it"
        ) from error
    # What a server recorded is used where no model is given.
    takes = {
        request.block_bytes if a_token is None else a_token * request.block_tokens
        for request in workload.requests
    }
    known = sorted(size for size in takes if size is not None)
    if len(known) < len(takes):
        raise ConfigError(
            f"{flag} names the size {text!r}, expected to know what a block takes, which this trace does not "
            "say; give --model or --bytes-per-token, or a number of blocks"
        )
    if len(known) > 1:
        raise ConfigError(
            f"{flag} names the size {text!r}, but the trace has blocks of {', '.join(map(str, known))} "
            "bytes; give a number of blocks"
        )
    return size // known[0]
