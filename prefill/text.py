"""Text to tokens and back: a model's tokenizer and chat template, and answers as they grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from prefill.errors import PromptError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 4
"""Tokens decoded before new ones: some tokenizers write a space only between words."""
_WITHHELD_TOKENS = 8
"""A character has at most four bytes, and each may be a token. What is longer is no character."""


class Text:
    """The tokenizer of one model. One thread may encode while another decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        # The first call turns truncation and padding off for good; later ones change nothing.
        self._tokenizer.encode("")

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Token ids of a prompt, with those that the model wants in front of every prompt."""
        return np.array(self._tokenizer.encode(text), dtype=np.uint32)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.uint32]:
        """Token ids of a conversation, up to where the assistant answers.

        PromptError where the model has no chat template, or its template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise PromptError(
                "messages were given, and the model's tokenizer has no chat template; "
                "use /v1/completions with a prompt, or a model that is made for chats"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptError(
                f"the model's chat template refuses these messages ({error}); send messages that it takes, "
                "such as user and assistant in turn after at most one system message"
            ) from error
        # The template writes the special tokens itself.
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Detokenizer:
    """Text of an answer while its tokens come: whole characters, each once.

    Decodes a few tokens at a time, however long the answer is.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        """``prompt`` is what the answer follows; only its end is looked at."""
        self._decode = decode
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._told = len(self._tokens)
        """Tokens at the front whose text has been told."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes, which may be none."""
        self._tokens.append(token)
        text, is_long = self._rest(), len(self._tokens) - self._told >= _WITHHELD_TOKENS
        if not text:
            if is_long:
                # Special tokens, which have no text in any company; an answer may be full of them.
                del self._tokens[self._told :]
            return ""
        if text.endswith(_REPLACEMENT) and not is_long:
            return ""
        del self._tokens[: max(0, self._told - 1)]
        self._told = len(self._tokens)
        return text

    def flush(self) -> str:
        """What was withheld of an answer that ends here."""
        text = self._rest()
        self._told = len(self._tokens)
        return text

    def _rest(self) -> str:
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._told])) :]


class StopStrings:
    """Ends a text before the first of several strings, which may come in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What of the text so far is sure to be before any stop string, and was not told yet."""
        if self.found:
            return ""
        self._held += text
        places = [place for place in map(self._held.find, self._stops) if place >= 0]
        if places:
            self.found = True
            sure, self._held = self._held[: min(places)], ""
            return sure
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sure

    def flush(self) -> str:
        """What was held back as the beginning of a stop string, and is none."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Most characters at the end of ``text`` that ``stop`` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
