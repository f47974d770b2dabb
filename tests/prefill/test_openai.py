"""The OpenAI-compatible API, asked by OpenAI's own client and by clients that do it wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from prefill.service.errors import ServiceError
from prefill.service.schema import CompletionBody, read_body
from tests.support.prefill_workers import REPOSITORY, Forks, PrefillWorker, soon, tokens_of, worker

MODEL = "tiny-chat"
NARROW = "narrow-" + "x" * 240
LONGEST_BODY = 2**20 + 64 * 1024
BODIES_BYTES = 2**25
PROMPT = "Müller said: a prompt of more than one block, so that it is found again. "
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(forks: Forks) -> Iterator[PrefillWorker]:
    with worker(forks) as made:
        yield made


@pytest.fixture(scope="module")
def narrow(forks: Forks) -> Iterator[PrefillWorker]:
    """One request runs, and one waits."""
    limits = {"running_max": "1", "waiting_max": "1"}
    with worker(forks, served_model_name=NARROW, **limits) as made:
        yield made


@pytest.fixture
def impatient(forks: Forks) -> Iterator[PrefillWorker]:
    """Readers have to keep up."""
    with worker(forks, served_model_name=NARROW, stream_tokens="32", stall_seconds="2") as made:
        yield made


@pytest.fixture
def client(server: PrefillWorker) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made
    server.assert_quiet()


def complete(client: openai.OpenAI, prompt: Any = PROMPT, tokens: int = 32, **options: Any) -> Completion:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, **GREEDY, **options}
    answer = client.completions.create(**asked)
    assert isinstance(answer, Completion)
    return answer


def cached_tokens(answer: Completion | ChatCompletion) -> int | None:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens


# -- what it answers --------------------------------------------------------------------------------


def test_the_second_time_a_prompt_is_cached(client: openai.OpenAI) -> None:
    prompt = tokens_of(100, seed=1)
    first, second = complete(client, prompt), complete(client, prompt)
    assert (cached_tokens(first), cached_tokens(second)) == (0, 96)
    assert first.choices[0].text == second.choices[0].text
    assert first.choices[0].finish_reason == "length"
    assert second.usage is not None
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (100, 32)
    assert second.usage.total_tokens == 132


def test_a_stream_tells_the_same(client: openai.OpenAI) -> None:
    whole = complete(client)
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in texts[:-1]] == [None] * (len(texts) - 1)
    assert texts[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 24, **GREEDY}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    again = client.chat.completions.create(**asked)
    assert (cached_tokens(again) or 0) > 0
    parts = [{"type": "text", "text": PROMPT}]
    asked["messages"] = [CHAT[0], {"role": "user", "content": parts}]
    assert client.chat.completions.create(**asked).choices[0].message.content == text


def test_text_and_its_tokens_are_one_prompt(client: openai.OpenAI) -> None:
    text = "The same"
    # A token a byte, in the order of the vocabulary's alphabet, after two special ones.
    assert complete(client, [text]).choices[0].text == complete(client, text).choices[0].text


def test_a_seed_decides(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        return complete(client, temperature=1.5, top_p=0.9, seed=seed).choices[0].text

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1
    assert complete(client, temperature=2, top_p=0).choices[0].text == complete(client).choices[0].text
    top = {"ignore_eos": True, "top_k": 1}
    assert complete(client, temperature=2, extra_body=top).choices[0].text == complete(client).choices[0].text


def test_a_stop_string_ends_before_it(client: openai.OpenAI, server: PrefillWorker) -> None:
    """It may come in pieces, and what runs on behind it is neither told nor counted."""
    whole = complete(client, tokens=64)
    text = whole.choices[0].text
    stop = text[20:23]
    wanted = text[: text.index(stop)]
    answered = server.total("prefill_output_tokens_total")
    stopped = complete(client, tokens=64, stop=[stop, "never"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (wanted, "stop")
    assert stopped.usage is not None
    assert 0 < stopped.usage.completion_tokens < 64
    assert (cached_tokens(stopped) or 0) > 0
    chunks = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=64, stop=stop, stream=True, **GREEDY
    )
    pieces = [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks]
    assert "".join(text for text, _ in pieces) == wanted
    assert pieces[-1][1] == "stop"
    assert server.total("prefill_output_tokens_total") > answered


def test_models(client: openai.OpenAI) -> None:
    [listed] = client.models.list()
    assert (listed.id, listed.to_dict()["max_model_len"]) == (MODEL, 1024)
    assert client.models.retrieve(MODEL) == listed
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.models.retrieve("gpt-9")


def test_every_metric_is_documented(server: PrefillWorker) -> None:
    page = (REPOSITORY / "docs" / "prefill.md").read_text(encoding="utf-8")
    body = httpx2.get(f"{server.http}/metrics", timeout=30).text
    families = [
        family
        for family in text_string_to_metric_families(body)
        if family.name.startswith("prefill_") and not family.name.endswith("_created")
    ]
    assert len(families) > 15
    for family in families:
        assert f"`{family.name}{'_total' if family.type == 'counter' else ''}`" in page


def test_salts_keep_prompts_apart(client: openai.OpenAI) -> None:
    prompt = tokens_of(64, seed=2)
    for salt, cached in (("a", 0), ("b", 0), ("a", 48)):
        body = {"ignore_eos": True, "cache_salt": salt}
        assert cached_tokens(complete(client, prompt, 1, extra_body=body)) == cached


# -- what it refuses --------------------------------------------------------------------------------


def post(server: PrefillWorker, content: bytes, path: str = "completions") -> httpx2.Response:
    return httpx2.post(f"{server.http}/v1/{path}", content=content, timeout=30)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4, **fields}).encode()


@pytest.mark.parametrize(
    ("content", "status", "param", "code", "says"),
    [
        (b"{not json", 400, None, None, "the body is not JSON"),
        (b"", 400, None, None, "the body is not JSON"),
        (b"[1]", 400, None, None, "expected a JSON object"),
        (b"[" * 100_000, 400, None, None, "the body is not JSON"),
        (b"\xff\xfe", 400, None, None, "the body is not JSON"),
        (body(model="gpt-9"), 404, "model", "model_not_found", "serves 'tiny-chat'"),
        (body(prompt=[7] * 1025), 400, "prompt", "context_length_exceeded", "1024 tokens"),
        (body(max_tokens=1025), 400, "max_tokens", "context_length_exceeded", "1025 for the answer"),
        (body(prompt=[2**31]), 400, None, None, "token id 2147483648, expected 0 to 502"),
        (body(prompt=[]), 400, None, None, "0 tokens"),
        (body(prompt=["a", "b"]), 400, "prompt", "unsupported_parameter", "2 prompts"),
        (body(prompt={"a": 1}), 400, "prompt", None, "prompt = {'a': 1}: expected text or a list"),
        (body(prompt=[5, -1]), 400, "prompt.1", None, "prompt.1 = -1: expected at least 0"),
        (body(temperature=-1), 400, "temperature", None, "temperature = -1: expected at least 0"),
        (body(temperature=1e9), 400, "temperature", None, "expected at most 2"),
        (body(temperature=float("nan")), 400, "temperature", None, "finite"),
        (body(temperature="hot"), 400, "temperature", None, "'hot': expected a number"),
        (body(top_p=-0.1), 400, "top_p", None, "expected at least 0"),
        (body(top_k=-7), 400, "top_k", None, "-7"),
        (body(seed=2**70), 400, "seed", None, "9223372036854775807"),
        (body(max_tokens=0), 400, "max_tokens", None, "expected at least 1"),
        (body(max_tokens=1.5), 400, "max_tokens", None, "expected a whole number"),
        (body(n=2), 400, "n", "unsupported_parameter", "n = 2 is not supported"),
        (body(logprobs=5), 400, "logprobs", "unsupported_parameter", "logprobs = 5"),
        (body(echo=True), 400, "echo", "unsupported_parameter", "echo = True"),
        (body(stop=[""]), 400, "stop.0", None, "expected a length of at least 1"),
        (body(stop=["x"] * 17), 400, "stop", None, "expected a length of at most 16"),
        (body(stream_options={"include_usage": True}), 400, "stream_options", None, "set stream"),
        (body(temprature=1), 400, "temprature", None, "temprature is unknown"),
        (b" " * (2 << 20), 413, None, "request_too_large", "more than 1114112 bytes"),
    ],
)
def test_what_does_not_fit(
    server: PrefillWorker, content: bytes, status: int, param: str | None, code: str | None, says: str
) -> None:
    answer = post(server, content)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_fields_that_ask_for_nothing_are_taken(server: PrefillWorker) -> None:
    """As load generators and frameworks send them unasked."""
    neutral: dict[str, Any] = {
        "n": 1,
        "echo": False,
        "logprobs": None,
        "best_of": 1,
        "user": "u",
        "logit_bias": {},
    }
    penalties = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": None}
    assert post(server, body(**neutral, **penalties)).status_code == 200


def test_messages_that_do_not_fit(server: PrefillWorker) -> None:
    def refused(messages: Any) -> dict[str, Any]:
        content = json.dumps({"model": MODEL, "messages": messages}).encode()
        answer = post(server, content, "chat/completions")
        assert answer.status_code == 400
        error: dict[str, Any] = answer.json()["error"]
        return error

    nothing = refused([])
    assert (nothing["param"], nothing["message"]) == (
        "messages",
        "messages = []: expected a length of at least 1",
    )
    tool = refused([CHAT[0], {"role": "tool", "content": "x"}])
    assert tool["param"] == "messages.1.role"
    assert "messages.1.role = 'tool': expected 'system'" in tool["message"]
    assert refused([{"role": "user"}])["param"] == "messages.0.content"
    assert refused([{"role": "user", "content": 5}])["param"] == "messages.0.content"
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    assert refused([{"role": "user", "content": [image]}])["param"] == "messages.0.content.0.type"
    assert refused([{"role": "user", "content": "x" * 1025}])["param"] == "messages"
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert "system comes first" in refused(late)["message"]


def test_an_answer_that_is_too_long_is_told_of_the_field_that_asked_for_it(server: PrefillWorker) -> None:
    content = json.dumps({"model": MODEL, "messages": CHAT, "max_completion_tokens": 1025}).encode()
    error = post(server, content, "chat/completions").json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_completion_tokens")


@pytest.mark.parametrize(
    "fields",
    [{"stop": [1] * 1000}, {f"unknown {number}": 1 for number in range(1000)}],
    ids=["items", "names"],
)
def test_much_that_does_not_fit_makes_few_errors(fields: dict[str, Any]) -> None:
    """Each would be told apart on the event loop, for seconds where a body is long."""
    with pytest.raises(ServiceError) as raised:
        read_body(CompletionBody, body(**fields))
    assert isinstance(raised.value.__cause__, ValidationError)
    assert raised.value.__cause__.error_count() == 1


def test_paths_and_methods_that_are_not_there(server: PrefillWorker) -> None:
    for answer, status in (
        (httpx2.get(f"{server.http}/v1/completions"), 405),
        (httpx2.post(f"{server.http}/v1/embeddings", json={}), 404),
        (httpx2.get(f"{server.http}/"), 404),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# -- readers that go, stop or are too many ------------------------------------------------------------


def test_a_client_that_hangs_up_frees_everything(server: PrefillWorker) -> None:
    """While its answer runs, and while nothing has come yet."""
    with server.openai() as client:
        chunks = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=900, stream=True, **GREEDY)
        next(chunks)
        assert server.held["kvstore_leases"] == 1
        chunks.response.close()
        server.assert_quiet()
    host, port = server.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        content = body(prompt=tokens_of(100, seed=3), max_tokens=900, ignore_eos=True)
        connection.sendall(http_request(content))
        assert soon(lambda: server.held.get("prefill_running_requests") == 1)
    server.assert_quiet()
    assert server.total("prefill_requests_total", api="completions", outcome="cancelled") == 2


def http_request(content: bytes) -> bytes:
    lines = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return lines.encode() + content


def test_bodies_that_are_being_read_do_not_fill_the_memory(server: PrefillWorker) -> None:
    """Many that are nearly there, each as long as one may be: some are told to come again."""
    host, port = server.http.removeprefix("http://").split(":")
    begun = http_request(b" " * LONGEST_BODY)[:-1]
    with ExitStack() as stack:
        for _ in range(BODIES_BYTES // LONGEST_BODY + 2):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            with suppress(ConnectionError):  # it has been told
                connection.sendall(begun)
        assert soon(lambda: server.total("prefill_requests_total", outcome="queue_full"))
        served = server.held["prefill_served_requests"]
        assert 0 < served <= BODIES_BYTES // LONGEST_BODY
    server.assert_quiet()
    assert post(server, body()).status_code == 200


def test_a_reader_that_stops_reading_is_cut_off(impatient: PrefillWorker) -> None:
    host, port = impatient.http.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        content = body(model=NARROW, prompt=tokens_of(20), max_tokens=1000, ignore_eos=True, stream=True)
        connection.sendall(http_request(content))
        # Its buffer here is full, or the kernel has given up on it: whichever comes first.
        assert soon(lambda: impatient.total("prefill_requests_total") == 1, 20.0)
        impatient.assert_quiet()
        with impatient.openai() as client:
            assert complete(client, model=NARROW).choices[0].finish_reason == "length"
    assert impatient.total("prefill_output_tokens_total") < 1000


def test_more_requests_than_may_wait(narrow: PrefillWorker) -> None:
    """One runs, one waits, and the third is told when to come again; the others are undisturbed."""
    with narrow.openai() as client, ThreadPoolExecutor(1) as threads:
        asked: dict[str, Any] = {"model": NARROW, "prompt": PROMPT, "stream": True, **GREEDY}
        first = client.completions.create(**asked, max_tokens=600)
        next(first)
        rest = threads.submit(list, first)  # whoever does not read is cut off
        second = client.completions.create(**asked, max_tokens=8, timeout=60)
        with pytest.raises(openai.RateLimitError) as refused:
            complete(client, model=NARROW)
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert len(list(second)) > 1
        assert len(rest.result(30)) > 1
    narrow.assert_quiet()
