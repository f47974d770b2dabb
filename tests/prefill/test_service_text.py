"""Answers as text while they grow: whole characters, each once, and nothing from a stop string on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoTokenizer

from prefill.errors import PromptError
from prefill.output import StepOutput
from prefill.request import FinishReason
from prefill.service.errors import Refusal, ServiceError
from prefill.service.schema import Body, ChatBody, CompletionBody
from prefill.service.stream import Stream
from prefill.text import Detokenizer, StopStrings, Text
from tests.support.chat_model import save_chat_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(AutoTokenizer.from_pretrained(save_chat_model(tmp_path_factory.mktemp("models"))))


def told(text: Text, tokens: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(text.decode, prompt)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.text(st.characters(codec="utf-8"), max_size=5))
def test_texts_come_out_as_they_went_in(text: Text, answer: str, prompt: str) -> None:
    pieces = told(text, text.encode(answer).tolist(), text.encode(prompt).tolist())
    assert "".join(pieces) == answer
    assert pieces[-1] == ""


@given(st.lists(st.integers(2, 257), max_size=60))
def test_bytes_that_are_no_text_hold_nothing_up(text: Text, tokens: list[int]) -> None:
    """A model may answer anything. A few bytes that could become a character are waited for, no more."""
    pieces = told(text, tokens, [])
    for start in range(len(tokens) - 8):
        assert any(pieces[start : start + 8])


def test_a_character_is_told_when_it_is_whole(text: Text) -> None:
    assert told(text, text.encode("a🎉b").tolist(), []) == ["a", "", "", "", "🎉", "b", ""]


def test_tokens_without_text_do_not_pile_up(text: Text) -> None:
    """A model that goes on after its end may answer with nothing but special tokens."""
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return text.decode(tokens)

    detokenizer, end = Detokenizer(decode, []), 1
    answer = [*text.encode("a").tolist(), *[end] * 500, *text.encode("b").tolist()]
    assert "".join(map(detokenizer.push, answer)) == "ab"
    assert longest < 16


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_end_where_the_first_begins(pieces: list[str], stops: list[str]) -> None:
    """Whatever the pieces, the same as looking through the text so far after each of them."""
    strings, sure, seen = StopStrings(stops), "", ""
    for piece in pieces:
        seen += piece
        sure += strings.push(piece)
        places = [place for place in map(seen.find, stops) if place >= 0]
        if places:
            assert strings.found
            assert sure == seen[: min(places)]
            return
        assert seen.startswith(sure)
        assert not any(seen[len(sure) :].startswith(stop) for stop in stops)
    assert not strings.found
    assert sure + strings.flush() == seen


def test_a_model_without_a_chat_template(text: Text, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_chat_model(tmp_path))
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="no chat template; use /v1/completions"):
        Text(tokenizer).encode_chat([{"role": "user", "content": "x"}])
    assert (
        text.decode(text.encode_chat([{"role": "user", "content": "x"}]).tolist()) == "<user>x\n<assistant>"
    )


def test_a_chat_template_that_fails(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_chat_model(tmp_path))
    tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(PromptError, match="template refuses these messages"):
        Text(tokenizer).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [None] * 1000}),
        (CompletionBody, {"prompt": [[1], [None] * 1000]}),
        (ChatBody, {"messages": [{}] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
    ],
)
def test_of_a_thousand_problems_few_are_looked_for(kind: type[Body], fields: dict[str, object]) -> None:
    """Each costs memory and time of the event loop, and one is told."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({"model": "m", **fields})
    assert raised.value.error_count() < 10


# -- the way from the engine to a reader ----------------------------------------------------------


def test_a_reader_that_lags_is_told_so_behind_what_it_has() -> None:
    async def read() -> tuple[list[int | None], list[Stream], ServiceError]:
        ended: list[Stream] = []
        stream = Stream("r", 3, ended.append)
        stream.open()
        for token in range(5):
            stream.deliver(StepOutput("r", token))
        tokens = [(await anext(stream)).token for _ in range(3)]
        with pytest.raises(ServiceError) as raised:
            await anext(stream)
        return tokens, ended, raised.value

    tokens, ended, error = asyncio.run(read())
    assert tokens == [0, 1, 2]
    assert [stream.is_finished for stream in ended] == [False]
    assert error.refusal is Refusal.READER
    assert "3 tokens behind" in str(error)


def test_an_error_of_one_request_reaches_its_reader() -> None:
    async def read() -> Exception:
        stream = Stream("r", 3, lambda _: None)
        stream.open()
        stream.deliver(StepOutput("r", 7))
        stream.deliver(StepOutput("r", finished=FinishReason.ERROR, error=RuntimeError("of the model")))
        assert (await anext(stream)).token == 7
        with pytest.raises(RuntimeError) as raised:
            await anext(stream)
        return raised.value

    assert str(asyncio.run(read())) == "of the model"
