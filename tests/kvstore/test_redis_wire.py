from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.redis_wire import ErrorReply, Reply, StreamError, Wire, command


class Ends:
    """A wire and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.server = socket.socketpair()
        self.sock = ours
        self.wire = Wire(ours, time.monotonic, time.monotonic() + 5.0)

    def send_in(self, pieces: list[bytes]) -> threading.Thread:
        """Send each piece by a system call of its own, beside the caller."""

        def send() -> None:
            for piece in pieces:
                self.server.sendall(piece)

        thread = threading.Thread(target=send)
        thread.start()
        return thread

    def close(self) -> None:
        self.sock.close()
        self.server.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = Ends()
    yield pair
    pair.close()


def encode(reply: Reply) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case ErrorReply():
            return b"-" + reply.message.encode() + b"\r\n"
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))


errors = st.sampled_from([ErrorReply("OOM", "OOM used memory"), ErrorReply("ERR", "ERR")])
replies = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | errors | st.binary(max_size=6000),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(expected=st.lists(replies, max_size=8), size=st.integers(1, 5000))
def test_replies_are_read_however_they_are_cut(expected: list[Reply], size: int) -> None:
    stream = b"".join(map(encode, expected))
    ends = Ends()
    try:
        sender = ends.send_in([stream[at : at + size] for at in range(0, len(stream), size)])
        assert [ends.wire.read_reply() for _ in expected] == expected
        sender.join()
        assert ends.wire.is_fit()
        assert ends.wire.replies == len(expected)
    finally:
        ends.close()


@given(
    payloads=st.lists(st.binary(max_size=9000) | st.none(), min_size=1, max_size=6),
    size=st.integers(1, 5000),
    ahead=st.booleans(),
)
def test_payloads_land_where_they_belong_and_are_tapped_once(
    payloads: list[bytes | None], size: int, *, ahead: bool
) -> None:
    stream = b"".join(encode(payload) + b":7\r\n" for payload in payloads)
    ends = Ends()
    try:
        sender = ends.send_in([stream[at : at + size] for at in range(0, len(stream), size)])
        for done, payload in enumerate(payloads):
            length = ends.wire.read_bulk_size()
            if payload is None:
                assert length is None
            else:
                assert length == len(payload)
                head, body, tapped = bytearray(length // 3), bytearray(length - length // 3), bytearray()
                surely = len(b":7\r\n") * (2 * (len(payloads) - done) - 1) if ahead else 0
                ends.wire.read_string(memoryview(head), memoryview(body), tapped.extend, surely=surely)
                assert bytes(head + body) == payload
                assert tapped == body
            assert ends.wire.read_reply() == 7
        sender.join()
        assert ends.wire.is_fit()
    finally:
        ends.close()


@pytest.mark.parametrize("end", [b"", b"\r", b"\r\n", b"\r\n:"])
@pytest.mark.parametrize("closed", [True, False])
def test_what_does_not_follow_a_payload_is_no_loss_of_it(ends: Ends, end: bytes, *, closed: bool) -> None:
    ends.wire.begin(time.monotonic() + 0.05)
    ends.server.sendall(b"$9000\r\n" + bytes(9000) + end)
    if closed:
        ends.server.shutdown(socket.SHUT_WR)
    assert ends.wire.read_bulk_size() == 9000
    head, body, tapped = bytearray(1000), bytearray(b"x" * 8000), bytearray()
    error = ConnectionError if closed else TimeoutError
    if len(end) < 2:
        with pytest.raises(error):
            ends.wire.read_string(memoryview(head), memoryview(body), tapped.extend, surely=100)
    else:
        ends.wire.read_string(memoryview(head), memoryview(body), tapped.extend, surely=100)
        with pytest.raises(error):
            ends.wire.read_reply()
    assert tapped == body == bytes(8000)


def test_an_expected_reply_is_taken_when_it_is_there_and_left_when_it_is_another(ends: Ends) -> None:
    assert not ends.wire.take(b"+OK\r\n"), "nothing has come"
    ends.server.sendall(b":1\r\n+OK\r\n+OKAY\r\n+OK\r\n")
    assert ends.wire.read_reply() == 1
    assert ends.wire.take(b"+OK\r\n")
    assert not ends.wire.take(b"+OK\r\n")
    assert ends.wire.read_reply() == b"OKAY"
    ends.wire.owe(1)
    assert not ends.wire.take(b"+OK\r\n"), "that is the reply that is owed"
    assert ends.wire.replies == 3


def test_what_is_owed_is_dropped_before_the_next_reply(ends: Ends) -> None:
    ends.wire.owe(2)
    ends.server.sendall(b":1\r\n-READONLY no\r\n:3\r\n")
    assert ends.wire.is_fit()
    assert ends.wire.read_reply() == 3
    assert ends.wire.error_codes == ["READONLY"]


def test_skipping_leaves_the_stream_in_step(ends: Ends) -> None:
    ends.server.sendall(b"$10000\r\n" + bytes(10000) + b"\r\n:5\r\n")
    size = ends.wire.read_bulk_size()
    assert isinstance(size, int)
    ends.wire.skip_part(size, memoryview(bytearray(777)))
    ends.wire.end_bulk()
    assert ends.wire.read_reply() == 5


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b":12x\r\n",
        b"$one\r\n",
        b"$4\r\nfivee\r\n",
        b"*99999999\r\n",
        b"*1\r\n" * 9 + b":1\r\n",
        b"$999999999999\r\n",
        b"+" + b"x" * 5000,
    ],
)
def test_garbage_is_a_stream_error(ends: Ends, stream: bytes) -> None:
    ends.server.sendall(stream)
    with pytest.raises(StreamError, match=r"got|does not end"):
        ends.wire.read_reply()


def test_a_reply_of_another_kind_in_the_place_of_a_payload_is_a_stream_error(ends: Ends) -> None:
    ends.server.sendall(b":1\r\n")
    with pytest.raises(StreamError, match="expected a string"):
        ends.wire.read_bulk_size()


@pytest.mark.parametrize("sent", [b"", b"$100\r\nabc"])
def test_a_closed_connection_is_an_error_and_unfit(ends: Ends, sent: bytes) -> None:
    ends.server.sendall(sent)
    ends.server.close()
    assert not ends.wire.is_fit()
    with pytest.raises(ConnectionError, match="closed"):
        ends.wire.read_reply()


def test_bytes_that_nobody_asked_for_make_it_unfit(ends: Ends) -> None:
    assert ends.wire.is_fit()
    ends.server.sendall(b":1\r\n")
    assert not ends.wire.is_fit()


@pytest.mark.parametrize("sent", [b"", b":", b"$100000\r\nabc"])
def test_waiting_for_a_reply_ends_at_the_deadline(ends: Ends, sent: bytes) -> None:
    ends.server.sendall(sent)
    begun = time.monotonic()
    ends.wire.begin(begun + 0.05)
    with pytest.raises(TimeoutError):
        ends.wire.read_reply()
    assert 0.04 < time.monotonic() - begun < 0.1


def test_a_dripping_server_does_not_prolong_the_wait(ends: Ends) -> None:
    done = threading.Event()

    def drip() -> None:
        while not done.wait(0.003):
            ends.server.sendall(b"x")

    dripping = threading.Thread(target=drip)
    ends.server.sendall(b"$100000\r\n")
    dripping.start()
    begun = time.monotonic()
    ends.wire.begin(begun + 0.05)
    try:
        with pytest.raises(TimeoutError):
            ends.wire.read_reply()
        assert time.monotonic() - begun < 0.1
    finally:
        done.set()
        dripping.join()


def test_sending_to_a_server_that_does_not_read_ends_at_the_deadline(ends: Ends) -> None:
    begun = time.monotonic()
    ends.wire.begin(begun + 0.05)
    with pytest.raises(TimeoutError):
        ends.wire.send([bytes(2**24)])
    assert 0.04 < time.monotonic() - begun < 0.1


@given(sizes=st.lists(st.integers(0, 3000), max_size=1200))
def test_buffers_are_sent_whole_and_in_order(sizes: list[int]) -> None:
    ends = Ends()
    buffers = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    received = bytearray()

    def receive() -> None:
        while len(received) < sum(sizes):
            received.extend(ends.server.recv(100_000))

    try:
        reader = threading.Thread(target=receive)
        reader.start()
        ends.wire.send(buffers)
        reader.join()
        assert received == b"".join(buffers)
    finally:
        ends.close()


def test_commands_are_encoded_as_the_protocol_says() -> None:
    assert command(b"SET", b"key", b"") == b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$0\r\n\r\n"


def test_a_preface_is_answered_before_each_reply(ends: Ends) -> None:
    ends.wire.preface = command(b"ASKING")
    ends.server.sendall(b"+OK\r\n:1\r\n-NOPERM asking\r\n$-1\r\n")
    assert (ends.wire.read_reply(), ends.wire.read_bulk_size()) == (1, None)
    assert (ends.wire.replies, ends.wire.error_codes) == (4, ["NOPERM"])
    ends.wire.owe(1)
    ends.wire.begin(time.monotonic() + 5)
    ends.server.sendall(b"+OK\r\n:5\r\n:7\r\n")
    assert ends.wire.read_reply() == 7, "what was owed had a preface, and this has none"
