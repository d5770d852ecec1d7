"""Recorded conversations (tests/vectors/tarantool-*/SCENARIO/NAME.*): their packets in the order they were seen.

`NAME.c2s.bin` and `NAME.s2c.bin` hold the bytes of the two directions, `NAME.idx` a JSON line per read: direction,
time, offset, length; length 0 is an end. Packets are taken apart by the `msgpack` package, so that nothing here shares
a mistake with the code under test. What two sides may differ in without being different (times, builds) is masked.
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
"""When it was, and how often the schema of that build has changed."""

MASKED_IN_BODIES = frozenset({Key.VCLOCK_SYNC.value})
"""How many heartbeats went before."""


@dataclass(frozen=True)
class Packet:
    """One packet without its length; `header` and `body` map keys to undecoded values, in their order."""

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
        """The decoded value of `key` in the header."""
        return decoded(self.header[key]) if key in self.header else default

    def content(self, key: int, default: Any = None) -> Any:
        """The decoded value of `key` in the body."""
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
        """It comes when a timer says so, between any two transactions."""
        is_ok = self.from_server and self.type == RequestType.OK and Key.REPLICA_ID in self.header
        return is_ok and Key.VCLOCK not in (self.body or {})

    @property
    def kind(self) -> str:
        if self.type >= ERROR:
            return f"ERROR {self.type - ERROR}"
        return "HEARTBEAT" if self.is_heartbeat else _name(RequestType, self.type)

    @property
    def masked(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]] | None]:
        """Its bytes by key, in order, but for what may differ: of that only the MessagePack format is left."""
        header = [(key, value[:1] if key in MASKED_IN_HEADERS else value) for key, value in self.header.items()]
        if self.body is None:
            return header, None
        return header, [(key, _masked_value(key, value)) for key, value in self.body.items()]

    @property
    def values(self) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        """Kind, header and body, decoded and named, with masks over what may differ."""
        header = {key: value for key, value in self.header.items() if key != Key.REQUEST_TYPE}
        body = (
            None if self.body is None else _named(self.body, MASKED_IN_BODIES, is_named=self.type != RequestType.RAFT)
        )
        return self.kind, _named(header, MASKED_IN_HEADERS), body

    def __str__(self) -> str:
        return shown(self.values)


@dataclass(frozen=True)
class Conversation:
    """One connection: what the server said first, the packets of both sides, and who ended it."""

    name: str
    greeting: bytes
    packets: tuple[Packet, ...]
    was_refused: bool
    """The server ended it with an error. Where the recording ended, servers were stopped, too."""
    start: float
    """By the clock of the scenario's recording."""

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
    """The part of the salt that authentication uses."""
    return base64.b64decode(greeting[64:127].rstrip())[:20]


def scenario(version: str, name: str) -> Path:
    """The directory of a recorded scenario, `files/NODE` in it too."""
    return recorded.HERE / f"tarantool-{version}" / name


def names(version: str, scenario_name: str) -> list[str]:
    """The conversations of a scenario."""
    return sorted(path.name.removesuffix(".idx") for path in scenario(version, scenario_name).glob("*.idx"))


def load(version: str, scenario_name: str, name: str) -> Conversation:
    path = scenario(version, scenario_name) / name
    sides = {side: path.with_name(f"{name}.{side}.bin").read_bytes() for side in ("c2s", "s2c")}
    reads = [json.loads(line) for line in path.with_name(f"{name}.idx").read_text().splitlines()]
    return conversation(name, sides, reads)


def conversation(name: str, sides: dict[str, bytes], reads: Sequence[dict[str, Any]]) -> Conversation:
    """A packet is seen with the read that brought its last byte."""
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
    """The whole packets between two offsets, each with the offset behind it."""
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
    """A packet as real servers and appliers send it."""
    return b"\xce" + len(payload).to_bytes(4, "big") + payload


def decoded(value: bytes) -> Any:
    return _unpacker(value).unpack()


def _unpacker(data: bytes) -> Any:
    # Scrambles travel as strings without being text.
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
    """Where in its source a server raised an error says nothing to anybody else."""
    stack = [
        {key: MASK if key in (STACK_FILE, STACK_LINE) else value for key, value in entry.items()}
        for entry in error[STACK]
    ]
    return {**error, STACK: stack}


def shown(values: tuple[str, dict[str, Any], dict[str, Any] | None]) -> str:
    """A line for people, and for the comparison of two packets."""
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
