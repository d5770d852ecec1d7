"""Requests of clients: one packet decoded to type, header numbers and body fields, with the checks of a real server.

Values stay MessagePack bytes; only their type is checked, so a field that must be an array is an array. A packet that
violates a rule becomes a request with an `error`, the reply to it: the sync is known, and the connection stays open.
`row.py` reads the rows of a replication stream, `request_scan.py` batches of requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
import msgspec

from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType, type_name
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.packet import UINT_WIDTHS, read_uint

DML_TYPES = frozenset({1, 2, 3, 4, 5, 9})
STREAM_TYPES = frozenset({RequestType.BEGIN, RequestType.COMMIT, RequestType.ROLLBACK})

UINT, STRING, ARRAY, MAP, BOOLEAN, DOUBLE, ANY = "uint", "str", "array", "map", "bool", "double", "any"

_HEADS: dict[str, bytes] = {
    UINT: bytes((*range(0x80), *range(0xCC, 0xD0))),
    STRING: bytes((*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB)),
    ARRAY: bytes((*range(0x90, 0xA0), 0xDC, 0xDD)),
    MAP: bytes((*range(0x80, 0x90), 0xDE, 0xDF)),
    BOOLEAN: b"\xc2\xc3",
    DOUBLE: b"\xcb",
    ANY: bytes(range(256)),
}
"""First bytes of each kind of value. As in a real server, an integer in a signed encoding is not a UINT."""

_KINDS_2_6: dict[int, str] = {
    **dict.fromkeys(range(0x20), UINT),
    0x04: DOUBLE,
    **dict.fromkeys((0x20, 0x21, 0x28), ARRAY),
    **dict.fromkeys((0x22, 0x23, 0x24, 0x25, 0x27), STRING),
    **dict.fromkeys((0x26, 0x29, 0x2A, 0x2B), MAP),
}
_KINDS: dict[int, str] = {
    **_KINDS_2_6,
    0x1F: BOOLEAN,
    **dict.fromkeys((0x2C, 0x2D, 0x2F, 0x30, 0x32, 0x33, 0x41, 0x51, 0x55), ARRAY),
    **dict.fromkeys((0x2E, 0x31, 0x35, 0x40, 0x57, 0x5B, 0x5E, 0x5F), STRING),
    **dict.fromkeys((0x34, 0x43, 0x53, 0x54, 0x59, 0x5A), UINT),
    **dict.fromkeys((0x42, 0x52), MAP),
    0x50: BOOLEAN,
    0x56: DOUBLE,
    0x58: ANY,
}
_DML_KEYS_2_6 = (0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x20, 0x21, 0x28, 0x2A)
_HEADER_KEY_END_2_6 = 0x53
"""2.6 rejects a header with this key or a higher one; newer servers skip unknown keys."""


def _table(kinds: dict[int, str]) -> dict[int, bytes]:
    """Return, for each key, a table indexed by the first byte of a value: 1 if the value has the key's kind."""
    return {key: bytes(int(head in _HEADS[kind]) for head in range(256)) for key, kind in kinds.items()}


_ACCEPTED = _table(_KINDS)
_ACCEPTED_DML_2_6 = _table({key: _KINDS_2_6[key] for key in _DML_KEYS_2_6})
_ACCEPTED_CALL = _table({0x22: STRING, 0x27: STRING, 0x21: ARRAY})
_ACCEPTED_AUTH = _table({0x23: STRING, 0x21: ARRAY})
_ACCEPTED_TRANSACTION = _table(_KINDS | {0x61: BOOLEAN})
"""With IS_SYNC of 3.x. Older servers ignore it; here every dialect with transactions accepts it."""

_REQUIRED: dict[int, tuple[int, ...]] = {
    RequestType.SELECT.value: (0x10, 0x12, 0x20),
    RequestType.INSERT.value: (0x10, 0x21),
    RequestType.REPLACE.value: (0x10, 0x21),
    RequestType.UPDATE.value: (0x10, 0x20, 0x21),
    RequestType.DELETE.value: (0x10, 0x20),
    RequestType.UPSERT.value: (0x10, 0x21, 0x28),
    RequestType.CALL_16.value: (0x22,),
    RequestType.CALL.value: (0x22,),
    RequestType.EVAL.value: (0x27,),
    RequestType.AUTH.value: (0x23, 0x21),
}
"""Types whose body is decoded, with their required keys in the order in which a real server reports missing ones."""

_REQUIRED_BY_NEWER: dict[int, tuple[int, ...]] = {
    RequestType.BEGIN.value: (),
    RequestType.COMMIT.value: (),
    RequestType.ID.value: (),
    RequestType.WATCH.value: (0x57,),
    RequestType.UNWATCH.value: (0x57,),
    RequestType.WATCH_ONCE.value: (0x57,),
}


class _Rule(NamedTuple):
    """The checks on the body of one type: the kinds of its values, the required keys."""

    accepted: dict[int, bytes]
    required: tuple[int, ...]
    may_be_empty: bool
    skips_odd_keys: bool


def _rule(type: int, required: tuple[int, ...], dml: dict[int, bytes]) -> _Rule:
    is_dml = type in DML_TYPES
    if is_dml:
        accepted = dml
    elif type == RequestType.AUTH:
        accepted = _ACCEPTED_AUTH
    elif type in STREAM_TYPES:
        accepted = _ACCEPTED_TRANSACTION
    else:
        accepted = _ACCEPTED_CALL if type in _REQUIRED else _ACCEPTED
    return _Rule(accepted, required, is_dml or type in STREAM_TYPES, is_dml)


_RULES_2_6 = {type: _rule(type, required, _ACCEPTED_DML_2_6) for type, required in _REQUIRED.items()}
_RULES = {type: _rule(type, keys, _ACCEPTED) for type, keys in (_REQUIRED | _REQUIRED_BY_NEWER).items()}

_KEY_NAMES: dict[int, str] = {
    0x10: "space id",
    0x12: "limit",
    0x20: "key",
    0x21: "tuple",
    0x22: "function name",
    0x23: "user name",
    0x27: "expression",
    0x28: "operations",
    0x57: "event key",
}

_BODY = msgspec.msgpack.Decoder(dict[int, msgspec.Raw])
_VALUE = msgspec.msgpack.Decoder(msgspec.Raw)


class Request(msgspec.Struct, gc=False):
    """One request. `fields` holds the raw values of its body by key; `error` is the reply to an invalid request.

    `body` is the whole body of a request whose fields are not decoded here, such as the requests of replicas.
    """

    type: int
    sync: int
    schema_version: int
    stream_id: int
    fields: dict[int, bytes]
    error: TarantoolError | None = None
    body: bytes = b""

    def uint(self, key: int, default: int = 0) -> int:
        """Return an unsigned field, whose type the decoder has checked."""
        raw = self.fields.get(key)
        return default if raw is None else decode_uint(raw)

    def text(self, key: int) -> str:
        """Return a string field."""
        return decode_text(self.fields[key])


def decode_uint(raw: bytes) -> int:
    """Return the number in the MessagePack of an unsigned integer."""
    return read_uint(raw, 0)[0]


def decode_text(raw: bytes) -> str:
    """Return the text in the MessagePack of a string; bytes that are not UTF-8 become surrogates."""
    head = raw[0]
    start = 1 if head < 0xC0 else 2 if head == 0xD9 else 3 if head == 0xDA else 5
    return raw[start:].decode("utf-8", "surrogateescape")


def split_map(body: bytes) -> dict[int, bytes]:
    """Return the raw values of a MessagePack map by key, without keys that are not numbers.

    Raise ValueError if `body` is not a map.
    """
    if not body or body[0] not in _HEADS[MAP]:
        raise ValueError("not a map")
    try:
        try:
            return {key: bytes(raw) for key, raw in _BODY.decode(body).items()}
        except msgspec.ValidationError:
            return _walk(body, {})
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decode_request(packet: bytes, *, is_2_6: bool = False) -> Request:
    """Decode `packet` (without its length). `is_2_6` applies the rules of 2.6, which has no streams."""
    type = sync = schema_version = stream_id = 0
    try:
        count = packet[0] - 0x80
        if not 0 <= count <= 0x0F:
            return _decode_odd(packet, is_2_6)
        at = 1
        for _ in range(count):
            key = packet[at]
            value = packet[at + 1]
            at += 2
            if value >= 0x80:
                start = at
                at += UINT_WIDTHS[value]
                value = int.from_bytes(packet[start:at], "big")
            if key == 0:
                type = value
            elif key == 1:
                sync = value
            elif key == 5:
                schema_version = value
            elif key == 10:
                stream_id = value
            else:
                return _decode_odd(packet, is_2_6)
    except (KeyError, IndexError):
        return _decode_odd(packet, is_2_6)
    if at > len(packet):
        return _decode_odd(packet, is_2_6)
    return _with_body(type, sync, schema_version, stream_id, packet[at:], is_2_6)


def _with_body(type: int, sync: int, schema_version: int, stream_id: int, body: bytes, is_2_6: bool) -> Request:
    if is_2_6:
        type &= 0xFF  # 2.6 uses only the lowest byte
        stream_id = 0
        rule = _RULES_2_6.get(type)
    else:
        rule = _RULES.get(type)
    try:
        if stream_id or rule is None or type in STREAM_TYPES:
            if body:
                _VALUE.decode(body)
                if type == RequestType.NOP:
                    raise ValueError("NOP has a body")
            if not is_2_6:
                _check_stream(type, stream_id)
            if rule is None:
                return Request(type, sync, schema_version, stream_id, {}, None, body)
        return Request(type, sync, schema_version, stream_id, _fields(rule, body, is_2_6))
    except TarantoolError as error:
        return Request(type, sync, schema_version, stream_id, {}, error)
    except (ValueError, RecursionError):
        broken = errors.InvalidMsgpack("Invalid MsgPack - packet body")
        return Request(type, sync, schema_version, stream_id, {}, broken)


def _check_stream(type: int, stream_id: int) -> None:
    """Reject requests of streams outside a stream, and requests of the connection inside one."""
    if stream_id == 0:
        if type in STREAM_TYPES:
            raise errors.UnableToProcessOutOfStream(f"Unable to process {type_name(type)} request out of stream")
    elif type == RequestType.AUTH or (type > RequestType.INSERT_ARROW and type != RequestType.PING):
        raise errors.UnableToProcessInStream(f"Unable to process {type_name(type)} request in stream")


def _fields(rule: _Rule, body: bytes, is_2_6: bool) -> dict[int, bytes]:
    """Return the values of the body by key; raise an error if a value has the wrong kind or a key is missing."""
    accepted, required, may_be_empty, skips_odd_keys = rule
    if not body and not may_be_empty:
        raise errors.InvalidMsgpack("Invalid MsgPack - missing request body")
    fields = {}
    try:
        for key, raw in _BODY.decode(body).items() if body else ():
            value = bytes(raw)
            table = accepted.get(key)
            if table is not None and not table[value[0]]:
                raise errors.InvalidMsgpack("Invalid MsgPack - packet body")
            fields[key] = value
    except msgspec.ValidationError:
        if not skips_odd_keys:
            raise
        fields = _walk(body, accepted)
    for key in required:
        if key not in fields and (key != 0x10 or is_2_6 or 0x5E not in fields):
            raise errors.MissingRequestField(f"Missing mandatory field '{_KEY_NAMES[key]}' in request")
    return fields


def _walk(body: bytes, accepted: dict[int, bytes]) -> dict[int, bytes]:
    """Split a body in which some keys are not numbers; skip those keys, as a real server does for statements."""
    _VALUE.decode(body)
    unpacker: Any = msgpack.Unpacker(max_buffer_size=len(body))
    unpacker.feed(body)
    fields: dict[int, bytes] = {}
    for _ in range(unpacker.read_map_header()):
        start = unpacker.tell()
        unpacker.skip()
        middle = unpacker.tell()
        unpacker.skip()
        if body[start] in _HEADS[UINT]:
            key = decode_uint(body[start:middle])
            if key in accepted and not accepted[key][body[middle]]:
                raise errors.InvalidMsgpack("Invalid MsgPack - packet body")
            fields[key] = body[middle : unpacker.tell()]
    return fields


def _decode_odd(packet: bytes, is_2_6: bool) -> Request:
    """Decode key by key a header with unusual keys or widths, or a malformed one."""
    found: dict[int, int] = {}
    try:
        end = _read_header(packet, found, is_2_6)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        error = errors.InvalidMsgpack("Invalid MsgPack - packet header")
        return Request(found.get(0, 0), found.get(1, 0), found.get(5, 0), found.get(10, 0), {}, error)
    return _with_body(found.get(0, 0), found.get(1, 0), found.get(5, 0), found.get(10, 0), packet[end:], is_2_6)


def _read_header(packet: bytes, found: dict[int, int], is_2_6: bool) -> int:
    """Fill `found` with the numbers of a header, up to the first invalid one; return the end offset of the header."""
    unpacker: Any = msgpack.Unpacker(max_buffer_size=len(packet), strict_map_key=False)
    unpacker.feed(packet)
    unpacker.skip()
    end: int = unpacker.tell()
    unpacker = msgpack.Unpacker(max_buffer_size=len(packet), strict_map_key=False)
    unpacker.feed(packet[:end])
    for _ in range(unpacker.read_map_header()):
        if packet[unpacker.tell()] not in _HEADS[UINT]:
            raise ValueError("header key is not a number")
        key = unpacker.unpack()
        at = unpacker.tell()
        if (is_2_6 and key >= _HEADER_KEY_END_2_6) or (key in _ACCEPTED and not _ACCEPTED[key][packet[at]]):
            raise ValueError("unknown header key, or value of the wrong kind")
        unpacker.skip()
        if _KINDS.get(key) == UINT:
            found[key] = decode_uint(packet[at : unpacker.tell()])
    return end
