"""What operators do, against a server in another process: status, namespaces, pins, clearing, prefetch."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from kvstore.service.client import Client
from kvstore.service.operator import Operator
from tests.support.clients import MAPPED, client_of, eventually, put
from tests.support.command_line import Asking, spawn
from tests.support.served import (
    HIT,
    LETTERS,
    STORED,
    TOKENS,
    asking,
    client,
    model,
    prompt,
    root_of,
    server,
    store,
)
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import BLOCK_SIZE, PAYLOAD_BYTES, make_chain, make_spec
from tests.support.tenants import Entry, write_tenants
from tests.support.valkey import ValkeyServer, shared_valkey, valkey

__all__ = ["asking", "client", "model", "prompt", "server", "shared_valkey", "valkey"]

# -- what operators do --------------------------------------------------------------------------------


def test_namespaces_are_listed_with_what_they_hold(asking: Asking, model: str) -> None:
    listed = {each["model"]: each for each in asking.facts("namespaces")["namespaces"]}
    assert listed[model] == {
        "namespace": root_of(model),
        "tenant": "",
        "model": model,
        "weights_id": "0" * 40,
        "kv_dtype": "bfloat16",
        "layout": "test",
        "block_size": BLOCK_SIZE,
        "layers": 2,
        "planes": 2,
        "kv_heads": 2,
        "head_size": 8,
        "adapter": None,
        "algorithm": "xxh3_128",
        "format_version": 1,
        "blocks": {"host": STORED},
        "payload_bytes": STORED * PAYLOAD_BYTES,
    }
    row = next(line for line in asking.text("namespaces").splitlines() if line.split()[0] == model)
    assert row.split()[-5:] == [str(STORED), "host", "5.0", "KiB", root_of(model)]


def test_status_counts_what_happened(asking: Asking, server: Sidecar, client: Client, model: str) -> None:
    namespace, chain = client.namespace(make_spec(model)), make_chain(make_spec(model), LETTERS)
    before = asking.facts("status")
    with namespace.acquire(chain) as held:
        during = asking.facts("status")
        text = asking.text("status")
        assert held.blocks == STORED
    after = asking.facts("status")
    assert during["leases"] - before["leases"] == 1
    assert after["asked_tokens"] - before["asked_tokens"] == len(LETTERS) * BLOCK_SIZE
    assert after["hit_tokens"]["host"] - before["hit_tokens"].get("host", 0) == HIT
    assert after["miss_tokens"]["cold"] - before["miss_tokens"].get("cold", 0) == 2 * BLOCK_SIZE
    assert after["healthy"]
    assert after["pool_path"] == server.serving["pool_path"]
    assert after["epoch"] == server.serving["epoch"]
    host = next(tier["pool"] for tier in during["tiers"] if tier["tier"] == "host")
    parts = ("free_bytes", "staged_bytes", "ready_bytes", "quarantined_bytes")
    assert host["reserved_bytes"] == sum(host[part] for part in parts)
    assert host["leased_bytes"] >= STORED * PAYLOAD_BYTES
    assert f"prefix-kvstore {after['version']}, up " in text
    assert "\nhost: up\n" in text
    assert "\nredis: none is configured\n" in text
    assert re.search(r"^limit +32\.0 MiB$", text, re.MULTILINE)
    assert re.search(r"^asked +[\d,]+", asking.text("status"), re.MULTILINE)


def test_status_shows_what_is_never_read_who_holds_most_and_other_sizes(client: Client) -> None:
    with sidecar() as alone, client_of(MAPPED, alone.address) as own:
        asking, spec, other = Asking(alone.address), make_spec("most"), make_spec("least")
        chain = store(own.namespace(spec), LETTERS)
        store(own.namespace(other), "a")
        own.namespace(spec).acquire(make_chain(spec, LETTERS[:3])).release()
        eventually(lambda: asking.facts("status")["what_if"][0]["asked_tokens"] == 3 * BLOCK_SIZE)
        facts, text = asking.facts("status"), asking.text("status")
        (host,) = [tier["pool"] for tier in facts["tiers"] if tier["pool"]]
        assert host["unread_bytes"] == (len(chain) - 3 + 1) * PAYLOAD_BYTES
        assert [each["model"] for each in facts["busiest_namespaces"]] == ["most", "least"]
        assert facts["busiest_namespaces"][0] == {
            "namespace": spec.root.digest.hex(),
            "tenant": "",
            "model": "most",
            "blocks": {"host": len(chain)},
            "payload_bytes": len(chain) * PAYLOAD_BYTES,
        }
        sizes = {each["scale"]: each["capacity_bytes"] for each in facts["what_if"]}
        assert sizes == {scale: host["limit_bytes"] * scale for scale in (0.25, 0.5, 1.0, 2.0, 4.0)}
        assert re.search(r"^of it never read +5\.0 KiB$", text, re.MULTILINE)
        assert re.search(r"^most +7 +7\.0 KiB$", text, re.MULTILINE)
        assert re.search(r"^0\.25 times as large +8\.0 MiB +0\.0%$", text, re.MULTILINE)


def test_events_are_printed_one_a_line_and_from_a_cursor_on(
    asking: Asking, client: Client, model: str
) -> None:
    namespace = client.namespace(make_spec(model))
    with Operator(asking.address) as operator:
        start = next(operator.events())
    put(namespace, make_chain(make_spec(model), "abcdexyz"))
    asking.facts("clear", "--namespace", root_of(model), "--yes")
    since = f"{start.epoch}:{start.sequence}"
    first = asking.facts("events", "--since", since, "--count", "1")
    assert (first["model"], first["tier"], first["removed"], len(first["hashes"])) == (
        model,
        "host",
        False,
        3,
    )
    assert (first["epoch"], first["sequence"], first["lost"]) == (str(start.epoch), start.sequence + 1, False)
    lines = asking.text("events", "--since", since, "--count", "2").splitlines()
    assert lines[0] == f"{start.epoch}:{start.sequence + 1} 3 blocks of {model} stored in host, shard 0.1.0.1"
    assert lines[1].endswith("removed from host (cleared), shard 0.1.0.1")
    lost = asking.facts("events", "--since", "1:5", "--count", "1")
    assert lost["lost"] is True
    assert "expected a cursor" in asking.refusal("events", "--since", "yesterday")


def test_shares_are_listed_and_set(tmp_path: Path) -> None:
    tenant = Entry("ops", "admin = true")
    token = tmp_path / "token"
    token.write_text(tenant.token)
    tenants = write_tenants(tmp_path / "tenants.toml", tenant)
    with sidecar(tenants_file=str(tenants)) as guarded:
        asking, secret = Asking(guarded.address), ("--token-file", token)
        assert asking.facts("quota", *secret) == {
            "tenants": [{"name": "ops", "share_bytes": 0, "ready_bytes": 0}]
        }
        set_to = asking.facts("quota", "ops", "4MiB", *secret)
        assert set_to == {"tenant": "ops", "share_bytes": 4 << 20}
        assert re.search(r"^ops +4\.0 MiB +0 B$", asking.text("quota", *secret), re.MULTILINE)
        assert asking.facts("quota", "ops", "0", *secret)["share_bytes"] == 0
        assert "SIZE is 'much'" in asking.refusal("quota", "ops", "much", *secret)
        assert "without SIZE" in asking.refusal("quota", "ops", *secret)
        assert "tenant 'nobody' is not known" in asking.refusal("quota", "nobody", "1MiB", *secret)
        assert "the pool has" in asking.refusal("quota", "ops", "1TiB", *secret)


def test_a_server_without_tenants_has_no_shares(asking: Asking) -> None:
    assert asking.facts("quota") == {"tenants": []}
    assert "has no tenants" in asking.text("quota")


def test_a_tier_that_is_down_is_status_1_before_anybody_asks_for_a_block() -> None:
    with sidecar(redis_url="redis://127.0.0.1:1/0") as alone, client_of(MAPPED, alone.address) as client:
        asking = Asking(alone.address)
        with Operator(alone.address) as operator:
            eventually(lambda: not all(tier.healthy for tier in operator.status().tiers))
        spec = make_spec("down")
        with client.namespace(spec).acquire(make_chain(spec, LETTERS)) as lease:
            assert lease.tokens == 0
        facts = asking.facts("status", status=1)
        assert (facts["healthy"], facts["asked_tokens"]) == (False, len(LETTERS) * BLOCK_SIZE)
        assert facts["miss_tokens"] == {"unavailable": len(LETTERS) * BLOCK_SIZE}
        assert "\nredis: down, " in asking.text("status", status=1)


def test_a_pin_outlives_clear_and_ends_with_unpin(asking: Asking, model: str, prompt: Path) -> None:
    named, cached = (prompt, "--model", model), HIT
    pinned = asking.facts("pin", model, *named)
    assert pinned == {"name": model, "tokens": cached, "prompt_tokens": TOKENS}
    (listed,) = asking.facts("status")["pins"]
    size = STORED * PAYLOAD_BYTES
    assert listed == {"name": model, "tenant": "", "tokens": cached, "payload_bytes": size}
    row = re.search(rf"^{re.escape(model)} .*$", asking.text("status"), re.MULTILINE)
    assert row is not None
    assert row[0].split() == [model, str(cached), "5.0", "KiB"]
    clear = ("clear", "--namespace", root_of(model), "--yes")
    assert asking.facts(*clear) == {"blocks": 0, "held_blocks": STORED}
    text = asking.text(*clear)
    assert "5 blocks stayed, since leases or pins hold them" in text
    assert "what Redis has, if there is one, stays" in text
    assert asking.facts("lookup", *named)["matched_tokens"] == cached
    assert asking.facts("unpin", model) == {"name": model, "found": True}
    assert asking.facts("unpin", model, status=1) == {"name": model, "found": False}
    assert "there is no pin" in asking.text("unpin", model, status=1)
    assert asking.facts("status")["pins"] == []
    assert asking.text(*clear, "--tier", "host") == "forgot 5 blocks\n"
    assert asking.facts("lookup", *named, status=1)["matched_tokens"] == 0
    assert asking.facts("pin", model, *named, status=1)["tokens"] == 0


def test_clear_keeps_to_its_namespace(asking: Asking, client: Client, model: str, prompt: Path) -> None:
    store(client.namespace(make_spec(f"{model}-2")), LETTERS[:2])
    assert asking.facts("clear", "--namespace", root_of(model), "--yes")["blocks"] == STORED
    assert asking.facts("lookup", prompt, "--model", f"{model}-2")["matched_tokens"] == 2 * BLOCK_SIZE
    assert "is not known" in asking.refusal("clear", "--namespace", "0a" * 16, "--yes")


@pytest.mark.parametrize(("answer", "status", "left"), [("n", 1, STORED), ("y", 0, 0)])
def test_clear_asks_on_a_terminal(
    asking: Asking, model: str, prompt: Path, answer: str, status: int, left: int
) -> None:
    ours, theirs = pty.openpty()
    arguments = ("clear", "--namespace", root_of(model), "--address", asking.address, "--json")
    with spawn(*arguments, stdin=theirs) as process:
        os.write(ours, f"{answer}\n".encode())
        out, messages = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == status
    assert f"Forget all blocks of namespace {root_of(model)} in memory" in messages
    assert out == ("" if status else json.dumps({"blocks": STORED, "held_blocks": 0}) + "\n")
    found = asking.facts("explain", prompt, "--model", model)["leading_blocks"]
    assert found == left


@pytest.mark.redis
def test_prefetch_brings_blocks_from_redis(valkey: ValkeyServer, prompt: Path) -> None:
    with sidecar(redis_url=valkey.url) as alone, client_of(MAPPED, alone.address) as client:
        asking = Asking(alone.address)
        store(client.namespace(make_spec("fetched")), LETTERS[:STORED])
        eventually(lambda: valkey.client.dbsize() == STORED)
        named = (prompt, "--model", "fetched")
        asking.facts("clear", "--yes")
        runs = asking.facts("explain", *named)["runs"]
        assert [(run["first"], run["tiers"]) for run in runs] == [(0, ["redis"]), (5, [])]
        assert asking.facts("lookup", *named, "--tier", "host", status=1)["matched_tokens"] == 0
        done = asking.facts("prefetch", *named, "--wait", "5s")
        assert done == {
            "prompt_tokens": TOKENS,
            "resident_tokens": HIT,
            "pending": False,
        }
        assert asking.facts("lookup", *named, "--tier", "host")["matched_tokens"] == HIT
        assert "20 of 29 tokens (69.0%) are in memory" in asking.text("prefetch", *named)


# -- watching -----------------------------------------------------------------------------------------


def test_a_watch_outlives_the_server_it_watches() -> None:
    with (
        sidecar() as alone,
        spawn("status", "--watch", "100ms", "--json", "--address", alone.address) as process,
    ):
        assert process.stdout is not None

        def next_line() -> dict[str, Any]:
            assert process.stdout is not None
            line: dict[str, Any] = json.loads(process.stdout.readline())
            return line

        first = next_line()
        assert first["epoch"] == alone.serving["epoch"]
        alone.kill()
        eventually(lambda: "error" in next_line())
        alone.restart()
        eventually(lambda: next_line().get("epoch") == alone.serving["epoch"])
        assert alone.serving["epoch"] != first["epoch"]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(20) == 130


def test_a_watch_tells_of_the_time_since_the_last_look(asking: Asking, client: Client, model: str) -> None:
    with spawn("status", "--watch", "200ms", "--address", asking.address) as process:
        assert process.stdout is not None
        with client.namespace(make_spec(model)).acquire(make_chain(make_spec(model), LETTERS)):
            pass
        line = next(line for line in process.stdout if line.startswith("in the last "))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(20) == 130
    assert re.fullmatch(r"in the last \d+\.\d s: \d+ tokens? asked(, \d+\.\d% of them hit)? *\n", line)
