"""A tokenizer by name; the one module here that needs transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvstore.errors import ConfigError


def load_tokenizer(name: str) -> Callable[[str], list[int]]:
    """Text to token ids as the tokenizer does it by itself, special tokens included.

    Raises ConfigError for a name that is neither a tokenizer's folder nor found on the hub.
    """
    untyped: Any = transformers_logging
    untyped.set_verbosity_error()
    try:
        tokenizer = _load(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(" .:")
        raise ConfigError(
            f"--tokenizer {name} cannot be loaded ({reason}); name a folder that has a tokenizer, or a "
            "Hugging Face id"
        ) from error

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    return tokenize


def _load(name: str) -> Any:  # noqa: ANN401 - a tokenizer of transformers, which has no types
    loader: Any = AutoTokenizer
    try:
        # What is at hand needs no network, which transformers would ask for what is new, for a minute.
        return loader.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return loader.from_pretrained(name)
