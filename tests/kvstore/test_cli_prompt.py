"""What the command line takes for a prompt, and what it says of what is none."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from hashing import Extras
from kvstore.block import Shard, TierName
from kvstore.commands.lookup import parse_shard, parse_tiers
from kvstore.commands.options import PromptOptions
from kvstore.commands.prompt import parse_namespace, read_prompt
from kvstore.commands.tokenizer import load_tokenizer
from kvstore.errors import ConfigError
from kvstore.service.codec import Parallelism
from kvstore.service.operator import PromptQuery

IDS = [0, 1, 70_000, 2**32 - 1]
PACKED = np.array(IDS, dtype="<u4").tobytes()


def letters(name: str) -> Callable[[str], list[int]]:
    assert name == "letters"
    return lambda text: [ord(letter) for letter in text]


def no_tokenizer(name: str) -> Callable[[str], list[int]]:
    raise AssertionError(f"nobody asked for the tokenizer {name}")


def read(source: Path | str) -> PromptQuery:
    return read_prompt(PromptOptions(source=str(source), model="m"), no_tokenizer)


def feed_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


# -- what is read -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.json", b"[0, 1, 70000, 4294967295]"),
        ("ids.txt", b"\n 0 1\t70000\r\n4294967295\n"),
        ("ids.bin", PACKED),
    ],
)
def test_token_ids_of_a_file(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    query = read(path)
    assert query == PromptQuery(token_ids=PACKED, model="m")
    assert query.tokens == len(IDS)


def test_token_ids_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, b"0 1 70000 4294967295")
    assert read("-").token_ids == PACKED


def test_a_text_is_tokenized_wherever_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("[é]", encoding="utf-8")
    feed_stdin(monkeypatch, "[é]".encode())
    given = (
        PromptOptions(text="[é]", tokenizer="letters", model="m"),
        PromptOptions(source=str(path), tokenizer="letters", model="m"),
        PromptOptions(source="-", tokenizer="letters", model="m"),
    )
    expected = np.array([ord("["), ord("é"), ord("]")], dtype="<u4").tobytes()
    assert [read_prompt(options, letters).token_ids for options in given] == [expected] * 3


def test_what_else_names_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("1 2")
    options = PromptOptions(source=str(path), namespace="0a" * 16, request_salt="sé", tp_size=4, pp_size=2)
    query = read_prompt(options, no_tokenizer)
    assert (query.model, query.namespace) == ("", b"\x0a" * 16)
    assert query.extras == Extras(request_salt="sé".encode())
    assert query.parallelism == Parallelism(tp_size=4, pp_size=2)


def test_a_tokenizer_adds_what_it_adds_by_itself(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"<s>": 0, "hello": 1, "world": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert load_tokenizer(str(tmp_path))("hello world hello") == [0, 1, 2, 1]


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"--tokenizer {tmp_path} cannot be loaded .* name a folder that has"
    ):
        load_tokenizer(str(tmp_path))


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem", "fix"),
    [
        (PromptOptions(model="m"), "no prompt is given", "a file of token ids, - for stdin, or --text"),
        (PromptOptions(source="-", text="a", model="m"), "both PROMPT and --text are given", "expected one"),
        (PromptOptions(text="a", model="m"), "--text needs --tokenizer", "name the model's Hugging Face id"),
        (PromptOptions(source="-"), "no namespace is given", "--model NAME or --namespace HEX"),
        (
            PromptOptions(source="-", model="m", namespace="00"),
            "both --model and --namespace",
            "expected one",
        ),
        (PromptOptions(source="-", model="m", tp_size=2), "--tp-size and --pp-size go together", "give both"),
    ],
)
def test_options_that_contradict_each_other(options: PromptOptions, problem: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_prompt(options, no_tokenizer)
    assert problem in str(raised.value)
    assert fix in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("ids.json", b"[1, 2", "starts like a JSON list and is none"),
        ("ids.json", b"[1] [2]", "starts like a JSON list and is none"),
        ("ids.json", b"[" * 100_000, "starts like a JSON list and is none"),
        ("ids.json", b'[1, "2"]', "token id at index 1 is '2'"),
        ("ids.json", b"[1, true]", "token id at index 1 is True"),
        ("ids.json", b"[1, 4294967296]", "token id at index 1 is 4294967296"),
        ("ids.json", b"[1, 2.5]", "token id at index 1 is 2.5"),
        ("ids.txt", b"1 -2", "has '-2' at place 1, expected token ids"),
        ("ids.txt", b"a story", "give --tokenizer where it is a text"),
        ("ids.txt", "1 ٣".encode(), "has '٣' at place 1"),
        ("ids.txt", b"1 " + b"9" * 5000, "at place 1, expected token ids"),
        ("ids.txt", b"1 9999999999", "token id at index 1 is 9999999999"),
        ("ids.txt", b"1 \xff", "is not UTF-8 at byte 2; packed token ids belong into a file"),
        ("ids.bin", b"12345", "packed tokens have 5 bytes, expected a multiple of 4"),
    ],
)
def test_a_file_that_is_no_prompt(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith(f"prompt {path}")
    assert problem in message
    assert len(message) < 400


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent cannot be read \(No such file or directory\); name a file"
    ):
        read(tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "0a", "zz" * 16, "0a" * 17, "0x" + "0a" * 15])
def test_a_namespace_that_is_none(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"expected 32 hexadecimal digits; copy it from `kvstore namespaces`"
    ):
        parse_namespace(text)


def test_a_shard_is_written_as_in_a_key() -> None:
    assert parse_shard(None) is None
    assert parse_shard("1.2.3.4") == Shard(1, 2, 3, 4)


@pytest.mark.parametrize(
    "text", ["", "0.1.0", "0.1.0.1.0", "2.2.0.1", "0.1.1.1", "a.1.0.1", "-1.1.0.1", "².3.0.1"]
)
def test_a_shard_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard is .*, expected tp rank, tp size, pp rank and pp size"):
        parse_shard(text)


def test_tiers_by_name() -> None:
    assert parse_tiers(None) == []
    assert parse_tiers(["redis", "host"]) == [TierName.REDIS, TierName.HOST]
    with pytest.raises(ConfigError, match=r"--tier is 'disk', expected device, host, redis; correct it"):
        parse_tiers(["host", "disk"])
