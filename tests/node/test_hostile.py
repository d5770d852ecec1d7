"""Hostile peers against a served node: whatever they send or leave unread, a healthy client is served throughout.

Each test attacks while `watched` runs a healthy client with one request in flight and checks the node's memory. An
attacker gets an error reply or a closed connection; anything else is allowed as long as it affects no other client.
"""

from __future__ import annotations

import asyncio
import base64
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from flowstone.iproto import auth
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import GREETING_SIZE, decode_greeting
from flowstone.iproto.limits import PACKET_SIZE_MAX, PACKET_SIZE_MAX_BEFORE_AUTH
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response, decode_response, encode_request, frame, split
from tests import served_node
from tests.conftest import FULL
from tests.fuzz import requests
from tests.fuzz.mutation import mutated
from tests.served_node import ServedNode

PACKETS = 100_000 if FULL else 10_000
PACKETS_PER_CONNECTION = 100
ANSWER_SECONDS = 5.0
"""Longest allowed wait of the healthy client, on a busy machine that runs two tests at a time."""

GROWTH_BYTES = 256 << 20
MIXED_GROWTH_BYTES = 200 << 20
CONNECTIONS_MAX = 300
CLERK_ID, CLERK, PASSWORD = 100, "clerk", "tick"
OWN_SPACE = 600
USER, PRIVILEGE = 304, 312
READ, WRITE, EXECUTE, SESSION, USAGE = 1, 2, 4, 8, 16


def mutated_packet(rng: random.Random) -> bytes:
    """Return a mutated request, mostly in a valid frame, so that more than its first bytes is parsed."""
    payload = mutated(rng.choice(requests.CORPUS), rng)
    kind = rng.random()
    if kind < 0.001:
        return mutated(frame(payload), rng)
    if kind < 0.002:
        return b"\xce" + struct.pack(">I", max(0, len(payload) + rng.randint(-3, 3))) + payload
    return frame(payload or b"\x80")


class Client:
    """A blocking client that can also send arbitrary bytes."""

    def __init__(self, node: ServedNode, *, as_clerk: bool = False, small_window: bool = False) -> None:
        self.socket = socket.socket()
        self._buffer, self._packets = b"", list[bytes]()
        try:
            if small_window:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self.socket.settimeout(30)
            self.socket.connect(("127.0.0.1", node.port))
            greeting = decode_greeting(self._greeting())
            self.version = greeting.version
            if as_clerk:
                scramble = auth.scramble(PASSWORD, greeting.salt)
                body = {Key.USER_NAME.value: CLERK, Key.TUPLE.value: (auth.METHOD, scramble)}
                assert not self.ask(encode_request(RequestType.AUTH, 1, pack(body))).is_error
        except BaseException:
            self.socket.close()
            raise

    def _greeting(self) -> bytes:
        greeting = b""
        while len(greeting) < GREETING_SIZE:
            piece = self.socket.recv(GREETING_SIZE - len(greeting))
            if not piece:
                raise ConnectionResetError("closed before the greeting")
            greeting += piece
        return greeting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, packet: bytes) -> Response:
        self.socket.sendall(packet)
        return self.answer()

    def answer(self) -> Response:
        """Return the next packet; raise ConnectionResetError if there is none."""
        while not self._packets:
            piece = self.socket.recv(1 << 16)
            if not piece:
                raise ConnectionResetError("closed")
            self._buffer += piece
            self._packets, end = split(self._buffer)
            self._buffer = self._buffer[end:]
        return decode_response(self._packets.pop(0))

    def is_closed(self) -> bool:
        """Return True if the node closes the connection; earlier answers are ignored."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    def drop(self) -> None:
        """Drop the connection without closing it properly."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class HealthyClient(threading.Thread):
    """Reads, writes and pings, one request at a time, until stopped; records the longest wait."""

    def __init__(self, node: ServedNode) -> None:
        super().__init__(daemon=True)
        self._client = Client(node, as_clerk=True)
        self._stopped = threading.Event()
        self._node = node
        self.longest_wait, self.answers, self.peak_bytes = 0.0, 0, node.resident_bytes()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._turn()
        except BaseException as error:
            self.failure = error

    def _turn(self) -> None:
        row = (1, self.answers)
        body = {Key.SPACE_ID.value: OWN_SPACE, Key.TUPLE.value: row}
        key = {Key.SPACE_ID.value: OWN_SPACE, Key.INDEX_ID.value: 0, Key.LIMIT.value: 1}
        wanted = {Key.KEY.value: (1,), Key.OFFSET.value: 0, Key.ITERATOR.value: 0}
        self._timed(encode_request(RequestType.PING, 1))
        self._timed(encode_request(RequestType.REPLACE, 2, pack(body)))
        found = self._timed(encode_request(RequestType.SELECT, 3, pack(key | wanted)))
        assert found.values()[Key.DATA] == (row,)
        self.peak_bytes = max(self.peak_bytes, self._node.resident_bytes())
        self._stopped.wait(0.002)

    def _timed(self, packet: bytes) -> Response:
        start = time.monotonic()
        response = self._client.ask(packet)
        self.longest_wait = max(self.longest_wait, time.monotonic() - start)
        self.answers += 1
        if response.is_error:
            raise response.error()
        return response

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self._client.socket.close()


async def set_up(node: ServedNode, dialect: str) -> None:
    """Create a space to attack and one for the healthy client.

    Attackers are guests or the clerk, who may change no schema.
    """
    async with await served_node.connect(node) as connection:
        indexes = [("pk", True, [(0, "unsigned")]), ("name", False, [(1, "string")])]
        await served_node.create_space(connection, requests.SPACE_ID, requests.SPACE_NAME, requests.FORMAT, *indexes)
        await served_node.create_space(connection, OWN_SPACE, "own", [("id", "unsigned")])
        password = {auth.METHOD: base64.b64encode(auth.hash_of_hash(PASSWORD)).decode()}
        user = (CLERK_ID, 1, CLERK, "user", password)
        await served_node.insert(connection, USER, user if dialect == "2.6" else (*user, (), 0))
        everywhere = (1, CLERK_ID, "universe", 0, EXECUTE | SESSION | USAGE)
        await served_node.insert(connection, PRIVILEGE, everywhere)
        for space_id in (requests.SPACE_ID, OWN_SPACE):
            await served_node.insert(connection, PRIVILEGE, (1, CLERK_ID, "space", space_id, READ | WRITE))


@pytest.fixture(scope="module", params=["2.6", "2.11"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    directory: Path = tmp_path_factory.mktemp("hostile")
    with served_node.serve(directory, f"--connections-max={CONNECTIONS_MAX}", dialect=request.param) as served:
        asyncio.run(set_up(served, request.param))
        yield served


@contextmanager
def watched(node: ServedNode) -> Iterator[HealthyClient]:
    """Check that the block neither affects a healthy client nor costs the node much memory."""
    client = HealthyClient(node)
    before = node.resident_bytes()
    client.start()
    try:
        yield client
    finally:
        client.stop()
    assert client.failure is None, f"{client.failure!r}\n{node.log()[-4000:]}"
    assert client.longest_wait < ANSWER_SECONDS
    assert client.peak_bytes - before < GROWTH_BYTES
    assert client.answers
    assert node.process.poll() is None
    assert "Traceback" not in node.log()


def test_mutated_packets_affect_no_other_client(node: ServedNode) -> None:
    rng = random.Random(str(node.directory.name))
    with watched(node):
        for number in range(PACKETS // PACKETS_PER_CONNECTION):
            blob = b"".join(mutated_packet(rng) for _ in range(PACKETS_PER_CONNECTION))
            with Client(node, as_clerk=number % 4 != 0) as attacker, suppress(ConnectionError):
                attacker.socket.sendall(blob)
                if number % 3:
                    attacker.socket.shutdown(socket.SHUT_WR)
                    assert attacker.is_closed()


def test_valid_requests_of_every_type_are_answered_in_any_order(node: ServedNode) -> None:
    rng = random.Random(7)
    packets = [frame(request) for request in requests.CORPUS]
    with watched(node):
        for _ in range(20):
            rng.shuffle(packets)
            with Client(node, as_clerk=True) as attacker, suppress(ConnectionError):
                attacker.socket.sendall(b"".join(packets))
                attacker.socket.shutdown(socket.SHUT_WR)
                assert attacker.is_closed()


@pytest.mark.parametrize(
    "head",
    [
        b"\xce" + struct.pack(">I", PACKET_SIZE_MAX + 1),
        b"\xce\xff\xff\xff\xff",
        b"\xcf" + struct.pack(">Q", PACKET_SIZE_MAX + 1),
        b"\xcf" + b"\xff" * 8,
        b"\xd3" + b"\xff" * 8,
        b"\x00",
        b"\xc1",
    ],
    ids=bytes.hex,
)
@pytest.mark.parametrize("as_clerk", [False, True], ids=["guest", "clerk"])
def test_invalid_or_excessive_length_closes_only_its_connection(node: ServedNode, head: bytes, as_clerk: bool) -> None:
    with watched(node), Client(node, as_clerk=as_clerk) as attacker:
        attacker.socket.sendall(head)
        assert attacker.is_closed()


def test_length_limit_is_lower_for_unauthenticated_clients(node: ServedNode) -> None:
    with watched(node), Client(node) as attacker:
        attacker.socket.sendall(b"\xce" + struct.pack(">I", PACKET_SIZE_MAX_BEFORE_AUTH + 1))
        assert attacker.is_closed()


def test_announced_length_allocates_no_memory_before_the_bytes_arrive(node: ServedNode) -> None:
    with watched(node) as client, ExitStack() as stack:
        for _ in range(50):
            attacker = Client(node, as_clerk=True)
            stack.callback(attacker.drop)
            with suppress(ConnectionError):
                attacker.socket.sendall(b"\xce" + struct.pack(">I", PACKET_SIZE_MAX) + bytes(100_000))
        go_on(client)


@pytest.mark.parametrize("claim", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"], ids=bytes.hex)
def test_huge_lengths_within_a_packet_are_rejected(node: ServedNode, claim: bytes) -> None:
    space = b"\x10" + pack(requests.SPACE_ID)
    with watched(node):
        for start in (
            b"\x82\x00\x03\x01\x05\x82" + space + b"\x21",
            b"\x82\x00\x01\x01\x05\x82" + space + b"\x20",
            b"\x82\x00",
        ):
            with Client(node, as_clerk=True) as attacker, suppress(ConnectionError):
                assert attacker.ask(frame(start + claim + b"\xff\xff\xff\xff" + b"\x07" * 20)).is_error


@pytest.mark.parametrize("number", range(len(requests.TOO_DEEP)))
def test_deep_nesting_is_rejected_or_answered(node: ServedNode, number: int) -> None:
    with watched(node):
        for payload in (requests.JUST_DEEP_ENOUGH[number], requests.TOO_DEEP[number]):
            with Client(node, as_clerk=True) as attacker, suppress(ConnectionError):
                attacker.ask(frame(payload))


def test_silent_and_half_open_clients_affect_no_other_client(node: ServedNode) -> None:
    packet = frame(requests.CORPUS[0])
    with watched(node) as client, ExitStack() as stack:
        for number in range(150):
            attacker = Client(node, as_clerk=number % 2 == 0)
            stack.callback(attacker.drop)
            attacker.socket.sendall(packet[: number % len(packet)])
        go_on(client)


def test_request_sent_byte_by_byte_is_answered(node: ServedNode) -> None:
    with watched(node), Client(node, as_clerk=True) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        packet = frame(requests.CORPUS[0])
        for at in range(len(packet)):
            client.socket.sendall(packet[at : at + 1])
        assert not client.answer().is_error


def test_clients_that_never_read_are_throttled(node: ServedNode) -> None:
    body = {Key.SPACE_ID.value: requests.SPACE_ID, Key.TUPLE.value: (1000, "x" * 900_000, 0, 0)}
    key = {Key.SPACE_ID.value: requests.SPACE_ID, Key.INDEX_ID.value: 0, Key.LIMIT.value: 1}
    select = pack(key | {Key.KEY.value: (1000,), Key.OFFSET.value: 0, Key.ITERATOR.value: 0})
    with watched(node) as client, ExitStack() as stack:
        with Client(node, as_clerk=True) as writer:
            assert not writer.ask(encode_request(RequestType.REPLACE, 1, pack(body))).is_error
        blob = encode_request(RequestType.SELECT, 2, select) * 20_000
        for _ in range(20):
            attacker = Client(node, as_clerk=True, small_window=True)
            stack.callback(attacker.drop)
            attacker.socket.settimeout(0.2)
            with suppress(TimeoutError, ConnectionError):
                attacker.socket.sendall(blob)
        go_on(client)


def test_large_replies_among_small_ones_are_throttled(node: ServedNode) -> None:
    body = {Key.SPACE_ID.value: requests.SPACE_ID, Key.TUPLE.value: (1001, "x" * 300_000, 0, 0)}
    key = {Key.SPACE_ID.value: requests.SPACE_ID, Key.INDEX_ID.value: 0, Key.LIMIT.value: 1}
    select = pack(key | {Key.KEY.value: (1001,), Key.OFFSET.value: 0, Key.ITERATOR.value: 0})
    blob = (encode_request(RequestType.SELECT, 2, select) * 13 + encode_request(RequestType.PING, 3)) * 200
    with watched(node) as client, ExitStack() as stack:
        with Client(node, as_clerk=True) as writer:
            assert not writer.ask(encode_request(RequestType.REPLACE, 1, pack(body))).is_error
        before = node.resident_bytes()
        attacker = Client(node, as_clerk=True, small_window=True)
        stack.callback(attacker.drop)
        attacker.socket.settimeout(0.2)
        with suppress(TimeoutError, ConnectionError):
            attacker.socket.sendall(blob)
        go_on(client)
        assert client.peak_bytes - before < MIXED_GROWTH_BYTES


def test_unfinished_transactions_affect_no_other_client(node: ServedNode) -> None:
    body = {Key.SPACE_ID.value: requests.SPACE_ID}
    with watched(node) as client, ExitStack() as stack:
        for number in range(20):
            attacker = Client(node, as_clerk=number % 4 != 0)
            stack.callback(attacker.drop)
            attacker.socket.settimeout(0.2)
            packets = [encode_request(RequestType.BEGIN, stream, stream_id=stream) for stream in range(1, 1500)]
            for stream in range(1, 40):
                row = {Key.TUPLE.value: (number * 1500 + stream, "begun", 0, 0)}
                packets.append(encode_request(RequestType.REPLACE, stream, pack(body | row), stream_id=stream))
            with suppress(TimeoutError, ConnectionError):
                attacker.socket.sendall(b"".join(packets))
        go_on(client)


def test_clients_that_watch_many_keys_affect_no_other_client(node: ServedNode) -> None:
    with watched(node) as client, ExitStack() as stack:
        for number in range(40):
            attacker = Client(node, as_clerk=number % 2 == 0)
            stack.callback(attacker.drop)
            attacker.socket.settimeout(0.2)
            keys = [pack({Key.EVENT_KEY.value: f"{number}.{key}"}) for key in range(2000)]
            with suppress(TimeoutError, ConnectionError):
                attacker.socket.sendall(b"".join(encode_request(RequestType.WATCH, 1, key) for key in keys))
        go_on(client)


def test_client_that_disconnects_during_a_slow_call_commits_all_or_nothing(node: ServedNode) -> None:
    space = {Key.SPACE_ID.value: requests.SPACE_ID}
    call = pack({Key.FUNCTION_NAME.value: "box.ctl.wait_ro", Key.TUPLE.value: (0.05,)})
    pairs = range(5000, 5040, 2)
    with Client(node) as stranger:
        is_with_streams = stranger.version >= (2, 11)
    with watched(node) as client:
        for first in pairs:
            one, other = (pack(space | {Key.TUPLE.value: (key, "half", 0, 0)}) for key in (first, first + 1))
            with Client(node, as_clerk=True) as attacker, suppress(ConnectionError):
                attacker.socket.sendall(
                    encode_request(RequestType.BEGIN, 1, stream_id=5)
                    + encode_request(RequestType.REPLACE, 2, one, stream_id=5)
                    + encode_request(RequestType.CALL, 3, call, stream_id=5)
                    + encode_request(RequestType.REPLACE, 4, other, stream_id=5)
                    + encode_request(RequestType.COMMIT, 5, stream_id=5)
                )
                if first % 4:
                    assert attacker.answer().is_error is not is_with_streams
                attacker.drop()
        go_on(client)
    with Client(node, as_clerk=True) as reader:
        for first in pairs if is_with_streams else ():
            assert is_there(reader, first) is is_there(reader, first + 1)


def is_there(client: Client, key: int) -> bool:
    body = {Key.SPACE_ID.value: requests.SPACE_ID, Key.INDEX_ID.value: 0, Key.LIMIT.value: 1}
    wanted = {Key.KEY.value: (key,), Key.OFFSET.value: 0, Key.ITERATOR.value: 0}
    return bool(client.ask(encode_request(RequestType.SELECT, 9, pack(body | wanted))).values()[Key.DATA])


def test_connections_beyond_the_limit_are_rejected_and_the_others_served(node: ServedNode) -> None:
    with watched(node) as client:
        with ExitStack() as stack:
            refused = 0
            for _ in range(CONNECTIONS_MAX + 50):
                try:
                    stack.callback(Client(node).drop)
                except ConnectionError:
                    refused += 1
            assert refused >= 50
            go_on(client)
        eventually(lambda: Client(node, as_clerk=True).drop())


def test_short_lived_connections_leave_no_resources(node: ServedNode) -> None:
    with watched(node):
        for number in range(5000 if FULL else 1000):
            connection = socket.create_connection(("127.0.0.1", node.port))
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        eventually(lambda: Client(node, as_clerk=True).drop())


def go_on(client: HealthyClient) -> None:
    """Continue the attack until the healthy client has some hundred answers."""
    wanted, deadline = client.answers + 300, time.monotonic() + 60
    while client.answers < wanted and client.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)


def eventually(action: Callable[[], None]) -> None:
    """Retry until it works; the node notices closed connections with a delay."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return action()
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
