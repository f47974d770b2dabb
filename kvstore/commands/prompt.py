"""Prompts from the command line: token ids from a file or stdin, or a text and its tokenizer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from hashing import Extras, HashingError, pack_tokens
from kvstore.block import HASH_BYTES
from kvstore.commands.options import PromptOptions
from kvstore.errors import ConfigError
from kvstore.service.codec import Parallelism
from kvstore.service.operator import PromptQuery

STDIN = "-"
_PACKED = ".bin"

Tokenize = Callable[[str], list[int]]


def read_prompt(options: PromptOptions, load_tokenizer: Callable[[str], Tokenize]) -> PromptQuery:
    """The prompt that ``options`` name.

    Raises ConfigError where they contradict each other, or name nothing that is a prompt.
    """
    _check(options)
    tokenize = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    try:
        token_ids, extras = bytes(_token_ids(options, tokenize)), _extras(options)
    except HashingError as error:
        raise ConfigError(f"prompt {options.source or '--text'}: {error}") from error
    return PromptQuery(
        token_ids=token_ids,
        model=options.model or "",
        namespace=parse_namespace(options.namespace) if options.namespace is not None else b"",
        extras=extras,
        parallelism=_parallelism(options),
    )


def parse_namespace(text: str) -> bytes:
    """The root that ``text`` spells in hexadecimal."""
    try:
        root = bytes.fromhex(text)
    except ValueError:
        root = b""
    if len(root) != HASH_BYTES:
        raise ConfigError(
            f"--namespace is {text!r}, expected {2 * HASH_BYTES} hexadecimal digits; "
            "copy it from `kvstore namespaces`"
        )
    return root


def _check(options: PromptOptions) -> None:
    if (options.source is None) == (options.text is None):
        given = "both PROMPT and --text are" if options.source else "no prompt is"
        raise ConfigError(
            f"{given} given, expected one: a file of token ids, - for stdin, or --text with --tokenizer"
        )
    if options.text is not None and options.tokenizer is None:
        raise ConfigError("--text needs --tokenizer: name the model's Hugging Face id or local folder")
    if (options.model is None) == (options.namespace is None):
        given = "both --model and --namespace are" if options.model else "no namespace is"
        raise ConfigError(
            f"{given} given, expected one: --model NAME or --namespace HEX; "
            "`kvstore namespaces` lists what the server knows"
        )
    if (options.tp_size is None) != (options.pp_size is None):
        raise ConfigError("--tp-size and --pp-size go together; give both, 1 where the model is not cut")


def _token_ids(options: PromptOptions, tokenize: Tokenize | None) -> bytes | memoryview:
    if tokenize is None:
        assert options.source is not None
        content = _read(options.source)
        if options.source.endswith(_PACKED):
            return pack_tokens(content)
        return pack_tokens(_parse_ids(_decode(content, options.source), options.source))
    if options.text is not None:
        return pack_tokens(tokenize(options.text))
    assert options.source is not None
    return pack_tokens(tokenize(_decode(_read(options.source), options.source)))


def _read(source: str) -> bytes:
    if source == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"prompt {source} cannot be read ({error.strerror}); name a file of token ids, or - for stdin"
        ) from error


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"prompt {source} is not UTF-8 at byte {error.start}; packed token ids belong into a file whose "
            f"name ends in {_PACKED}"
        ) from error


def _parse_ids(text: str, source: str) -> list[int]:
    if text.lstrip().startswith("["):
        try:
            parsed = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"prompt {source} starts like a JSON list and is none: {error}") from error
        assert isinstance(parsed, list)
        return parsed
    words = text.split()
    for place, word in enumerate(words):
        if re.fullmatch(r"[0-9]{1,10}", word) is None:
            raise ConfigError(
                f"prompt {source} has {word[:40]!r} at place {place}, expected token ids: a JSON list, or "
                "numbers between spaces; give --tokenizer where it is a text"
            )
    return list(map(int, words))


def _extras(options: PromptOptions) -> Extras | None:
    return None if options.request_salt is None else Extras(request_salt=options.request_salt.encode())


def _parallelism(options: PromptOptions) -> Parallelism | None:
    if options.tp_size is None or options.pp_size is None:
        return None
    return Parallelism(options.tp_size, options.pp_size)
