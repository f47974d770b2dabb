"""``lookup`` and ``explain`` against a server in another process."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvstore.block import Shard
from kvstore.service.client import Client
from tests.support.clients import put
from tests.support.command_line import Asking
from tests.support.served import (
    HIT,
    LETTERS,
    STORED,
    TAIL,
    TOKENS,
    asking,
    client,
    model,
    prompt,
    prompt_ids,
    root_of,
    server,
)
from tests.support.stores import BLOCK_SIZE, PAYLOAD_BYTES, SPLIT, make_chain, make_spec

__all__ = ["asking", "client", "model", "prompt", "server"]

# -- lookup -------------------------------------------------------------------------------------------


def test_lookup_tells_what_is_cached_and_where(asking: Asking, model: str, prompt: Path) -> None:
    hit = HIT
    facts = asking.facts("lookup", prompt, "--model", model)
    assert facts == {
        "prompt_tokens": TOKENS,
        "block_size": BLOCK_SIZE,
        "prompt_blocks": len(LETTERS),
        "blocks_read": len(LETTERS),
        "matched_tokens": hit,
        "verified_tokens": hit,
        "tiers": [{"tier": "host", "served_tokens": hit, "leading_tokens": hit}],
    }
    text = asking.text("lookup", prompt, "--model", model)
    assert f"prompt: {TOKENS} tokens, {len(LETTERS)} blocks of {BLOCK_SIZE}\n" in text
    assert f"cached: {hit} tokens ({hit / TOKENS:.1%}), {hit} of them with their token ids compared\n" in text
    assert re.search(rf"^host +{hit} +{hit}$", text, re.MULTILINE)


def test_a_prompt_may_come_in_every_form_and_by_root(asking: Asking, model: str, prompt: Path) -> None:
    words = " ".join(map(str, prompt_ids()))
    texts = {
        asking.text("lookup", prompt, "--model", model),
        asking.text("lookup", prompt, "--namespace", root_of(model)),
        asking.text("lookup", "-", "--model", model, stdin=words),
        asking.text("lookup", "-", "--model", model, stdin=json.dumps(prompt_ids().tolist())),
    }
    assert len(texts) == 1


def test_lookup_looks_at_no_more_than_it_is_told_to(asking: Asking, model: str, prompt: Path) -> None:
    facts = asking.facts("lookup", prompt, "--model", model, "--max-blocks", "3", "--tier", "host")
    assert (facts["blocks_read"], facts["matched_tokens"]) == (3, 3 * BLOCK_SIZE)
    text = asking.text("lookup", prompt, "--model", model, "--max-blocks", "3")
    assert "of which 3 were looked at" in text


def test_nothing_cached_is_status_1_and_points_to_explain(asking: Asking, model: str, prompt: Path) -> None:
    salted = (prompt, "--model", model, "--request-salt", "other")
    assert asking.facts("lookup", *salted, status=1)["matched_tokens"] == 0
    assert "`kvstore explain` with the same arguments says why" in asking.text("lookup", *salted, status=1)


def test_a_model_that_is_not_there_or_there_twice(
    asking: Asking, client: Client, model: str, prompt: Path
) -> None:
    message = asking.refusal("lookup", prompt, "--model", "nobody-has-this")
    assert "no namespace of this tenant has model 'nobody-has-this'" in message
    assert asking.address in message
    other = make_spec(model, block_size=BLOCK_SIZE * 2)
    client.namespace(other).register()
    message = asking.refusal("lookup", prompt, "--model", model)
    assert root_of(model) in message
    assert other.root.digest.hex() in message


# -- explain ------------------------------------------------------------------------------------------


def test_explain_tells_of_each_block_where_it_is_or_why_not(asking: Asking, model: str, prompt: Path) -> None:
    facts = asking.facts("explain", prompt, "--model", model)
    run = {"tiers": ["host"], "cause": "", "being_written": False}
    gap = {"tiers": [], "cause": "cold", "being_written": False}
    assert facts["runs"] == [{"first": 0, "last": 4, **run}, {"first": 5, "last": 6, **gap}]
    assert (facts["prompt_tokens"], facts["tail_tokens"], facts["leading_blocks"]) == (TOKENS, TAIL, STORED)
    assert list(facts["advice"]) == ["cold"]
    chain = make_chain(make_spec(model), LETTERS)
    assert [block["hash"] for block in facts["blocks"]] == [
        chain.hashes[16 * index : 16 * (index + 1)].hex() for index in range(len(LETTERS))
    ]
    first, last = facts["blocks"][0], facts["blocks"][-1]
    assert first["payload_bytes"] == PAYLOAD_BYTES
    assert 0 <= first["idle_seconds"] <= first["age_seconds"] < 600
    assert (last["index"], last["age_seconds"], last["cause"]) == (6, None, "cold")


def test_explain_for_people_is_one_line_a_run(asking: Asking, model: str, prompt: Path) -> None:
    lines = asking.text("explain", prompt, "--model", model).splitlines()
    assert re.fullmatch(r"0-4 +host +5\.0 KiB +\d+\.\d s +\d+\.\d s *", lines[2])
    assert re.fullmatch(r"5-6 +missing +cold: nobody stored these tokens .*", lines[3])
    assert lines[4] == "tail: 1 token past the last whole block, always computed"
    assert lines[5] == "usable: 20 tokens (69.0%), the leading run"
    assert lines[6].startswith("what to do, cold: the next request that computes it stores it; ")


def test_a_block_that_is_being_written_is_told_as_such(
    asking: Asking, client: Client, model: str, prompt: Path
) -> None:
    namespace = client.namespace(make_spec(model))
    write = namespace.write(make_chain(make_spec(model), LETTERS))
    runs = asking.facts("explain", prompt, "--model", model)["runs"]
    text = asking.text("explain", prompt, "--model", model)
    write.abort()
    assert [(run["first"], run["being_written"]) for run in runs] == [(0, False), (5, True)]
    assert re.search(r"^5-6 +being written", text, re.MULTILINE)


def test_explain_looks_at_the_rank_that_it_is_told(asking: Asking, client: Client, prompt: Path) -> None:
    spec = make_spec("explain-of-ranks")
    namespace = client.namespace(spec, tp_size=2)
    put(namespace, make_chain(spec, LETTERS), SPLIT[0])
    named = (prompt, "--model", "explain-of-ranks")
    found = [
        asking.facts("explain", *named, *shard)["leading_blocks"]
        for shard in ((), ("--shard", str(SPLIT[0])), ("--shard", str(Shard(1, 2))))
    ]
    assert found == [7, 7, 0]
    assert asking.facts("lookup", *named, status=1)["matched_tokens"] == 0, (
        "a run is the minimum over the ranks"
    )
    client.namespace(spec).register()
    assert "parallelism" in asking.refusal("lookup", *named)
    cut = ("--tp-size", "2", "--pp-size", "1")
    assert asking.facts("lookup", *named, *cut, status=1)["matched_tokens"] == 0
