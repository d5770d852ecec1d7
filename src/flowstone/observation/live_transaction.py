"""A transaction of the live tail for display: its origin, its rows as text, and its status.

Texts are formatted as by `flowstone cat --format table` and cut to fit a screen; password hashes are hidden. A row may
have any size; a large row is not decoded, only its size is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from flowstone.box.schema import Schema, SpaceDefinition
from flowstone.errors import RemoteProtocolError
from flowstone.history.records import Record, key_names, name_fields
from flowstone.history.secrets import USER_SPACES, hidden_body
from flowstone.iproto.constants import Key, RequestType, type_name
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.observation.report import printable
from flowstone.text.row_table import data_text
from flowstone.text.yaml_rows import yaml_value
from flowstone.xlog.transactions import LogTransaction

ROWS_MAX: Final = 20
DATA_LENGTH_MAX: Final = 500
KEY_LENGTH_MAX: Final = 100
"""Limits of a transaction for display: rows, and characters of a row's data and key."""

BODY_SIZE_MAX: Final = 64 * 1024
"""Bytes of a row above which it is not decoded: its text would be cut anyway."""


class TransactionStatus(StrEnum):
    """The status of a transaction: settled, waiting for its quorum, or rolled back."""

    SETTLED = "settled"
    WAITING = "waiting"
    ROLLED_BACK = "rolled_back"


class LiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row; `space` and `space_id` are None for a control row, such as CONFIRM."""

    type: str
    space: str | None
    space_id: int | None
    lsn: int
    data: str


class LiveTransaction(msgspec.Struct, kw_only=True):
    """At most ROWS_MAX rows of a transaction, and the number of further rows. Only `status` ever changes."""

    replicaset_uuid: str = msgspec.field(name="set")
    replica_id: int
    lsn: int
    tsn: int
    at: float
    """Time of the write in seconds since 1970, by the clock of the sender."""

    status: TransactionStatus
    rows: tuple[LiveRow, ...]
    more_rows: int = 0


class WaitingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a pending transaction: its type, space and key."""

    type: str
    space: str | None
    key: str


def described(
    transaction: LogTransaction, schema: Schema, status: TransactionStatus, *, replicaset_uuid: str = ""
) -> LiveTransaction:
    """Return `transaction` for display, with names from `schema`."""
    return LiveTransaction(
        replicaset_uuid=replicaset_uuid,
        replica_id=transaction.replica_id,
        lsn=transaction.lsn,
        tsn=transaction.tsn,
        at=transaction.timestamp,
        status=status,
        rows=tuple(_live_row(row, schema) for row in transaction.rows[:ROWS_MAX]),
        more_rows=max(0, len(transaction.rows) - ROWS_MAX),
    )


def waiting_rows(transaction: LogTransaction, schema: Schema) -> tuple[WaitingRow, ...]:
    """Return the space and the key of each row of a pending transaction, at most ROWS_MAX."""
    return tuple(_waiting_row(row, schema) for row in transaction.rows[:ROWS_MAX])


def _live_row(row: Row, schema: Schema) -> LiveRow:
    record = _record(row, schema)
    if record is None:
        return LiveRow(type=type_name(row.type), space=None, space_id=None, lsn=row.lsn, data=_size_text(row))
    return LiveRow(
        type=type_name(row.type),
        space=_space_name(record),
        space_id=record.space_id,
        lsn=row.lsn,
        data=_cut(data_text(record), DATA_LENGTH_MAX),
    )


def _waiting_row(row: Row, schema: Schema) -> WaitingRow:
    record = _record(row, schema)
    if record is None:
        return WaitingRow(type=type_name(row.type), space=None, key=_size_text(row))
    return WaitingRow(type=type_name(row.type), space=_space_name(record), key=_cut(_key_text(record), KEY_LENGTH_MAX))


def _record(row: Row, schema: Schema) -> Record | None:
    """Decode a row; None if it is too large or cannot be decoded."""
    if len(row.body) > BODY_SIZE_MAX:
        return None
    try:
        body = unpack_body(row.body)
        space_id = body.get(Key.SPACE_ID) if row.type != RequestType.RAFT else None
        if space_id in USER_SPACES:
            body = unpack_body(hidden_body(row.body, row.type))
    except RemoteProtocolError:
        return None
    space = schema.get(space_id) if isinstance(space_id, int) else None
    return Record(row, body, space, (0, 0))


def _space_name(record: Record) -> str | None:
    if record.space is not None:
        return printable(record.space.name)
    return str(record.space_id) if record.space_id is not None else None


def _key_text(record: Record) -> str:
    """Return the key in the row, or the primary key of its tuple, as text."""
    given = record.body.get(Key.KEY)
    index_id = record.body.get(Key.INDEX_ID, 0)
    if isinstance(given, tuple):
        named = name_fields(key_names(record.space, index_id), given) if record.space is not None else given
        return yaml_value(named)
    values = record.tuple
    if not isinstance(values, tuple) or record.space is None:
        return data_text(record)
    return yaml_value(_primary_key(record.space, values))


def _primary_key(space: SpaceDefinition, values: Sequence[Any]) -> dict[str | int, Any]:
    primary = next((index for index in space.indexes if index.id == 0), None)
    fields = [part.field for part in primary.parts] if primary is not None else [0]
    found = [values[field] if field < len(values) else None for field in fields]
    return name_fields(key_names(space, 0), found)


def _size_text(row: Row) -> str:
    return f"… {len(row.body):,} bytes"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
