"""A reply in a form that can be compared between servers: field by field, tuples byte by byte.

Values that may differ are omitted: sync, schema version, the source location in an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from flowstone.iproto.constants import TYPE_ERROR, Key
from flowstone.iproto.msgpack import MessagePackError, error_stack, unpack
from flowstone.iproto.packet import decode_response

# In the text of error 109 the real server swaps its own version and that of the request.
_SCHEMA_VERSIONS = re.compile(r"current: \d+, in request: \d+")


@dataclass(frozen=True)
class ErrorEntry:
    """One error of a stack; `keys` are the keys of its map, in order."""

    type: str
    message: str
    errno: int
    code: int
    fields: tuple[tuple[str, Any], ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """One reply. `header` has each key with the width of its value; `rest` is the body without DATA."""

    code: int = 0  # 0 is a success
    message: str = ""
    stack: tuple[ErrorEntry, ...] = ()
    data: tuple[bytes, ...] | None = None
    rest: tuple[tuple[int, bytes], ...] = ()
    header: tuple[tuple[int, int], ...] = ()
    is_closed: bool = False

    def __str__(self) -> str:
        if self.is_closed:
            return "connection closed"
        if self.code:
            return f"error {self.code} {self.message!r} {'; '.join(map(str, self.stack))}"
        shown = "no data" if self.data is None else ", ".join(map(_show, self.data))
        return f"OK [{shown}]" + "".join(f" {key:#x}: {_show(value)}" for key, value in self.rest)


CLOSED = Reply(is_closed=True)


def read_reply(packet: bytes) -> Reply:
    response = decode_response(packet)
    header = tuple((key, len(value)) for key, value in _items(packet[: len(packet) - len(response.body)]))
    body = dict(_items(response.body))
    if response.is_error:
        message = unpack(body.pop(Key.ERROR_24))
        stack = tuple(_stack(body.pop(Key.ERROR, b"")))
        code = response.type - TYPE_ERROR
        return Reply(code, _SCHEMA_VERSIONS.sub("…", message), stack, None, tuple(body.items()), header)
    data = body.pop(Key.DATA, None)
    tuples = None if data is None else tuple(_elements(data))
    return Reply(response.type, "", (), tuples, tuple(body.items()), header)


def _items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Return the keys of a map with the bytes of their values."""
    unpacker = msgpack.Unpacker(raw=True, strict_map_key=False)
    unpacker.feed(data)
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        start = unpacker.tell()
        unpacker.skip()
        yield key, data[start : unpacker.tell()]


def _elements(data: bytes) -> Iterator[bytes]:
    """Return the bytes of each element of an array."""
    unpacker = msgpack.Unpacker(raw=True, strict_map_key=False)
    unpacker.feed(data)
    for _ in range(unpacker.read_array_header()):
        start = unpacker.tell()
        unpacker.skip()
        yield data[start : unpacker.tell()]


def _stack(data: bytes) -> Iterator[ErrorEntry]:
    if not data:
        return
    for entry, found in zip(unpack(data)[0], error_stack(unpack(data)).errors, strict=True):
        message = _SCHEMA_VERSIONS.sub("…", found.message)
        yield ErrorEntry(found.type, message, found.errno, found.code, tuple(found.fields.items()), tuple(entry))


def _show(data: bytes) -> str:
    try:
        return repr(unpack(data))
    except MessagePackError:
        return data.hex()
