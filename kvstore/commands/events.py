"""``events``: what happens in the store, as it happens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from kvstore.block import HASH_BYTES
from kvstore.commands.output import Answer, counted, epoch_text
from kvstore.errors import ConfigError
from kvstore.service.operator import Operator
from kvstore.service.reports import BlockEvent, EventBatch

_CURSOR = re.compile(r"(\d+):(\d+)")

Cursor = tuple[int, int]


def parse_cursor(text: str | None) -> Cursor:
    """(Epoch, sequence) to go on from; zeros for from now on."""
    if text is None:
        return 0, 0
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--since is {text!r}, expected a cursor as events are printed with, EPOCH:SEQUENCE such as "
            "1234:17; leave it out to begin now"
        )
    return int(found[1]), int(found[2])


def watch_events(operator: Operator, since: Cursor, most: int) -> Iterator[Answer]:
    """Each event as it comes, ``most`` of them, 0 for no end; a gap is an answer of its own."""
    answers = _answers(operator.events(epoch=since[0], sequence=since[1]), operator, _models(operator))
    return islice(answers, most) if most else answers


def _answers(batches: Iterator[EventBatch], operator: Operator, models: dict[bytes, str]) -> Iterator[Answer]:
    for batch in batches:
        if batch.lost:
            text = "events were lost here: what is kept of blocks elsewhere has to be listed again"
            yield Answer({"epoch": epoch_text(batch.epoch), "sequence": batch.sequence, "lost": True}, [text])
        first = batch.sequence - len(batch.events) + 1
        for sequence, event in enumerate(batch.events, first):
            if event.namespace not in models:
                # One that is not registered has no name, and is asked for once.
                models |= {event.namespace: ""} | _models(operator)
            yield _answer(batch.epoch, sequence, event, models[event.namespace])


def _models(operator: Operator) -> dict[bytes, str]:
    return {report.root: report.spec.namespace.model for report in operator.namespaces()}


def _answer(epoch: int, sequence: int, event: BlockEvent, model: str) -> Answer:
    packed = event.block_hashes
    hashes = [packed[at : at + HASH_BYTES].hex() for at in range(0, len(packed), HASH_BYTES)]
    what = f"removed from {event.tier} ({event.cause})" if event.removed else f"stored in {event.tier}"
    facts = {
        "epoch": epoch_text(epoch),
        "sequence": sequence,
        "lost": False,
        "time": event.time,
        "tier": event.tier,
        "model": model,
        "namespace": event.namespace.hex(),
        "shard": str(event.shard),
        "removed": event.removed,
        "cause": event.cause,
        "hashes": hashes,
    }
    of = f" of {model}" if model else ""
    return Answer(
        facts, [f"{epoch}:{sequence} {counted(len(hashes), 'block')}{of} {what}, shard {event.shard}"]
    )
