"""Replies of a server, byte for byte as the network thread of a real server writes them.

Layouts: `docs/spec/iproto.md#fixed-headers`, `docs/spec/iproto.md#responses`, `docs/spec/iproto.md#error-bodies`.
Every reply begins with a header of fixed size, so that a batch can be laid out before its bodies are known. Servers
since 2.10 write the schema version in eight bytes (`wide`), older ones in four; clients read both. Nothing here
decides what to reply.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from flowstone.iproto.constants import TYPE_ERROR, TYPE_PUSH, Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.extensions import ErrorRecord, ErrorStack
from flowstone.iproto.msgpack import error_map, pack
from flowstone.iproto.packet import EMPTY_BODY, frame

HEADER_SIZE = 28
"""Bytes of the length, type, sync and a schema version of four bytes."""

HEADER_SIZE_WIDE = 32

_HEADER = struct.Struct(">BIHBIHQHI").pack
_HEADER_WIDE = struct.Struct(">BIHBIHQHQ").pack
_DATA_HEAD = struct.Struct(">BIHBIHQHIHBI").pack
_DATA_HEAD_WIDE = struct.Struct(">BIHBIHQHQHBI").pack
_UINT32_MASK = 0xFFFF_FFFF

_ACCESS_DENIED = re.compile(r"(\S+) access to (.+?) '(.*)' is denied for user '.*'", re.DOTALL)
_READ_ONLY = re.compile(
    r"Can't modify data on a read-only instance - (?:"
    r"(?P<config>box\.cfg\.read_only is true)|(?P<orphan>it is an orphan)|"
    r"(?P<election>state is election (?P<state>\w+) with term (?P<term>\d+)"
    r"(?:, leader is (?P<leader_id>\d+)(?: \((?P<leader_uuid>[0-9a-f-]{36})\))?)?)|"
    r"(?P<synchro>synchro queue with term (?P<queue_term>\d+) belongs to (?P<queue_owner_id>\d+)"
    r"(?: \((?P<queue_owner_uuid>[0-9a-f-]{36})\))?(?: and is frozen .*)?))"
)
_FILE = "flowstone"
_CLASSES = {2: "OutOfMemory", 32: "LuajitError", 115: "SystemError", 150: "CollationError", 219: "XlogGapError"}
"""Classes of the codes that are not sent as ClientError, except 42, whose fields `error_record` adds."""


def encode_reply(type: int, sync: int, schema_version: int, body: bytes, wide: bool = False) -> bytes:
    """Return a reply with any body, a MessagePack map."""
    if wide:
        size = HEADER_SIZE_WIDE - 5 + len(body)
        return _HEADER_WIDE(0xCE, size, 0x8300, 0xCE, type, 0x01CF, sync, 0x05CF, schema_version) + body
    schema_version &= _UINT32_MASK
    size = HEADER_SIZE - 5 + len(body)
    return _HEADER(0xCE, size, 0x8300, 0xCE, type, 0x01CF, sync, 0x05CE, schema_version) + body


def encode_ok(sync: int, schema_version: int, body: bytes = EMPTY_BODY, wide: bool = False) -> bytes:
    """Return a success without data, or with a body other than plain data."""
    return encode_reply(0, sync, schema_version, body, wide)


def encode_data(sync: int, schema_version: int, tuples: Sequence[bytes], wide: bool = False) -> bytes:
    """Return a success with raw MessagePack values: the tuples of a statement, the results of a call."""
    return encode_data_parts(sync, schema_version, len(tuples), b"".join(tuples), wide)


def encode_data_parts(sync: int, schema_version: int, count: int, data: bytes, wide: bool = False) -> bytes:
    """Like `encode_data`, for `count` values that are already joined in `data`."""
    if wide:
        size = HEADER_SIZE_WIDE + 2 + len(data)
        head = _DATA_HEAD_WIDE(0xCE, size, 0x8300, 0xCE, 0, 0x01CF, sync, 0x05CF, schema_version, 0x8130, 0xDD, count)
        return head + data
    schema_version &= _UINT32_MASK
    size = HEADER_SIZE + 2 + len(data)
    return _DATA_HEAD(0xCE, size, 0x8300, 0xCE, 0, 0x01CF, sync, 0x05CE, schema_version, 0x8130, 0xDD, count) + data


def encode_push(sync: int, schema_version: int, value: bytes, wide: bool = False) -> bytes:
    """Return a message of `box.session.push()`, which precedes the reply: one raw MessagePack value."""
    return encode_reply(TYPE_PUSH, sync, schema_version, b"\x81\x30\xdd\x00\x00\x00\x01" + value, wide)


def encode_data_with_position(
    sync: int, schema_version: int, tuples: Sequence[bytes], position: bytes, wide: bool = True
) -> bytes:
    """Return a success with tuples and the position after the last of them, where the next page begins."""
    head = b"\x82\x30\xdd" + len(tuples).to_bytes(4, "big")
    tail = bytes((Key.POSITION,)) + pack(position.decode("ascii"))
    return encode_reply(0, sync, schema_version, b"".join((head, *tuples, tail)), wide)


def encode_error(sync: int, schema_version: int, error: TarantoolError, wide: bool = False) -> bytes:
    """Return an error reply: the message for old clients, the error stack for newer ones."""
    stack = error.stack if error.stack is not None and error.stack.errors else ErrorStack((error_record(error),))
    body = pack({Key.ERROR_24.value: error.message, Key.ERROR.value: error_map(stack)})
    return encode_reply(TYPE_ERROR | error.code & (TYPE_ERROR - 1), sync, schema_version, body, wide)


def error_record(error: TarantoolError) -> ErrorRecord:
    """Return `error` as an entry of an error stack, with the class that a real server gives it."""
    kind, fields = _CLASSES.get(error.code, "ClientError"), {}
    denied = _ACCESS_DENIED.fullmatch(error.message) if error.code == 42 else None
    if denied is not None:
        # 2.6 rejects an AccessDeniedError without these three fields.
        access, object_type, object_name = denied.groups()
        kind = "AccessDeniedError"
        fields = {"object_type": object_type, "object_name": object_name, "access_type": access}
    elif error.code == 7 and (read_only := _READ_ONLY.fullmatch(error.message)) is not None:
        fields = _why_read_only(read_only.groupdict())
    return ErrorRecord(kind, error.message, _FILE, 0, code=error.code, fields=fields)


def _why_read_only(found: dict[str, str | None]) -> dict[str, Any]:
    """Return the fields by which clients find the writable instance."""
    reason = next(name for name in ("config", "orphan", "election", "synchro") if found[name] is not None)
    fields: dict[str, Any] = {
        "reason": reason,
        "state": found["state"],
        "queue_owner_id": found["queue_owner_id"],
        "term": found["term"] or found["queue_term"],
        "leader_id": found["leader_id"],
        "leader_uuid": found["leader_uuid"],
        "queue_owner_uuid": found["queue_owner_uuid"],
    }
    return {name: _typed(name, value) for name, value in fields.items() if value is not None}


def _typed(name: str, value: str) -> str | int | UUID:
    if name.endswith("_uuid"):
        return UUID(value)
    return int(value) if name.endswith(("_id", "term")) else value


def encode_event(sync: int, key: bytes, value: bytes | None) -> bytes:
    """Return an EVENT with the MessagePack string `key` and its raw value; None if the key has no value."""
    header = pack({Key.REQUEST_TYPE.value: RequestType.EVENT.value, Key.SYNC.value: sync})
    body = bytes((0x81 if value is None else 0x82, Key.EVENT_KEY)) + key
    if value is not None:
        body += bytes((Key.EVENT_DATA,)) + value
    return frame(header + body)
