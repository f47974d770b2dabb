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
    loader: Any = AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(name)
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
