"""An answer's tokens as text, up to a stop string."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from prefill.request import FinishReason
from prefill.service.front import Answer, Usage
from prefill.text import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """The next text of an answer; the last piece says why it ended."""

    text: str
    finished: FinishReason | None = None
    usage: Usage | None = None


async def pieces_of(answer: Answer, detokenizer: Detokenizer, stops: StopStrings) -> AsyncIterator[Piece]:
    """Text as it is sure, and nothing from a stop string on, at which the request ends."""
    count = 0
    async for part in answer:
        text = ""
        # The token that ends an answer is none of its text.
        told = part.tokens[:-1] if part.finished is FinishReason.STOP else part.tokens
        for token in told:
            count += 1
            text += stops.push(detokenizer.push(token))
            if stops.found:
                break
        if part.finished is not None and not stops.found:
            text += stops.push(detokenizer.flush())
        if stops.found:
            yield Piece(text, FinishReason.STOP, part.usage or await answer.complete(count))
            return
        if part.finished is not None:
            yield Piece(text + stops.flush(), part.finished, part.usage)
            return
        if text:
            yield Piece(text)
