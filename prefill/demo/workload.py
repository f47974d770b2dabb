"""The conversations of the demo: three users ask about one document, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from prefill.errors import ModelError

USERS = ("amber", "birch", "cobalt")
# Each user brings a text of their own, so that three conversations are more than the device holds.
QUESTIONS = {
    "amber": (
        "I am new here. Yesterday I was shown the three gauges, and I wrote down that the float was clean, that "
        "the radar had salt on its lens, and that the sensor on the river bed had been silent for an hour in the "
        "morning until its cable was dried. The staff by the slipway said one metre and forty-two, the published "
        "value one metre and forty-one, so nobody had to be called. I also counted the flood boards in the loft: "
        "there are twenty-six, two of them split. What does the station measure?",
        "How many gauges are there?",
        "Why must two of them agree?",
        "When is the pressure sensor lifted?",
    ),
    "birch": (
        "I write the timetable of the railway, and twice this winter our trains stood before the bridge without "
        "knowing why. The first time it was for forty minutes on a Tuesday evening, with the water well below the "
        "quay; the second time for two hours in the night, and then the signal box had no light. Passengers asked "
        "the conductors, who asked the drivers, who asked us, and nobody had an answer that could be printed. I "
        "would like to put the rules on one page for them. What are the alarm levels?",
        "What happens at orange?",
        "Who decides on red?",
        "When is an alarm lowered?",
    ),
    "cobalt": (
        "I teach the fourth class in the school on the hill. We have been drawing the moon every evening for a "
        "month, and now the children want to see what it does to the water. There are nineteen of them, one in a "
        "wheelchair, and a dog that belongs to nobody follows us wherever we go. We would come by bus, bring our "
        "own bread, and stay until the tide has turned, if that is allowed. In the rain we would come all the "
        "same. May school classes visit?",
        "What do they do there?",
        "Where do dogs wait?",
        "Who buys the tea?",
    ),
}
FIRST_TURNS = 3


@dataclass(slots=True)
class Conversation:
    """One user's messages so far; prompts are tokenized with the model's own template."""

    user: str
    tokenizer: PreTrainedTokenizerBase
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, turn: int) -> NDArray[np.uint32]:
        """The prompt of a turn (counted from 0), as token ids."""
        if not self.messages:
            self.messages.append({"role": "system", "content": _instructions()})
        self.messages.append({"role": "user", "content": QUESTIONS[self.user][turn]})
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
    return [Conversation(user, tokenizer) for user in USERS]


def _instructions() -> str:
    document = files("prefill.demo").joinpath("document.txt").read_text(encoding="utf-8")
    return f"Answer in one short sentence, from this handbook.\n\n{document}"


def _tokenize(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> NDArray[np.uint32]:
    if tokenizer.chat_template is None:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        text = "\n".join([*lines, "assistant:"])
    else:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids = tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    return np.array(ids, dtype=np.uint32)
