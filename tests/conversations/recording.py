"""Recorded conversations (tests/vectors/tarantool-*/SCENARIO/NAME.*): their packets in the order of arrival.

`NAME.c2s.bin` and `NAME.s2c.bin` hold the bytes of the two directions, `NAME.idx` a JSON line per read: direction,
time, offset, length; length 0 is an end. Packets are decoded by the `msgpack` package, so that no mistake is shared
with the code under test. Values that may legitimately differ (times, builds) are masked.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack

from flowstone.iproto.constants import Key, RequestType
from tests.vectors import recorded

GREETING_SIZE = 128
ERROR = 0x8000
MASK = "*"

STACK, STACK_FILE, STACK_LINE = 0, 1, 2

MASKED_IN_HEADERS = frozenset({Key.TIMESTAMP.value, Key.SCHEMA_VERSION.value})
"""Times, and the number of schema changes in that build."""

MASKED_IN_BODIES = frozenset({Key.VCLOCK_SYNC.value})
"""The number of earlier heartbeats."""


@dataclass(frozen=True)
class Packet:
    """One packet without its length; `header` and `body` map keys to undecoded values, in order."""

    from_server: bool
    payload: bytes

    @cached_property
    def _maps(self) -> list[dict[int, bytes]]:
        return list(_undecoded_maps(self.payload))

    @property
    def header(self) -> dict[int, bytes]:
        return self._maps[0]

    @property
    def body(self) -> dict[int, bytes] | None:
        return self._maps[1] if len(self._maps) > 1 else None

    def field(self, key: Key, default: Any = None) -> Any:
        """Return the decoded value of `key` in the header."""
        return decoded(self.header[key]) if key in self.header else default

    def content(self, key: int, default: Any = None) -> Any:
        """Return the decoded value of `key` in the body."""
        body = self.body or {}
        return decoded(body[key]) if key in body else default

    @property
    def type(self) -> int:
        return int(self.field(Key.REQUEST_TYPE, 0))

    @property
    def lsn(self) -> int:
        return int(self.field(Key.LSN, 0))

    @property
    def is_snapshot_row(self) -> bool:
        return self.from_server and self.type == RequestType.INSERT and Key.LSN not in self.header

    @property
    def is_heartbeat(self) -> bool:
        """True for a heartbeat, which a timer sends between any two transactions."""
        is_ok = self.from_server and self.type == RequestType.OK and Key.REPLICA_ID in self.header
        return is_ok and Key.VCLOCK not in (self.body or {})

    @property
    def kind(self) -> str:
        if self.type >= ERROR:
            return f"ERROR {self.type - ERROR}"
        return "HEARTBEAT" if self.is_heartbeat else _name(RequestType, self.type)

    @property
    def masked(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]] | None]:
        """Return its bytes by key, in order; of masked values only the MessagePack format."""
        header = [(key, value[:1] if key in MASKED_IN_HEADERS else value) for key, value in self.header.items()]
        if self.body is None:
            return header, None
        return header, [(key, _masked_value(key, value)) for key, value in self.body.items()]

    @property
    def values(self) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        """Return kind, header and body, decoded, named and masked."""
        header = {key: value for key, value in self.header.items() if key != Key.REQUEST_TYPE}
        body = (
            None if self.body is None else _named(self.body, MASKED_IN_BODIES, is_named=self.type != RequestType.RAFT)
        )
        return self.kind, _named(header, MASKED_IN_HEADERS), body

    def __str__(self) -> str:
        return shown(self.values)


@dataclass(frozen=True)
class Conversation:
    """One connection: the greeting, the packets of both sides, and which side closed it."""

    name: str
    greeting: bytes
    packets: tuple[Packet, ...]
    was_refused: bool
    """True if the server closed it with an error, and not only at the end of the recording."""
    start: float
    """Start time on the clock of the scenario's recording."""

    @property
    def requests(self) -> list[Packet]:
        return [packet for packet in self.packets if not packet.from_server]

    @property
    def answers(self) -> list[Packet]:
        return [packet for packet in self.packets if packet.from_server]

    @property
    def salt(self) -> bytes:
        return salt_of(self.greeting)


def salt_of(greeting: bytes) -> bytes:
    """Return the part of the salt that authentication uses."""
    return base64.b64decode(greeting[64:127].rstrip())[:20]


def scenario(version: str, name: str) -> Path:
    """Return the directory of a recorded scenario, which includes `files/NODE`."""
    return recorded.HERE / f"tarantool-{version}" / name


def names(version: str, scenario_name: str) -> list[str]:
    """Return the conversations of a scenario."""
    return sorted(path.name.removesuffix(".idx") for path in scenario(version, scenario_name).glob("*.idx"))


def load(version: str, scenario_name: str, name: str) -> Conversation:
    path = scenario(version, scenario_name) / name
    sides = {side: path.with_name(f"{name}.{side}.bin").read_bytes() for side in ("c2s", "s2c")}
    reads = [json.loads(line) for line in path.with_name(f"{name}.idx").read_text().splitlines()]
    return conversation(name, sides, reads)


def conversation(name: str, sides: dict[str, bytes], reads: Sequence[dict[str, Any]]) -> Conversation:
    """Build a conversation. A packet belongs to the read that brought its last byte."""
    begin = {"c2s": 0, "s2c": GREETING_SIZE}
    packets = []
    for read in reads:
        side, end = read["d"], read["off"] + read["len"]
        for payload, stop in split(sides[side], begin[side], end):
            packets.append(Packet(side == "s2c", payload))
            begin[side] = stop
    ends = [read["d"] for read in reads if not read["len"]]
    was_refused = ends[:1] == ["s2c"] and packets[-1].type >= ERROR
    return Conversation(name, sides["s2c"][:GREETING_SIZE], tuple(packets), was_refused, reads[0]["t"])


def split(data: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Return the whole packets between two offsets, each with its end offset."""
    while begin < end:
        unpacker = _unpacker(data[begin : begin + 9])
        try:
            size = unpacker.unpack()
        except msgpack.OutOfData:
            return
        start = begin + unpacker.tell()
        if start + size > end:
            return
        begin = start + size
        yield data[start:begin], begin


def framed(payload: bytes) -> bytes:
    """Frame a packet as real servers and appliers do."""
    return b"\xce" + len(payload).to_bytes(4, "big") + payload


def decoded(value: bytes) -> Any:
    return _unpacker(value).unpack()


def _unpacker(data: bytes) -> Any:
    # Scrambles are sent as strings although they are not text.
    unpacker = msgpack.Unpacker(strict_map_key=False, unicode_errors="surrogateescape")
    unpacker.feed(data)
    return unpacker


def _undecoded_maps(payload: bytes) -> Iterator[dict[int, bytes]]:
    unpacker = _unpacker(payload)
    while unpacker.tell() < len(payload):
        fields = {}
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            begin = unpacker.tell()
            unpacker.skip()
            fields[key] = payload[begin : unpacker.tell()]
        yield fields


def _masked_value(key: int, value: bytes) -> bytes:
    if key in MASKED_IN_BODIES:
        return value[:1]
    if key == Key.ERROR:
        return bytes(msgpack.packb(_without_places(decoded(value)), unicode_errors="surrogateescape"))
    return value


def _without_places(error: Any) -> Any:
    """Remove the source locations of an error."""
    stack = [
        {key: MASK if key in (STACK_FILE, STACK_LINE) else value for key, value in entry.items()}
        for entry in error[STACK]
    ]
    return {**error, STACK: stack}


def shown(values: tuple[str, dict[str, Any], dict[str, Any] | None]) -> str:
    """Return a readable line, which is also used to compare packets."""
    kind, header, body = values
    parts = [kind, _line(header), "" if body is None else _line(body)]
    return " ".join(parts).strip()


def _line(fields: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {value!r}" for name, value in fields.items()) + "}"


def _named(fields: dict[int, bytes], masked: frozenset[int], *, is_named: bool = True) -> dict[str, Any]:
    named = {}
    for key, value in fields.items():
        content = decoded(value)
        if key in masked:
            content = MASK
        elif key == Key.ERROR:
            content = _without_places(content)
        named[_name(Key, key) if is_named else str(key)] = content
    return named


def _name(names: Any, value: int) -> str:
    try:
        return str(names(value).name)
    except ValueError:
        return str(value)
