"""What block hashes and fingerprints cost, against a bare loop and against other stores' hashing.

The bare loop is one XXH3-128 call a block over bytes that are already packed, its digests kept in a
list: no validation, no extras, no framing. From a list of ints nothing can be faster than turning
it into an array first, which at large blocks takes longer than all hashing: so list input is also
held against ``array('I', ids)`` plus the bare loop.

vLLM and LMCache are measured where they are installed, with their default algorithms, over the same
list of ints. All hashes are compared with a plain second implementation in the same run.
"""

import importlib
import random
import struct
from array import array
from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import xxhash
from report import Report, interleaved_medians, parser

from hashing import KVShape, Namespace, Root, fingerprint_blocks, hash_blocks

PROMPT_TOKENS = (32_768, 131_072)
BLOCK_SIZES = (16, 256)
VOCABULARY = 151_936
MASK = 2**64 - 1

Run = Callable[[], object]


def bare_chain(parent: bytes, packed: bytes, block_bytes: int) -> list[bytes]:
    digest, digests = xxhash.xxh3_128_digest, []
    for offset in range(0, len(packed), block_bytes):
        parent = digest(parent + packed[offset : offset + block_bytes])
        digests.append(parent)
    return digests


def plain_chain(root: Root, ids: list[int]) -> bytes:
    """The format as it is written down, with nothing shared with the package."""
    hashes, parent = b"", root.digest
    for start in range(0, len(ids) - root.block_size + 1, root.block_size):
        message = parent + struct.pack("<I", 0)
        for token in ids[start : start + root.block_size]:
            message += struct.pack("<I", token)
        parent = xxhash.xxh3_128_intdigest(message).to_bytes(16, "big")
        hashes += parent
    return hashes


def plain_fingerprints(ids: list[int], block_size: int) -> list[int]:
    total = state = 0
    fingerprints = []
    for position, token in enumerate(ids, start=1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        key = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK
        total += (token + 1) * ((key ^ (key >> 31)) | 1)
        if position % block_size == 0:
            fingerprints.append(total & MASK)
    return fingerprints


def verify(root: Root, ids: list[int], packed: bytes) -> None:
    """Ends the run when a timed function does not compute what it should."""
    expected = plain_chain(root, ids)
    for form in (packed, np.frombuffer(packed, "<u4"), np.array(ids, np.int64), ids):
        if hash_blocks(root, form) != expected:
            raise SystemExit(f"block hashes from {type(form).__name__} differ from the plain implementation")
    if fingerprint_blocks(packed, root.block_size).tolist() != plain_fingerprints(ids, root.block_size):
        raise SystemExit("fingerprints differ from the plain implementation")


def installed(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def vllm_chain(core: ModuleType, hash_function: object, ids: list[int], block_size: int) -> list[bytes]:
    parent, hashes = None, []
    for start in range(0, len(ids), block_size):
        parent = core.hash_block_tokens(hash_function, parent, ids[start : start + block_size], None)
        hashes.append(parent)
    return hashes


def peers(ids: list[int], block_size: int) -> dict[str, Run | None]:
    """Other stores' own functions; None where a store is not installed."""
    found: dict[str, Run | None] = dict.fromkeys(
        ("vllm sha256 (default)", "vllm xxhash", "lmcache blake3 (default)")
    )
    core, functions = installed("vllm.v1.core.kv_cache_utils"), installed("vllm.utils.hashing")
    if core and functions:
        core.init_none_hash(functions.sha256)
        found["vllm sha256 (default)"] = partial(vllm_chain, core, functions.sha256, ids, block_size)
        found["vllm xxhash"] = partial(vllm_chain, core, functions.xxhash, ids, block_size)
    hasher = installed("lmcache.v1.multiprocess.token_hasher")
    if hasher:
        compute = hasher.TokenHasher(chunk_size=block_size).compute_chunk_hashes
        found["lmcache blake3 (default)"] = partial(compute, ids)
    return found


def measure(report: Report, tokens: int, block_size: int, rounds: int) -> None:
    shape = KVShape(layers=32, planes=2, kv_heads=8, head_size=128)
    root = Namespace("example/model", "0123abcd", "bfloat16", "NHD", block_size, shape).root()
    ids = random.Random(tokens).choices(range(VOCABULARY), k=tokens)
    packed = np.array(ids, "<u4").tobytes()
    verify(root, ids, packed)
    others = peers(ids, block_size)
    contenders: dict[str, Run] = {
        "bare loop": partial(bare_chain, root.digest, packed, block_size * 4),
        "bare array('I', list)": partial(array, "I", ids),
        "hash_blocks(bytes)": partial(hash_blocks, root, packed),
        "hash_blocks(numpy uint32)": partial(hash_blocks, root, np.frombuffer(packed, "<u4")),
        "hash_blocks(numpy int64)": partial(hash_blocks, root, np.array(ids, np.int64)),
        "hash_blocks(list)": partial(hash_blocks, root, ids),
        "fingerprint_blocks(bytes)": partial(fingerprint_blocks, packed, block_size),
    }
    contenders.update((name, run) for name, run in others.items() if run)
    seconds = interleaved_medians(contenders, rounds)
    bare = seconds["bare loop"]
    for name in dict.fromkeys((*contenders, *others)):
        took = seconds.get(name)
        report.result(
            tokens=tokens,
            block_size=block_size,
            what=name if took is not None else f"{name}: not installed",
            ms=took and took * 1e3,
            times_bare=took and took / bare,
        )
    prompt = f"{tokens} tokens, {block_size} a block"
    report.goal(
        f"hash_blocks(bytes) / bare loop, {prompt}", seconds["hash_blocks(bytes)"] / bare, at_most=1.5
    )
    listed = seconds["hash_blocks(list)"]
    floor = bare + seconds["bare array('I', list)"]
    report.goal(f"hash_blocks(list) / (array + bare loop), {prompt}", listed / floor, at_most=1.5)
    report.goal(f"hash_blocks(list) / bare loop, {prompt}", listed / bare, at_most=2.5)
    if tokens == min(PROMPT_TOKENS):
        took = seconds["fingerprint_blocks(bytes)"] * 1e3
        report.goal(f"fingerprint_blocks(bytes) in ms, {prompt}", took, at_most=0.1)


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=30, help="measured rounds of each setting (%(default)s)"
    )
    arguments = options.parse_args()
    report = Report("hashing", packages=("numpy", "xxhash", "vllm", "lmcache"))
    for tokens in PROMPT_TOKENS:
        for block_size in BLOCK_SIZES:
            measure(report, tokens, block_size, arguments.rounds)
    report.finish(json=arguments.json)


if __name__ == "__main__":
    main()
