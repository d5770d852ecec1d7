"""The load: pre-encoded requests, and a driver that sends them and counts the replies at machine speed.

A run is one thread that holds no interpreter lock: it polls, receives, counts whole replies and sends as many further
requests as the window allows. So it uses at most one core, and measures the server. Replies are checked as
they are counted: the header of real servers, type 0, and at least the size that an answer with a tuple has.
"""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bench.load_kernels import ANSWERED, CLOSED, DONE, WRONG, drive
from flowstone.iproto.constants import RequestType
from flowstone.iproto.greeting import GREETING_SIZE
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response, encode_request

SPACE_ID = 512
FIRST_KEY = 100_000
"""Keys from here to 2^32 take five bytes of MessagePack each, so all requests of a kind have one size."""

AGES = 90
REPLY_HEADER_SIZE = 28
BUFFER_SIZE = 1 << 20
SILENCE_SECONDS = 60
EVERYTHING = 1 << 40
"""An unlimited window: the server's own limits throttle the sender."""

Keys = NDArray[np.int64]
Edges = NDArray[np.int64]
Blob = NDArray[np.uint8]


# --- requests ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requests:
    """Packets in `blob`, from `edges[n]` to `edges[n + 1]` each; `answer_size` is the minimum size of a good reply."""

    blob: Blob
    edges: Edges
    answer_size: int

    @property
    def count(self) -> int:
        return len(self.edges) - 1


def sequential(count: int, start: int = FIRST_KEY) -> Keys:
    return np.arange(start, start + count, dtype=np.int64)


def shuffled(count: int, seed: int, start: int = FIRST_KEY) -> Keys:
    return np.random.default_rng(seed).permutation(sequential(count, start))


def person(key: int) -> tuple[Any, ...]:
    """Return a tuple of the benchmark's space: five fields, and the same size for every key."""
    return (key, f"name{key:010d}", f"user{key:010d}@example.com", key % 9999991 + 0.25, key % AGES)


def statements(type: RequestType, keys: Keys) -> Requests:
    """Return an INSERT or REPLACE of a `person` for each key."""
    return people(type, b"\x82\x10" + pack(SPACE_ID) + b"\x21" + pack(person(FIRST_KEY)), keys, age_at=-1)


def selects(keys: Keys) -> Requests:
    """SELECT of one tuple by its primary key, for each key, with all that clients say in one."""
    body = b"\x86\x10" + pack(SPACE_ID) + b"\x11\x00\x12\xce\xff\xff\xff\xff\x13\x00\x14\x00\x20" + pack((FIRST_KEY,))
    return people(RequestType.SELECT, body, keys)


def pings(count: int) -> Requests:
    return _requests(_packets(RequestType.PING, b"\x80", count), REPLY_HEADER_SIZE)


def people(
    type: RequestType,
    body: bytes,
    keys: Keys,
    *,
    age_at: int | None = None,
    years: int = 0,
    tuples: int = 1,
    streams: Keys | None = None,
) -> Requests:
    """One request per key: `body` is the request for FIRST_KEY, whose id, digits and amount are replaced.

    Args:
        age_at: Offset of the age in `body`, from its end. The age becomes that of the key, plus `years`.
        tuples: Number of tuples in each reply.
        streams: The stream of each request.
    """
    table = _packets(type, body, len(keys), streams)
    packet, start = table[0].tobytes(), table.shape[1] - len(body)
    for match in re.finditer(rb"%010d" % FIRST_KEY, packet):
        table[:, match.start() : match.end()] = keys[:, None] // 10 ** np.arange(9, -1, -1) % 10 + ord("0")
    for match in re.finditer(re.escape(pack(FIRST_KEY)), packet[start:]):
        table[:, start + match.start() + 1 : start + match.end()] = _bytes(keys, ">u4")
    for match in re.finditer(re.escape(pack(person(FIRST_KEY)[3])), packet[start:]):
        table[:, start + match.start() + 1 : start + match.end()] = _bytes(keys % 9999991 + 0.25, ">f8")
    if age_at is not None:
        table[:, age_at] = (keys + years) % AGES
    return _requests(table, REPLY_HEADER_SIZE + tuples * len(pack(person(FIRST_KEY))))


def interleaved(which: NDArray[np.int64], *kinds: Requests) -> Requests:
    """Return the requests of several kinds in one sequence: request n is the next one of kind `which[n]`."""
    sizes = np.zeros(len(which), np.int64)
    for number, kind in enumerate(kinds):
        if (room := int((which == number).sum())) != kind.count:
            raise ValueError(f"kind {number} has {kind.count} requests for {room} places")
        sizes[which == number] = np.diff(kind.edges)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    blob = np.zeros(edges[-1], np.uint8)
    for number, kind in enumerate(kinds):
        places = np.flatnonzero(which == number)
        table = kind.blob.reshape(kind.count, -1)
        blob[edges[places][:, None] + np.arange(table.shape[1])] = table
    return Requests(blob, edges, min(kind.answer_size for kind in kinds))


def _packets(type: RequestType, body: bytes, count: int, streams: Keys | None = None) -> Blob:
    """Return a table with a packet per row. The packets differ in sync and stream only."""
    sync, stream = 0x10000, 0x10000
    packet = encode_request(type, sync, body, stream_id=stream if streams is not None else 0)
    table = np.tile(np.frombuffer(packet, np.uint8), (count, 1))
    end = len(packet) - len(body)
    if streams is not None:
        table[:, end - 4 : end] = _bytes(stream + streams, ">u4")
        end -= 6  # the stream follows the sync: its key, the head of its value, the value
    table[:, end - 4 : end] = _bytes(np.arange(sync, sync + count), ">u4")
    return table


def _requests(table: Blob, answer_size: int) -> Requests:
    edges = np.arange(len(table) + 1, dtype=np.int64) * table.shape[1]
    return Requests(table.reshape(-1), edges, answer_size)


def _bytes(values: NDArray[Any], kind: str) -> Blob:
    return values.astype(kind).view(np.uint8).reshape(len(values), -1)


# --- the driver -------------------------------------------------------------------------------------


class LoadError(Exception):
    """The server rejected, disconnected or stopped answering: there is no result."""


@dataclass(frozen=True)
class Run:
    """The duration of a run, and for each arrival of replies the waiting time of its connection."""

    replies: int
    seconds: float
    pauses: NDArray[np.float64]

    @property
    def rate(self) -> float:
        return self.replies / self.seconds


class Connections:
    """Guest connections to one server, kept over many runs."""

    def __init__(self, port: int, count: int) -> None:
        self._stack = ExitStack()
        self._sockets = [self._stack.enter_context(_connected(port)) for _ in range(count)]
        for each in self._sockets:
            each.setblocking(False)
        self._buffers = np.zeros((count, BUFFER_SIZE if count == 1 else BUFFER_SIZE // 8), np.uint8)

    def run(self, requests: Requests, window: int, *, keep_pauses: bool = False) -> Run:
        """Send all `requests`, divided evenly, with at most `window` in flight on each connection."""
        count = len(self._sockets)
        bounds = np.array([requests.count * number // count for number in range(count + 1)], np.int64)
        polled = np.array([[each.fileno(), 0] for each in self._sockets], np.int32)
        connections = np.zeros((4, count), np.int64)
        connections[ANSWERED] = bounds[:-1]
        pauses = np.zeros(requests.count if keep_pauses else 0, np.int64)
        how, seen, nanoseconds, wrong = drive(
            polled, connections, bounds[1:], requests.blob, requests.edges, window, requests.answer_size,
            self._buffers, pauses, SILENCE_SECONDS * 1_000_000_000,
        )  # fmt: skip
        if how == WRONG:
            raise LoadError(f"reply {seen} is wrong: {self._reply(wrong >> 32, wrong & 0xFFFFFFFF)}")
        if how != DONE:
            what = "closed a connection" if how == CLOSED else f"was silent for {SILENCE_SECONDS} s"
            raise LoadError(f"the server {what} after {seen} of {requests.count} replies")
        return Run(int(seen), nanoseconds / 1e9, pauses[np.flatnonzero(pauses)] / 1e9)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reply(self, connection: int, at: int) -> str:
        raw = self._buffers[connection, at:].tobytes()
        try:
            size = int.from_bytes(raw[1:5], "big")
            response = decode_response(raw[5 : 5 + size])
            return str(response.error()) if response.is_error else f"{response.values()}"
        except Exception:
            return raw[:80].hex()


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    greeting = b""
    while len(greeting) < GREETING_SIZE:
        piece = connection.recv(GREETING_SIZE - len(greeting))
        if not piece:
            raise LoadError("the server closed the connection without a greeting")
        greeting += piece
    return connection
