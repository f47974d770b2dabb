"""What makes an engine's blocks interchangeable with another's, as a namespace.

Everything that changes a block's bytes although its tokens are the same has to be in here; what
differs by request is in ``Extras``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from hashing import ContentItem, Extras, KVShape, Namespace
from kvstore.connectors.vllm.errors import UnsupportedError
from kvstore.spec import NamespaceSpec

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_WHOLE_BYTES = 2**26
"""Files up to this size are read whole; of longer ones evenly spaced pieces are."""
_PIECES = 256
_PIECE_BYTES = 2**16
_UNSTABLE = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "name_or_path"})


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """An engine's own account of its KV blocks.

    ``layout`` names order of axes, backend and instruction set. ``payload_bytes`` are of one block
    on the largest rank. ``settings`` is whatever else goes into the values: quantization, model
    configuration, drafter.
    """

    model: str
    weights_id: str
    dtype: str
    kv_dtype: str
    layout: str
    block_size: int
    kv_shape: KVShape
    payload_bytes: int
    settings: Mapping[str, Any]

    def spec(self) -> NamespaceSpec:
        """The namespace of the base model."""
        settings = digest_settings(self.settings)
        namespace = Namespace(
            model=self.model,
            weights_id=f"{self.weights_id}/{self.dtype}/{settings}",
            kv_dtype=self.kv_dtype,
            layout=self.layout,
            block_size=self.block_size,
            kv_shape=self.kv_shape,
        )
        return NamespaceSpec(namespace, self.payload_bytes)


def adapted(spec: NamespaceSpec, adapter: str | None) -> NamespaceSpec:
    """The namespace of an adapter on top of ``spec``'s model."""
    return replace(spec, namespace=replace(spec.namespace, adapter=adapter))


def with_new_weights(spec: NamespaceSpec, mark: str) -> NamespaceSpec:
    """The namespace of weights that replaced the loaded ones and have no name; ``mark`` is unique."""
    weights_id = spec.namespace.weights_id.partition("#")[0]
    return replace(spec, namespace=replace(spec.namespace, weights_id=f"{weights_id}#{mark}"))


def digest_settings(settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over what a model was configured to be, paths and versions left out."""
    text = json.dumps(_stable(settings), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stable(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, Mapping):
        return {str(key): _stable(each) for key, each in value.items() if key not in _UNSTABLE}
    if isinstance(value, list | tuple):
        return [_stable(each) for each in value]
    return value


def weights_revision(model: str, revision: str | None, given: str | None) -> str:
    """What names a model's weights: ``given``, else the hub's revision, else a digest of the files.

    ``model`` is a hub id or a local folder or file. UnsupportedError where nothing names them.
    """
    if given is not None:
        return given
    path = Path(model)
    if path.exists():
        if path.parent.name == "snapshots":  # the hub's own cache, whose folders are revisions
            return path.name
        return f"xxh3-{digest_weights(path)}"
    if revision is not None:
        return revision
    raise UnsupportedError(
        f"nothing says which weights {model} has: it is no local folder and has no revision; start the "
        "engine with --revision, or set weights_id in kv_connector_extra_config"
    )


def digest_weights(path: Path) -> str:
    """32 hexadecimal digits over the weight files of a folder, or over one file, in the order of names.

    Of files above 64 MiB 256 evenly spaced pieces of 64 KiB are read, ends included: what trains
    or merges weights changes all of a tensor, and a file has fewer tensors than that or long ones.
    """
    files = [path] if path.is_file() else sorted({each for kind in _WEIGHTS for each in path.glob(kind)})
    if not files:
        raise UnsupportedError(
            f"{path} has none of {', '.join(_WEIGHTS)}; set weights_id in kv_connector_extra_config"
        )
    digest = xxhash.xxh3_128()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size};".encode())
        with file.open("rb") as opened:
            if size <= _WHOLE_BYTES:
                digest.update(opened.read())
                continue
            for piece in range(_PIECES):
                opened.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
                digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()


class Adapters:
    """Names LoRA adapters by what is in their files; reads each version of a file once. For threads."""

    def __init__(self, digest: Callable[[Path], str] = digest_weights) -> None:
        self._digest = digest
        self._known: dict[tuple[str, int, int], str] = {}

    def adapter_of(self, name: str, path: str) -> str:
        """``name`` and digest; UnsupportedError where the files are not on this machine."""
        folder = Path(path)
        try:
            stamps = [file.stat() for file in sorted(folder.glob("*")) if file.is_file()]
        except OSError as error:
            raise UnsupportedError(f"cannot read LoRA adapter {name} in {path}: {error.strerror}") from error
        if not stamps:
            raise UnsupportedError(
                f"LoRA adapter {name} has no files in {path}, and nothing else names its version; load it "
                "from a local folder"
            )
        key = path, max(stamp.st_mtime_ns for stamp in stamps), sum(stamp.st_size for stamp in stamps)
        if key not in self._known:
            self._known[key] = self._digest(folder)
        return f"{name}@{self._known[key]}"


def request_extras(salt: str | None, items: Sequence[tuple[str, int, int]]) -> Extras | None:
    """A request's part of the identity: its cache salt, and (identifier, offset, length) of its media.

    Identifiers are the engine's own digests of the content as the model sees it.
    """
    if not salt and not items:
        return None
    content = tuple(
        ContentItem(hashlib.sha256(identifier.encode()).digest(), offset, length)
        for identifier, offset, length in items
    )
    return Extras(request_salt=salt.encode() if salt else None, items=content)
