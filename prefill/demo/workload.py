"""The conversations of the demo: three users ask about one document, turn by turn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from prefill.errors import ModelError

FIRST_TURNS = 3


@dataclass(slots=True)
class Conversation:
    """One user's messages so far; prompts are tokenized with the model's own template."""

    user: str
    questions: list[str]
    tokenizer: PreTrainedTokenizerBase
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, turn: int) -> NDArray[np.uint32]:
        """The prompt of a turn (counted from 0), as token ids."""
        if not self.messages:
            self.messages.append({"role": "system", "content": _instructions()})
        self.messages.append({"role": "user", "content": self.questions[turn]})
        return _tokenize(self.tokenizer, self.messages)

    def answer(self, tokens: list[int]) -> None:
        """What the model said, to be part of the next prompt."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": str(text)})


def start_conversations(tokenizer: PreTrainedTokenizerBase | None) -> list[Conversation]:
    """One conversation a user. ModelError when the model came without a tokenizer."""
    if tokenizer is None:
        raise ModelError(
            "the model has no tokenizer, and the demo asks questions in words; choose a model folder "
            "with tokenizer.json"
        )
    # Each user begins with a text of their own, so that three conversations are more than the device holds.
    questions: dict[str, list[str]] = json.loads(_read("questions.json"))
    return [Conversation(user, asked, tokenizer) for user, asked in questions.items()]


def _instructions() -> str:
    return f"Answer in one short sentence, from this handbook.\n\n{_read('document.txt')}"


def _read(name: str) -> str:
    return files("prefill.demo").joinpath(name).read_text(encoding="utf-8")


def _tokenize(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> NDArray[np.uint32]:
    if tokenizer.chat_template is None:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        text = "\n".join([*lines, "assistant:"])
    else:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids = tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    return np.array(ids, dtype=np.uint32)
