"""Packets: a length, a header map and a body map; requests to send, responses to read.

`split` cuts received bytes into packets and rejects a packet that is too large by its length, without waiting for it.
Rows of a replication stream are packets too; `row.py` reads their headers.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgpack
import msgspec

from flowstone.errors import LocalProtocolError, RemoteProtocolError
from flowstone.iproto.constants import TYPE_ERROR, Key
from flowstone.iproto.errors import TarantoolError, error_of
from flowstone.iproto.extensions import ErrorStack
from flowstone.iproto.limits import PACKET_SIZE_MAX, ROW_HEADER_SIZE_MAX
from flowstone.iproto.msgpack import MessagePackError, error_stack, unpack_body

EMPTY_BODY = b"\x80"
_STATEMENT: Final = struct.Struct(">BI3sBBBIBBQ").pack
_STATEMENT_HEAD_SIZE: Final = 20
_RESPONSE: Final = struct.Struct(">3sI2sQ2sI")
_RESPONSE_WIDE: Final = struct.Struct(">3sI2sQ2sQ")
_BEFORE_TYPE, _BEFORE_SYNC, _BEFORE_VERSION, _BEFORE_WIDE_VERSION = (
    b"\x83\x00\xce",
    b"\x01\xcf",
    b"\x05\xce",
    b"\x05\xcf",
)

UINT_WIDTHS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""By its first byte: the size of an unsigned number, apart from that byte."""


class PacketError(RemoteProtocolError):
    """The bytes are not a packet, or the packet is larger than the limit."""


class Response(msgspec.Struct, frozen=True, gc=False):
    """One packet from a server. `body` stays MessagePack until it is read."""

    type: int
    sync: int
    schema_version: int
    body: bytes

    @property
    def is_error(self) -> bool:
        return self.type >= TYPE_ERROR

    def values(self) -> dict[int, Any]:
        """Return the decoded body of a success; raise the error of an error packet."""
        if self.is_error:
            raise self.error()
        return unpack_body(self.body)

    def bare_error(self) -> TarantoolError:
        """Return the error of an error packet without a hint: those of the table are for operators of replication."""
        error = self.error()
        error.hint = None
        return error

    def error(self) -> TarantoolError:
        """Return the error of an error packet, with its error stack if the server sent a valid one."""
        body = unpack_body(self.body)
        message = body.get(Key.ERROR_24)
        return error_of(self.type - TYPE_ERROR, message if isinstance(message, str) else "", _stack(body))


def _stack(body: dict[int, Any]) -> ErrorStack | None:
    if Key.ERROR not in body:
        return None
    try:
        return error_stack(body[Key.ERROR])
    except MessagePackError:
        return None  # fall back to code and message, as real clients do


def frame(payload: bytes) -> bytes:
    """Return `payload` (header and body) after its length, which has the fixed width of real senders."""
    if len(payload) > PACKET_SIZE_MAX:
        raise LocalProtocolError(f"packet of {len(payload)} bytes is too large: at most {PACKET_SIZE_MAX} can be sent")
    return b"\xce" + len(payload).to_bytes(4, "big") + payload


def encode_request(
    type: int, sync: int, body: bytes = EMPTY_BODY, *, stream_id: int = 0, schema_version: int = 0
) -> bytes:
    """Return a request packet; `body` is a MessagePack map."""
    header: dict[int, int] = {Key.REQUEST_TYPE.value: type, Key.SYNC.value: sync}
    if schema_version:
        header[Key.SCHEMA_VERSION.value] = schema_version
    if stream_id:
        header[Key.STREAM_ID.value] = stream_id
    return frame(msgpack.packb(header) + body)


def encode_statement(type: int, sync: int, body: bytes, schema_version: int) -> bytes:
    """Return a request packet that a server with another schema version rejects, unless `schema_version` is 0.

    Its header has a fixed size: encoding it takes a fraction of the time of `encode_request`.
    """
    size = _STATEMENT_HEAD_SIZE + len(body)
    if size > PACKET_SIZE_MAX:
        return frame(bytes(_STATEMENT_HEAD_SIZE) + body)  # raises the error
    return _STATEMENT(0xCE, size, b"\x83\x00\xcc", type, 0x01, 0xCE, sync, 0x05, 0xCF, schema_version) + body


def split(buffer: bytes | bytearray, *, size_max: int = PACKET_SIZE_MAX) -> tuple[list[bytes], int]:
    """Return the whole packets in `buffer`, without their lengths, and the offset of the incomplete rest.

    Raise PacketError if `buffer` starts with an invalid length, or with one above `size_max`, before the packet's bytes
    arrive. If whole packets precede such a length, return them; the next call, which starts with the length, raises.
    """
    packets: list[bytes] = []
    at = 0
    while at < len(buffer):
        try:
            start, end = span(buffer, at, size_max)
        except PacketError:
            if packets:
                break
            raise
        if end > len(buffer):
            break
        packets.append(bytes(buffer[start:end]))
        at = end
    return packets, at


def span(buffer: bytes | bytearray, at: int, size_max: int) -> tuple[int, int]:
    """Return the offsets of the packet at `at`, after its length: its start and its end.

    If the packet is incomplete, the end is after the buffer: as far as is known by now. Raise PacketError if there is
    no length, or one above `size_max`.
    """
    try:
        size, start = read_uint(buffer, at)
    except KeyError:
        raise PacketError(f"packet begins with byte 0x{buffer[at]:02x}, which is not a length") from None
    if start > len(buffer):
        return start, start
    if not 0 < size <= size_max:
        raise PacketError(f"packet claims {size} bytes: sizes from 1 to {size_max} are accepted")
    return start, start + size


def read_uint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """Return the unsigned MessagePack number at `at`, and its end offset; the number is wrong if that is after `data`.

    Raise KeyError if another value is there, and IndexError if `at` is the end of `data`.
    """
    head = data[at]
    if head < 0x80:
        return head, at + 1
    end = at + 1 + UINT_WIDTHS[head]
    return int.from_bytes(data[at + 1 : end], "big"), end


def decode_response(packet: bytes) -> Response:
    """Decode the header of a response. The body is decoded and checked only when it is read."""
    # Servers send headers of a fixed size; a struct reads them in a fraction of the time of a decoder.
    if len(packet) >= _RESPONSE_WIDE.size:
        before_type, kind, before_sync, number, before_version, version = _RESPONSE.unpack_from(packet)
        if before_type == _BEFORE_TYPE and before_sync == _BEFORE_SYNC:
            if before_version == _BEFORE_VERSION:
                return Response(kind, number, version, packet[_RESPONSE.size :])
            if before_version == _BEFORE_WIDE_VERSION:
                version = _RESPONSE_WIDE.unpack_from(packet)[5]
                return Response(kind, number, version, packet[_RESPONSE_WIDE.size :])
    unpacker = msgpack.Unpacker(strict_map_key=False, raw=True, max_buffer_size=len(packet), max_map_len=64)
    unpacker.feed(packet[:ROW_HEADER_SIZE_MAX])
    try:
        header = unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise PacketError(f"malformed response header: {str(error) or type(error).__name__}") from error
    if not isinstance(header, dict):
        raise PacketError("response header is not a map")
    type_, sync, schema = (header.get(key, 0) for key in (Key.REQUEST_TYPE, Key.SYNC, Key.SCHEMA_VERSION))
    for value in (type_, sync, schema):
        if type(value) is not int or value < 0:
            raise PacketError(f"response header has {value!r} where a number is expected")
    if Key.REQUEST_TYPE not in header:
        raise PacketError("response header has no request type")
    return Response(type_, sync, schema, packet[unpacker.tell() :])
