"""The published vectors hold, here and in every process, and any other prompt agrees as well."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashing import ContentItem, Extras, KVShape, Namespace, Root, fingerprint_blocks, hash_blocks
from tests.hashing.reference import (
    GOLDEN,
    Json,
    make_golden,
    namespace_fields,
    reference_digest,
    reference_fingerprints,
    reference_hashes,
    reference_namespace,
)

REPOSITORY = Path(__file__).parents[2]
VECTORS: list[Json] = json.loads(GOLDEN.read_text())


def to_namespace(fields: Json) -> Namespace:
    salt = fields["tenant_salt"]
    return Namespace(
        **fields | {"kv_shape": KVShape(*fields["kv_shape"]), "tenant_salt": salt and bytes.fromhex(salt)}
    )


def to_extras(fields: Json) -> Extras:
    return Extras(
        request_salt=fields["request_salt"] and bytes.fromhex(fields["request_salt"]),
        items=tuple(
            ContentItem(bytes.fromhex(item["digest"]), item["start"], item["length"])
            for item in fields["items"]
        ),
        embeddings=tuple(digest and bytes.fromhex(digest) for digest in fields["embeddings"]),
    )


def test_the_file_is_what_the_reference_makes() -> None:
    assert make_golden() == VECTORS


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_vector_holds(vector: Json) -> None:
    namespace, extras = to_namespace(vector["namespace"]), to_extras(vector["extras"])
    tokens = bytes.fromhex(vector["tokens"])
    root = namespace.root()
    assert namespace.encode().hex() == vector["encoded_namespace"]
    assert root == Root(bytes.fromhex(vector["root"]), namespace.block_size, namespace.algorithm)
    assert hash_blocks(root, tokens, extras).hex() == "".join(vector["hashes"])
    fingerprints = fingerprint_blocks(tokens, root.block_size, extras)
    assert fingerprints.dtype == np.uint64
    assert [f"{value:016x}" for value in fingerprints.tolist()] == vector["fingerprints"]


def test_figures_published_elsewhere() -> None:
    """The reference could share a mistake with the package; these values come from neither.

    They are XXH3-128 and SHA-256 of nothing, and the first value of splitmix64 with seed 0, as any
    other implementation of these functions gives them.
    """
    assert reference_digest("xxh3_128", b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert reference_digest("sha256", b"").hex() == "e3b0c44298fc1c149afbf4c8996fb924"
    assert fingerprint_blocks([0], 1).tolist() == [0xE220A8397B1DCDAF]


_DIGEST32 = st.binary(min_size=32, max_size=32).map(bytes.hex)
_SALT = st.none() | st.binary(min_size=1, max_size=40).map(bytes.hex)
_ANY_EXTRAS = st.fixed_dictionaries(
    {
        "request_salt": _SALT,
        "items": st.lists(
            st.fixed_dictionaries(
                {"digest": _DIGEST32, "start": st.integers(0, 90), "length": st.integers(1, 60)}
            ),
            max_size=4,
        ),
        "embeddings": st.lists(st.none() | _DIGEST32, max_size=6),
    }
)


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    block_size=st.integers(1, 20),
    algorithm=st.sampled_from(["xxh3_128", "sha256"]),
    adapter=st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    tenant_salt=_SALT,
    extras=_ANY_EXTRAS,
)
def test_any_prompt_equals_the_reference(
    tokens: list[int],
    block_size: int,
    algorithm: str,
    adapter: str | None,
    tenant_salt: str | None,
    extras: Json,
) -> None:
    fields = namespace_fields(
        block_size=block_size, algorithm=algorithm, adapter=adapter, tenant_salt=tenant_salt
    )
    root = to_namespace(fields).root()
    assert root.digest == reference_digest(algorithm, reference_namespace(fields))
    expected = reference_hashes(root.digest, algorithm, block_size, tokens, extras)
    assert hash_blocks(root, tokens, to_extras(extras)).hex() == "".join(expected)
    fingerprints = fingerprint_blocks(tokens, block_size, to_extras(extras))
    assert [f"{value:016x}" for value in fingerprints.tolist()] == reference_fingerprints(
        block_size, tokens, extras
    )


_PRINT_HASHES = """
from hashing import ContentItem, Extras, KVShape, Namespace, fingerprint_blocks, hash_blocks
namespace = Namespace("m", "w", "float16", "NHD", 4, KVShape(2, 2, 2, 8), adapter="a:1", tenant_salt=b"t")
extras = Extras(b"r", (ContentItem(bytes(32), 3, 9),), (None, bytes(32)))
root = namespace.root()
print(hash(namespace.model), root.digest.hex(), hash_blocks(root, range(40), extras).hex())
print(fingerprint_blocks(range(40), 4, extras).tolist())
"""


def test_every_process_and_environment_computes_the_same_hashes() -> None:
    """A hit rate of 0 % between processes, from identities that depend on the process.

    LMCache #1095 #1139 #1739 #1842 #2136, vllm #42625.
    """
    environments = ({"PYTHONHASHSEED": "1", "LC_ALL": "C"}, {"PYTHONHASHSEED": "2", "PYTHONUTF8": "1"})
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _PRINT_HASHES],
            env=environment,
            cwd=REPOSITORY,
            capture_output=True,
            check=True,
            text=True,
        ).stdout.split(maxsplit=1)
        for environment in environments
    ]
    (seeded_hash, hashes), (other_seeded_hash, other_hashes) = outputs
    assert seeded_hash != other_seeded_hash, "the two processes were meant to differ in their hash seed"
    assert hashes == other_hashes
