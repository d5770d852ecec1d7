"""Replies of a server, byte for byte as the real one's network thread writes them (reference sections 2.2 to 2.4).

Every reply begins with a header of fixed size, so that a batch can be laid out before its bodies are known. Servers
since 2.10 write the schema version in eight bytes (`wide`), older ones in four; clients read both. What a reply
means is decided elsewhere.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from flowstone.iproto.constants import TYPE_ERROR, Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.extensions import ErrorRecord, ErrorStack
from flowstone.iproto.msgpack import error_map, pack
from flowstone.iproto.packet import EMPTY_BODY, frame

HEADER_SIZE = 28
"""Length, type, sync and a schema version of four bytes."""

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
"""Classes of the codes that are not sent as ClientError; 42 carries fields of its own."""


def encode_reply(type: int, sync: int, schema_version: int, body: bytes, wide: bool = False) -> bytes:
    """A reply with any body, a MessagePack map."""
    if wide:
        size = HEADER_SIZE_WIDE - 5 + len(body)
        return _HEADER_WIDE(0xCE, size, 0x8300, 0xCE, type, 0x01CF, sync, 0x05CF, schema_version) + body
    schema_version &= _UINT32_MASK
    size = HEADER_SIZE - 5 + len(body)
    return _HEADER(0xCE, size, 0x8300, 0xCE, type, 0x01CF, sync, 0x05CE, schema_version) + body


def encode_ok(sync: int, schema_version: int, body: bytes = EMPTY_BODY, wide: bool = False) -> bytes:
    """A success with no data, or with a body other than plain data."""
    return encode_reply(0, sync, schema_version, body, wide)


def encode_data(sync: int, schema_version: int, tuples: Sequence[bytes], wide: bool = False) -> bytes:
    """A success with raw MessagePack values: the tuples of a statement, the results of a call."""
    return encode_data_parts(sync, schema_version, len(tuples), b"".join(tuples), wide)


def encode_data_parts(sync: int, schema_version: int, count: int, data: bytes, wide: bool = False) -> bytes:
    """The same for `count` values that are already one piece of bytes."""
    if wide:
        size = HEADER_SIZE_WIDE + 2 + len(data)
        head = _DATA_HEAD_WIDE(0xCE, size, 0x8300, 0xCE, 0, 0x01CF, sync, 0x05CF, schema_version, 0x8130, 0xDD, count)
        return head + data
    schema_version &= _UINT32_MASK
    size = HEADER_SIZE + 2 + len(data)
    return _DATA_HEAD(0xCE, size, 0x8300, 0xCE, 0, 0x01CF, sync, 0x05CE, schema_version, 0x8130, 0xDD, count) + data


def encode_data_with_position(
    sync: int, schema_version: int, tuples: Sequence[bytes], position: bytes, wide: bool = True
) -> bytes:
    """Tuples and the position behind the last of them, for the next page."""
    head = b"\x82\x30\xdd" + len(tuples).to_bytes(4, "big")
    tail = bytes((Key.POSITION,)) + pack(position.decode("ascii"))
    return encode_reply(0, sync, schema_version, b"".join((head, *tuples, tail)), wide)


def encode_error(sync: int, schema_version: int, error: TarantoolError, wide: bool = False) -> bytes:
    """An error: its text for old clients, its stack for those that read it."""
    stack = error.stack if error.stack is not None and error.stack.errors else ErrorStack((error_record(error),))
    body = pack({Key.ERROR_24.value: error.message, Key.ERROR.value: error_map(stack)})
    return encode_reply(TYPE_ERROR | error.code & (TYPE_ERROR - 1), sync, schema_version, body, wide)


def error_record(error: TarantoolError) -> ErrorRecord:
    """What an error looks like in a stack of errors, with the class that the real server gives it."""
    kind, fields = _CLASSES.get(error.code, "ClientError"), {}
    denied = _ACCESS_DENIED.fullmatch(error.message) if error.code == 42 else None
    if denied is not None:
        # 2.6 refuses an AccessDeniedError without these three.
        access, object_type, object_name = denied.groups()
        kind = "AccessDeniedError"
        fields = {"object_type": object_type, "object_name": object_name, "access_type": access}
    elif error.code == 7 and (read_only := _READ_ONLY.fullmatch(error.message)) is not None:
        fields = _why_read_only(read_only.groupdict())
    return ErrorRecord(kind, error.message, _FILE, 0, code=error.code, fields=fields)


def _why_read_only(told: dict[str, str | None]) -> dict[str, Any]:
    """What clients go by to find the instance that can be written to."""
    reason = next(name for name in ("config", "orphan", "election", "synchro") if told[name] is not None)
    fields: dict[str, Any] = {
        "reason": reason,
        "state": told["state"],
        "queue_owner_id": told["queue_owner_id"],
        "term": told["term"] or told["queue_term"],
        "leader_id": told["leader_id"],
        "leader_uuid": told["leader_uuid"],
        "queue_owner_uuid": told["queue_owner_uuid"],
    }
    return {name: _typed(name, value) for name, value in fields.items() if value is not None}


def _typed(name: str, value: str) -> str | int | UUID:
    if name.endswith("_uuid"):
        return UUID(value)
    return int(value) if name.endswith(("_id", "term")) else value


def encode_event(sync: int, key: bytes, value: bytes | None) -> bytes:
    """An EVENT: the MessagePack string `key` and its raw value, None where the key has none."""
    header = pack({Key.REQUEST_TYPE.value: RequestType.EVENT.value, Key.SYNC.value: sync})
    body = bytes((0x81 if value is None else 0x82, Key.EVENT_KEY)) + key
    if value is not None:
        body += bytes((Key.EVENT_DATA,)) + value
    return frame(header + body)
