"""Rows of a Tsurugi table as Arrow columns, decoded in bulk by `row_kernels.py`.

Pure: spans of keys and values in, record batches out. `row_reader.py` is the readable twin, and words the reason why a
row does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flowstone.iproto.scan import Bytes, Cells
from flowstone.limestone.errors import BadRow
from flowstone.limestone.tsurugi import row_kernels as kernels
from flowstone.limestone.tsurugi.definitions import SqlTable, SqlType, TypeName
from flowstone.limestone.tsurugi.row_layout import FIXED, LAYOUT_LINES, SIZED, TEXT, Layout
from flowstone.limestone.tsurugi.row_reader import DAY_NANOSECONDS, read_key, read_row

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1
OFFSET_MAX: Final = (1 << 31) - 1
SECONDS_MAX: Final = INT64_MAX // 1_000_000 - 1
"""The largest number of seconds that fits a timestamp in microseconds."""

EXACT_POINT: Final = pa.struct([pa.field("seconds", pa.int64()), pa.field("nanoseconds", pa.int64())])
"""The type of timestamps in exact columns: seconds since 1970, and nanoseconds after them."""

_MOMENT: Final = pa.timestamp("us")
_ARROW: Final = {
    TypeName.BOOLEAN: pa.bool_(),
    TypeName.INT1: pa.int8(),
    TypeName.INT2: pa.int16(),
    TypeName.INT4: pa.int32(),
    TypeName.INT8: pa.int64(),
    TypeName.FLOAT4: pa.float32(),
    TypeName.FLOAT8: pa.float64(),
    TypeName.CHARACTER: pa.string(),
    TypeName.OCTET: pa.binary(),
    TypeName.DATE: pa.date32(),
    TypeName.TIME: pa.time64("ns"),
    TypeName.TIME_WITH_ZONE: pa.time64("ns"),
    TypeName.TIMESTAMP: _MOMENT,
    TypeName.TIMESTAMP_WITH_ZONE: pa.timestamp("us", tz="UTC"),
    TypeName.BLOB: pa.int64(),
    TypeName.CLOB: pa.int64(),
}
_POINTS: Final = (TypeName.TIMESTAMP, TypeName.TIMESTAMP_WITH_ZONE)
_RANGES: Final = {
    TypeName.BOOLEAN: (0, 1),
    TypeName.INT1: (-(1 << 7), (1 << 7) - 1),
    TypeName.INT2: (-(1 << 15), (1 << 15) - 1),
    TypeName.INT4: (-(1 << 31), (1 << 31) - 1),
    TypeName.INT8: (INT64_MIN, INT64_MAX),
    TypeName.DATE: (-(1 << 31), (1 << 31) - 1),
    TypeName.TIME: (0, DAY_NANOSECONDS - 1),
    TypeName.TIME_WITH_ZONE: (0, DAY_NANOSECONDS - 1),
}
_SIZES: Final = {
    TypeName.BOOLEAN: 1,
    TypeName.INT1: 4,
    TypeName.INT2: 4,
    TypeName.INT4: 4,
    TypeName.FLOAT4: 4,
    TypeName.TIMESTAMP: 12,
    TypeName.TIMESTAMP_WITH_ZONE: 12,
}


def arrow_type(kind: SqlType) -> pa.DataType:
    """Return the type of a column: timestamps have microseconds, times nanoseconds, and blobs are ids."""
    if kind.name is TypeName.DECIMAL:
        return pa.decimal128(kind.precision, kind.scale)
    return _ARROW[kind.name]


class RowSpans(NamedTuple):
    """Entries in a buffer: where their keys and values are. `value_at` of -1 is a removed row, which has no value."""

    buf: Bytes
    key_at: Cells
    key_end: Cells
    value_at: Cells
    value_end: Cells


@dataclass(frozen=True)
class DecodedRows:
    """Rows as columns, and the numbers of the rows that do not fit, whose columns mean nothing."""

    batch: pa.RecordBatch
    unfit: Cells


class RowColumns:
    """Decoder for the rows of one table.

    `partial`: entries may be removals, of which only the primary key is known, so every column is nullable.
    `exact`: timestamps are of type EXACT_POINT, which has every value that Tsurugi has.
    """

    def __init__(self, table: SqlTable, *, partial: bool = False, exact: bool = False) -> None:
        self.table = table
        self._is_partial = partial
        self._is_exact = exact

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema(
            [
                pa.field(each.name, self._arrow_type(each.type), self._is_partial or each.is_nullable)
                for each in self.table.columns
            ]
        )

    def _arrow_type(self, kind: SqlType) -> pa.DataType:
        return EXACT_POINT if self._is_exact and kind.name in _POINTS else arrow_type(kind)

    def decode(self, spans: RowSpans) -> DecodedRows:
        """Return the rows of entries, in order."""
        count, columns = len(spans.key_at), len(self.table.columns)
        begins: Cells = np.full((columns, count), -1, np.int64)
        finishes: Cells = np.full((columns, count), -1, np.int64)
        bad: Bytes = np.zeros(count, np.uint8)
        keys, values = self._layouts
        kernels.split_rows(spans.buf, spans.key_at, spans.key_end, keys, begins, finishes, bad)
        kernels.split_rows(spans.buf, spans.value_at, spans.value_end, values, begins, finishes, bad)
        arrays = [
            _column(each.type, mask, _Field(spans.buf, begins[place], finishes[place], bad, self._is_exact))
            for place, (each, mask) in enumerate(zip(self.table.columns, self._masks, strict=True))
        ]
        unfit = np.flatnonzero(bad)
        schema = self.schema
        if len(unfit):  # their columns may be null
            schema = pa.schema([each.with_nullable(True) for each in schema])
        struct = pa.Array.from_buffers(pa.struct(schema), count, [None], children=arrays)
        return DecodedRows(pa.RecordBatch.from_struct_array(struct), unfit)

    def decode_all(self, spans: RowSpans) -> pa.RecordBatch:
        """Return the rows of entries. Raise BadRow, with key and reason, if one does not fit."""
        found = self.decode(spans)
        if len(found.unfit):
            raise self.unfit_error(spans, int(found.unfit[0]))
        return found.batch

    def unfit_error(self, spans: RowSpans, row: int) -> BadRow:
        """Return the error for a row that does not fit."""
        buf, key_at, key_end, value_at, value_end = spans
        key = buf[key_at[row] : key_end[row]].tobytes()
        reason = "a value is out of the range of its column's Arrow type, or a text is not UTF-8"
        try:
            if value_at[row] < 0:
                read_key(self.table, key)
            else:
                read_row(self.table, key, buf[value_at[row] : value_end[row]].tobytes())
        except BadRow as error:
            reason = error.message
        return BadRow(
            f"table {self.table.name!r}, row with key x'{key.hex()}': {reason}",
            hint="read the table raw, with its storage id",
        )

    @cached_property
    def _masks(self) -> list[int]:
        """The mask over the bytes of each column. Only ascending key columns are not inverted."""
        ascending = {part.column for part in self.table.keys if not part.is_descending}
        return [0 if place in ascending else 0xFF for place in range(len(self.table.columns))]

    @cached_property
    def _layouts(self) -> tuple[Layout, Layout]:
        return self._layout([part.column for part in self.table.keys]), self._layout(list(self.table.values))

    def _layout(self, places: list[int]) -> Layout:
        found: Layout = np.zeros((LAYOUT_LINES, len(places)), np.int64)
        for number, place in enumerate(places):
            column = self.table.columns[place]
            form, size = _form(column.type)
            found[:, number] = form, size, self._masks[place], column.is_nullable, place
        return found


def _form(kind: SqlType) -> tuple[int, int]:
    if kind.name is TypeName.CHARACTER:
        return TEXT, 0
    if kind.name is TypeName.OCTET:
        return (SIZED, 0) if kind.varying else (FIXED, kind.length or 0)
    if kind.name is TypeName.DECIMAL:
        return FIXED, kind.decimal_size
    return FIXED, _SIZES.get(kind.name, 8)


# --- columns ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    """One field of all rows."""

    buf: Bytes
    begins: Cells
    finishes: Cells
    bad: Bytes
    is_exact: bool

    def room(self, dtype: Any, width: int = 1) -> tuple[Any, Bytes]:
        """Return arrays for values and for flags of validity."""
        return np.empty(width * len(self.begins), dtype), np.empty(len(self.begins), np.uint8)


def _column(kind: SqlType, mask: int, field: _Field) -> pa.Array:
    match kind.name:
        case TypeName.CHARACTER | TypeName.OCTET:
            return _texts(arrow_type(kind), mask, field)
        case TypeName.DECIMAL:
            return _decimals(kind, mask, field)
        case TypeName.FLOAT4 | TypeName.FLOAT8:
            return _floats(kind, mask, field)
        case TypeName.TIMESTAMP | TypeName.TIMESTAMP_WITH_ZONE:
            return _points(kind, mask, field)
        case TypeName.BLOB | TypeName.CLOB:
            out, valid = field.room(np.int64)
            nulls = kernels.lob_column(field.buf, field.begins, mask, out, valid, field.bad)
            return _fixed(pa.int64(), out, valid, nulls)
    return _integers(kind, mask, field)


def _fixed(kind: pa.DataType, out: NDArray[Any], valid: Bytes, nulls: int) -> pa.Array:
    return pa.Array.from_buffers(kind, len(valid), [_bitmap(valid, nulls), pa.py_buffer(out)], null_count=nulls)


def _bitmap(valid: Bytes, nulls: int) -> pa.Buffer | None:
    return pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None


def _integers(kind: SqlType, mask: int, field: _Field) -> pa.Array:
    out, valid = field.room(np.int64)
    least, most = _RANGES[kind.name]
    size = _SIZES.get(kind.name, 8)
    nulls = kernels.integer_column(field.buf, field.begins, size, mask, least, most, out, valid, field.bad)
    arrow = arrow_type(kind)
    if kind.name is TypeName.BOOLEAN:
        return _fixed(arrow, np.packbits(out.astype(np.uint8), bitorder="little"), valid, nulls)
    return _fixed(arrow, out if arrow.bit_width == 64 else out.astype(f"i{arrow.bit_width // 8}"), valid, nulls)


def _floats(kind: SqlType, mask: int, field: _Field) -> pa.Array:
    out, valid = field.room(np.uint64)
    is_short = kind.name is TypeName.FLOAT4
    nulls = kernels.float_column(field.buf, field.begins, 4 if is_short else 8, mask, out, valid, field.bad)
    return _fixed(arrow_type(kind), out.astype(np.uint32) if is_short else out, valid, nulls)


def _decimals(kind: SqlType, mask: int, field: _Field) -> pa.Array:
    out, valid = field.room(np.uint64, 2)
    high, low = divmod(10**kind.precision, 1 << 64)
    if low > INT64_MAX:
        low -= 1 << 64
    nulls = kernels.decimal_column(field.buf, field.begins, kind.decimal_size, mask, high, low, out, valid, field.bad)
    return _fixed(arrow_type(kind), out, valid, nulls)


def _points(kind: SqlType, mask: int, field: _Field) -> pa.Array:
    seconds, valid = field.room(np.int64)
    nanoseconds: Cells = np.empty(len(seconds), np.int64)
    nulls = kernels.point_column(field.buf, field.begins, mask, seconds, nanoseconds, valid, field.bad)
    if field.is_exact:
        parts = [pa.array(seconds), pa.array(nanoseconds)]
        return pa.Array.from_buffers(EXACT_POINT, len(valid), [_bitmap(valid, nulls)], nulls, children=parts)
    too_far = (seconds > SECONDS_MAX) | (seconds < -SECONDS_MAX)
    if too_far.any():
        field.bad[too_far] = 1
        seconds[too_far] = 0
    return _fixed(arrow_type(kind), seconds * 1_000_000 + nanoseconds // 1000, valid, nulls)


def _texts(kind: pa.DataType, mask: int, field: _Field) -> pa.Array:
    offsets: Cells = np.zeros(len(field.begins) + 1, np.int64)
    valid: Bytes = np.empty(len(field.begins), np.uint8)
    nulls = kernels.byte_lengths(field.begins, field.finishes, offsets, valid, field.bad)
    size = int(offsets[-1])
    if size > OFFSET_MAX:
        raise BadRow("texts of one batch take more than 2 GiB", hint="read fewer rows at once")
    out: Bytes = np.empty(size, np.uint8)
    kernels.byte_copies(field.buf, field.begins, mask, offsets, out)
    buffers = [_bitmap(valid, nulls), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(out)]
    found = pa.Array.from_buffers(kind, len(valid), buffers, null_count=nulls)
    if kind == pa.string() and size and out.max() >= 0x80:
        _check_text(found, field.bad)
    return found


RESUME_ROWS: Final = 4096
"""Rows whose text is checked at once; only parts with invalid text are checked row by row."""


def _check_text(column: pa.Array, bad: Bytes) -> None:
    """Mark the rows whose text is not UTF-8."""
    for start in range(0, len(column), RESUME_ROWS):
        part = column.slice(start, RESUME_ROWS)
        try:
            part.validate(full=True)
        except pa.ArrowInvalid:
            for number, value in enumerate(part.cast(pa.binary()).to_pylist(), start):
                bad[number] |= not _is_text(value)


def _is_text(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False
