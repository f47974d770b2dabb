"""A tiny chat model: random weights, a tokenizer of bytes and a chat template, in a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.models import save_tiny_model, tiny_config

NAME = "tiny-chat"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_chat_model(folder: Path) -> Path:
    """A Llama of four layers whose tokens are the bytes; nothing but its end token ends an answer early."""
    place = save_tiny_model(tiny_config("llama"), folder / NAME)
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *byte_tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    untyped: Any = PreTrainedTokenizerFast
    untyped(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(place)
    return place
