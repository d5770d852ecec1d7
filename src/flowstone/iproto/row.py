"""Rows: a header map and a body map, the unit of every log file and replication stream.

`Row` keeps the bytes it was read from, so that a row is passed on unchanged. The header is decoded; the body stays
MessagePack until it is read. Header keys have the order and the omissions of real writers (TYPE, SYNC, REPLICA_ID,
GROUP_ID, LSN, TIMESTAMP, TSN, STREAM_ID, FLAGS; zeros omitted), so an encoded row equals, byte for byte, the row that
a real server would write (`docs/spec/files.md#row-header`).
"""

from __future__ import annotations

from typing import Final

import msgpack
import msgspec

from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.limits import ROW_HEADER_SIZE_MAX

U64 = 1 << 64
# Plain numbers: an enum lookup costs more than the rest of a small row.
COMMIT = Flag.COMMIT.value
NOP = RequestType.NOP.value
_TYPE, _SYNC, _REPLICA_ID, _LSN = Key.REQUEST_TYPE.value, Key.SYNC.value, Key.REPLICA_ID.value, Key.LSN.value
_TIMESTAMP, _SCHEMA_VERSION, _GROUP_ID = Key.TIMESTAMP.value, Key.SCHEMA_VERSION.value, Key.GROUP_ID.value
_TSN, _FLAGS, _STREAM_ID = Key.TSN.value, Key.FLAGS.value, Key.STREAM_ID.value
_UNSIGNED = frozenset((_TYPE, _SYNC, _REPLICA_ID, _LSN, _SCHEMA_VERSION, _GROUP_ID, _TSN, _FLAGS, _STREAM_ID))


class Row(msgspec.Struct, gc=False):
    """One row.

    `tsn` is absolute: the LSN of the transaction's first global row. The only row of a transaction has `tsn == lsn`.
    `flags` always has COMMIT on the last row of a transaction, even if the wire omits it.
    `body` and `raw` (header and body) are MessagePack; `raw` is empty unless the row was decoded.
    """

    type: int
    replica_id: int = 0
    group_id: int = 0
    lsn: int = 0
    timestamp: float = 0.0
    tsn: int = 0
    flags: int = COMMIT
    sync: int = 0
    stream_id: int = 0
    body: bytes = b""
    raw: bytes = b""

    @property
    def is_commit(self) -> bool:
        return bool(self.flags & COMMIT)

    def encode(self) -> bytes:
        """Return the bytes that the row was read from, or otherwise the bytes that a real server would write."""
        return self.raw or encode_header(self) + self.body


class RowError(RemoteProtocolError):
    """The bytes are not a row."""


_pack: Final = msgpack.Packer().pack
"""Compiled: one call for a whole header takes less than Python code for a single number."""


def encode_uint(value: int) -> bytes:
    """Return the shortest MessagePack of an unsigned number."""
    assert value >= 0, f"not an unsigned number: {value}"
    encoded: bytes = _pack(value)
    return encoded


def encode_header(row: Row, *, is_explicit: bool = False) -> bytes:
    """Return the header map of `row`, with the key order and the omissions of real writers.

    `is_explicit` writes TSN and COMMIT even if the row is a transaction of its own. Servers read both forms alike.
    """
    alone = not is_explicit and bool(row.flags & COMMIT) and (row.tsn == 0 or row.tsn == row.lsn)
    flags = row.flags & ~COMMIT if alone else row.flags
    header: dict[int, float] = {_TYPE: row.type}
    if row.sync:
        header[_SYNC] = row.sync
    if row.replica_id:
        header[_REPLICA_ID] = row.replica_id
    if row.group_id:
        header[_GROUP_ID] = row.group_id
    if row.lsn:
        header[_LSN] = row.lsn
    if row.timestamp:
        header[_TIMESTAMP] = float(row.timestamp)
    if not alone:
        header[_TSN] = (row.lsn - row.tsn) % U64
    if row.stream_id:
        header[_STREAM_ID] = row.stream_id
    if flags:
        header[_FLAGS] = flags
    encoded: bytes = _pack(header)
    return encoded


def encode_lone_header(type: int, replica_id: int, lsn: int, timestamp: float, flags: int = 0) -> bytes:
    """Return the same as `encode_header` for a replicated row of this instance that is a transaction of its own.

    None of the numbers is 0, so none is omitted. `flags` are the others besides COMMIT.
    """
    assert replica_id > 0, "a replicated row has an origin"
    assert lsn > 0, "a replicated row has an LSN"
    assert timestamp > 0, "a row of the log has a time"
    header = {_TYPE: type, _REPLICA_ID: replica_id, _LSN: lsn, _TIMESTAMP: float(timestamp)}
    if flags:
        header[_FLAGS] = flags
    encoded: bytes = _pack(header)
    return encoded


def decode_row(data: bytes) -> Row:
    """Return the one row in `data`. Raise RowError if `data` is anything else.

    For rows that arrive one at a time; `iproto/scan.py` reads blocks of rows.
    """
    unpacker = msgpack.Unpacker(strict_map_key=False, raw=True, max_buffer_size=0)
    unpacker.feed(data)
    try:
        header = unpacker.unpack()
        body_at = unpacker.tell()
        row = _row_of_header(header)
        if body_at > ROW_HEADER_SIZE_MAX:
            raise RowError(f"row header of {body_at} bytes is too large: at most {ROW_HEADER_SIZE_MAX} are allowed")
        end = body_at
        if body_at < len(data) and row.type != NOP:
            if not _is_map(data[body_at]):
                raise RowError(f"row body starts with byte 0x{data[body_at]:02x}, which is not a map")
            unpacker.skip()
            end = unpacker.tell()
    except (ValueError, msgpack.exceptions.UnpackException, TypeError) as error:
        raise RowError(f"not a row: {str(error) or type(error).__name__}") from error
    if end != len(data):
        raise RowError(f"{len(data) - end} bytes follow the row")
    row.body = data[body_at:]
    row.raw = data
    return row


def _is_map(byte: int) -> bool:
    return 0x80 <= byte <= 0x8F or byte in (0xDE, 0xDF)


def _row_of_header(header: object) -> Row:
    if not isinstance(header, dict):
        raise RowError(f"row header is {type(header).__name__}, not a map")
    for key, value in header.items():
        if key in _UNSIGNED and (type(value) is not int or value < 0):
            raise RowError(f"row header key 0x{key:02x} is {value!r}, not an unsigned number")
    timestamp = header.get(_TIMESTAMP, 0.0)
    if type(timestamp) is not float:
        raise RowError(f"row header TIMESTAMP is {timestamp!r}, not a float64")
    if _TYPE not in header:
        raise RowError("row header has no request type")
    get = header.get
    lsn = get(_LSN, 0)
    tsn, flags = lsn, get(_FLAGS, 0)
    if _TSN in header:
        tsn = (lsn - header[_TSN]) % U64
    else:
        flags |= COMMIT
    return Row(
        type=header[_TYPE],
        replica_id=get(_REPLICA_ID, 0),
        group_id=get(_GROUP_ID, 0),
        lsn=lsn,
        timestamp=timestamp,
        tsn=tsn,
        flags=flags,
        sync=get(_SYNC, 0),
        stream_id=get(_STREAM_ID, 0),
    )
