"""Columnar decode: scanned rows as Arrow record batches, and the Arrow type for each Tarantool field type.

There are two shapes. The generic shape fits every row and keeps MessagePack as binary. The typed shape fits the rows
of one space: its fields are columns, and the header of the row is in `_lsn`, `_type` and so on. Tables of a lake and
Spark sources use the types of this module, for example for decimals. It does not know what a space is: the caller
passes a list of `Column`s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.columns import column_kernels as kernels
from flowstone.columns import column_limits as limits
from flowstone.columns.column_limits import Starts
from flowstone.columns.column_types import ColumnType
from flowstone.errors import FlowstoneError
from flowstone.iproto import msgpack
from flowstone.iproto.constants import RequestType, type_name
from flowstone.iproto.scan import (
    FLAGS,
    INDEX_BASE,
    INDEX_ID,
    KEY_AT,
    KEY_END,
    LSN,
    OPS_AT,
    OPS_END,
    REPLICA_ID,
    SPACE_ID,
    TIMESTAMP,
    TSN,
    TUPLE_AT,
    TUPLE_END,
    TYPE,
    Bytes,
    Cells,
)
from flowstone.iproto.scan_kernels import skip_value
from flowstone.iproto.slab import Slab
from flowstone.native.msgpack import NIL
from flowstone.text.json_text import json_column


def text_array(values: Sequence[str]) -> pa.Array:
    """Return a column of constant texts. `pa.array` would import pandas, which takes longer than all our imports."""
    parts = [value.encode() for value in values]
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(parts), buffers)


TYPE_NAMES = text_array([type_name(code) for code in range(129)])
INT32_MAX = 2**31 - 1
DAYS_MIN, DAYS_MAX = -719_162, 2_932_896
"""The days from 1970-01-01 to the dates that all readers have: 0001-01-01 to 9999-12-31."""
MOMENT = pa.timestamp("us", tz="UTC")

_HEADER_FIELDS: tuple[tuple[str, pa.DataType, bool], ...] = (
    ("replica_id", pa.int32(), False),
    ("lsn", pa.int64(), False),
    ("tsn", pa.int64(), False),
    ("timestamp", MOMENT, False),
    ("type", pa.dictionary(pa.int16(), pa.string()), False),
    ("flags", pa.int32(), False),
)

GENERIC_SCHEMA = pa.schema(
    [
        *(pa.field(name, kind, nullable) for name, kind, nullable in _HEADER_FIELDS),
        pa.field("space_id", pa.int64()),
        pa.field("key", pa.binary()),
        pa.field("tuple", pa.binary()),
        pa.field("operations", pa.binary()),
        # Field numbers in `operations` count from index_base, and `key` is a key of index index_id.
        pa.field("index_id", pa.int32(), False),
        pa.field("index_base", pa.int32(), False),
    ]
)

TRAILING_FIELDS = (
    pa.field("_extra", pa.string()),
    pa.field("_key", pa.binary()),
    pa.field("_operations", pa.binary()),
    pa.field("_index_id", pa.int32(), False),
    pa.field("_index_base", pa.int32(), False),
)
"""Columns that follow the space's fields in the typed shape."""


@dataclass(frozen=True, slots=True)
class Column:
    """A field of the space: its name, its Tarantool type, whether its values may be null, and a declared type.

    A declared type must be able to hold the field (`ColumnType.holds`). It takes precedence over `ColumnOptions`.
    """

    name: str
    type: str
    nullable: bool = True
    declared: ColumnType | None = None


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """Options for types that Arrow and Spark cannot represent directly."""

    unsigned_as: Literal["int64", "decimal", "double"] = "int64"
    decimal_scale: int | None = None
    strings_as: Literal["string", "binary"] = "string"

    def __post_init__(self) -> None:
        if self.unsigned_as not in ("int64", "decimal", "double"):
            raise FlowstoneError(f"unsignedAs is {self.unsigned_as!r}", hint="use int64, decimal or double")
        if self.strings_as not in ("string", "binary"):
            raise FlowstoneError(f"stringsAs is {self.strings_as!r}", hint="use string or binary")
        if self.decimal_scale is not None and not 0 <= self.decimal_scale <= limits.DECIMAL_DIGITS_MAX:
            raise FlowstoneError(f"decimalScale is {self.decimal_scale}", hint=f"use 0 to {limits.DECIMAL_DIGITS_MAX}")


DEFAULT_OPTIONS = ColumnOptions()


class ColumnError(FlowstoneError):
    """A value does not fit its column. The message names the row and the field."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """Lines of the scan table for the chosen rows, without a copy if all rows are chosen."""

    slab: Slab
    rows: Cells

    def line(self, number: int) -> Cells:
        line: Cells = self.slab.cells[number]
        return line if len(self.rows) == len(line) else line[self.rows]

    def where(self, row: int) -> str:
        """Return file, LSN, replica and space of the row, for messages."""
        lsn, replica_id, space_id = self.slab.cells[[LSN, REPLICA_ID, SPACE_ID], self.rows[row]].tolist()
        space = f", space {space_id}" if space_id >= 0 else ""
        return f"{self.slab.path}: row {lsn} of replica {replica_id}{space}"

    def header(self) -> list[pa.Array]:
        """Return the columns of `_HEADER_FIELDS`."""
        return [
            self.small(REPLICA_ID, "replica id"),
            pa.array(self.line(LSN)),
            pa.array(self.line(TSN)),
            self._timestamps(),
            self._types(),
            self.small(FLAGS, "flags"),
        ]

    def small(self, number: int, name: str) -> pa.Array:
        """Return a line as int32. No release writes larger numbers here."""
        line = self.line(number)
        if len(line) and line.max() > INT32_MAX:
            row = int(line.argmax())
            raise ColumnError(f"{self.where(row)}: {name} {line[row]} is above {INT32_MAX}")
        return pa.array(line.astype(np.int32))

    def _timestamps(self) -> pa.Array:
        microseconds = np.rint(self.line(TIMESTAMP).view(np.float64) * 1e6)
        fits = np.abs(microseconds) < 2.0**63
        if not fits.all():
            row = int(fits.argmin())
            raise ColumnError(f"{self.where(row)}: timestamp of {microseconds[row] / 1e6} s is out of range")
        return pa.array(microseconds.astype(np.int64)).view(MOMENT)

    def _types(self) -> pa.Array:
        types = self.line(TYPE)
        if not len(types) or types.max() < len(TYPE_NAMES):
            return pa.DictionaryArray.from_arrays(pa.array(types.astype(np.int16)), TYPE_NAMES)
        # Types of a newer server: their numbers serve as names.
        names = pa.array([type_name(code) for code in np.unique(types).tolist()], pa.string())
        indexes = np.unique(types, return_inverse=True)[1].astype(np.int16)
        return pa.DictionaryArray.from_arrays(pa.array(indexes), names)

    def key(self) -> pa.Array:
        return span_column(self.slab.buf, self.line(KEY_AT), self.line(KEY_END))

    def operations(self) -> pa.Array:
        """Return the operations. The body of an UPDATE has the operations in place of a tuple."""
        starts, ends = self.line(OPS_AT), self.line(OPS_END)
        is_update = self.line(TYPE) == RequestType.UPDATE
        if is_update.any():
            starts = np.where(is_update, self.line(TUPLE_AT), starts)
            ends = np.where(is_update, self.line(TUPLE_END), ends)
        return span_column(self.slab.buf, starts, ends)

    def tuple(self) -> pa.Array:
        starts = np.where(self.line(TYPE) == RequestType.UPDATE, -1, self.line(TUPLE_AT))
        return span_column(self.slab.buf, starts, self.line(TUPLE_END))


def generic_batch(slab: Slab, rows: Cells) -> pa.RecordBatch:
    """Return the rows with the numbers `rows` in the generic shape."""
    chosen = _Selection(slab, rows)
    space_ids = chosen.line(SPACE_ID)
    return pa.RecordBatch.from_arrays(
        [
            *chosen.header(),
            pa.array(space_ids, mask=space_ids < 0),
            chosen.key(),
            chosen.tuple(),
            chosen.operations(),
            chosen.small(INDEX_ID, "index id"),
            chosen.small(INDEX_BASE, "index base"),
        ],
        schema=GENERIC_SCHEMA,
    )


def span_column(buf: Bytes, starts: Cells, ends: Cells) -> pa.Array:
    """Return a binary column of raw spans; a start of -1 is null."""
    present = starts >= 0
    if not present.any():
        return pa.nulls(len(starts), pa.binary())
    lengths = np.where(present, ends - starts, 0)
    offsets: Starts = np.zeros(len(starts) + 1, np.int32)
    offsets[1:] = np.cumsum(lengths)  # a slab is smaller than 2 GiB, and spans do not overlap
    size = int(offsets[-1])
    out: Bytes = np.empty(size + limits.COPY_ROOM, np.uint8)
    kernels.span_copy(buf, starts, offsets, out)
    nulls = len(starts) - int(np.count_nonzero(present))
    return _variable(pa.binary(), offsets, out[:size], present.view(np.uint8), nulls)


def _bitmap(valid: Bytes, nulls: int) -> pa.Buffer | None:
    return pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None


def _fixed(kind: pa.DataType, out: Any, valid: Bytes, nulls: int) -> pa.Array:
    return pa.Array.from_buffers(kind, len(valid), [_bitmap(valid, nulls), pa.py_buffer(out)], null_count=nulls)


def _variable(kind: pa.DataType, offsets: Starts, out: Bytes, valid: Bytes, nulls: int) -> pa.Array:
    buffers = [_bitmap(valid, nulls), pa.py_buffer(offsets), pa.py_buffer(out)]
    return pa.Array.from_buffers(kind, len(valid), buffers, null_count=nulls)


class _Misfit(Exception):
    """Rows whose values do not fit, and the reason. Converted to ColumnError where names are known.

    `rows` ascend and are not empty. Kernels stop at the first row. Checks of whole columns list all rows.
    """

    def __init__(self, rows: Sequence[int], what: int) -> None:
        self.rows = rows
        self.what = what


def _check(row: int, what: int) -> None:
    if row >= 0:
        raise _Misfit([row], what)


def _int_values(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
    out, valid = np.empty(len(starts), np.int64), np.empty(len(starts), np.uint8)
    row, what, nulls = kernels.int_column(buf, starts, out, valid)
    _check(row, what)
    return _fixed(pa.int64(), out, valid, nulls)


def _double_values(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
    out, valid = np.empty(len(starts), np.float64), np.empty(len(starts), np.uint8)
    later: Cells = np.empty(len(starts), np.int64)
    row, what, nulls, deferred = kernels.double_column(buf, starts, out, valid, later)
    _check(row, what)
    wrong: list[int] = []
    for number in later[:deferred].tolist():
        value = _value(buf, int(starts[number]))
        if isinstance(value, Decimal):
            out[number] = float(value)
        else:  # an extension with the code of a decimal and other content
            wrong.append(number)
    if wrong:
        raise _Misfit(wrong, limits.WRONG_TYPE)
    return _fixed(pa.float64(), out, valid, nulls)


def _date_values(buf: Bytes, starts: Starts, options: ColumnOptions) -> pa.Array:
    """Return days since 1970-01-01 as dates."""
    days = _int_values(buf, starts, options)
    found = days.fill_null(0).to_numpy()
    wrong = np.flatnonzero((found < DAYS_MIN) | (found > DAYS_MAX)).tolist()
    if wrong:
        raise _Misfit(wrong, limits.OUT_OF_RANGE)
    return days.cast(pa.int32()).view(pa.date32())


def _bool_values(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
    out, valid = np.empty((2, len(starts)), np.uint8)
    row, what, nulls = kernels.bool_column(buf, starts, out, valid)
    _check(row, what)
    return _fixed(pa.bool_(), np.packbits(out, bitorder="little"), valid, nulls)


def _bytes_values(kind: pa.DataType, buf: Bytes, starts: Starts) -> pa.Array:
    offsets: Starts = np.empty(len(starts) + 1, np.int32)
    valid: Bytes = np.empty(len(starts), np.uint8)
    row, what, nulls = kernels.bytes_lengths(buf, starts, offsets, valid)
    _check(row, what)
    size = int(offsets[-1])
    out: Bytes = np.empty(size + limits.COPY_ROOM, np.uint8)
    kernels.bytes_copy(buf, starts, offsets, out)
    return _variable(kind, offsets, out[:size], valid, nulls)


def _string_values(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
    column = _bytes_values(pa.string(), buf, starts)
    if _is_ascii(column.buffers()[2]):
        return column
    wrong = _not_utf8(column)
    if wrong:
        raise _Misfit(wrong, NOT_UTF8)
    return column


def _not_utf8(column: pa.Array) -> list[int]:
    """Return the rows that are not UTF-8. Only parts of the column that have such rows are checked row by row."""
    wrong: list[int] = []
    for start in range(0, len(column), RESUME_ROWS):
        part = column.slice(start, RESUME_ROWS)
        try:
            part.validate(full=True)
        except pa.ArrowInvalid:
            values = part.cast(pa.binary()).to_pylist()
            wrong += [start + number for number, value in enumerate(values) if not _is_utf8(value)]
    return wrong


def _is_utf8(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _is_ascii(text: pa.Buffer) -> bool:
    """Return True if `text` is ASCII: most columns then skip the validation, which is several times slower."""
    return text.size == 0 or bool(np.frombuffer(text, np.uint8).max() < 0x80)


def _binary_values(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
    return _bytes_values(pa.binary(), buf, starts)


def _uuid_values(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
    offsets: Starts = np.empty(len(starts) + 1, np.int32)
    valid: Bytes = np.empty(len(starts), np.uint8)
    out: Bytes = np.empty(36 * len(starts), np.uint8)
    row, what, nulls = kernels.uuid_column(buf, starts, offsets, out, valid)
    _check(row, what)
    return _variable(pa.string(), offsets, out, valid, nulls)


def _datetime_values(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
    out, valid = np.empty(len(starts), np.int64), np.empty(len(starts), np.uint8)
    row, what, nulls = kernels.datetime_column(buf, starts, out, valid)
    _check(row, what)
    return _fixed(MOMENT, out, valid, nulls)


def _digits() -> Bytes:
    """Return scratch memory for kernels that decode decimals: kernels allocate nothing."""
    return np.empty(limits.DIGITS_ROOM, np.uint8)


def _decimal128(scale: int) -> Callable[[Bytes, Starts, ColumnOptions], pa.Array]:
    def decode(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
        out, valid = np.empty(2 * len(starts), np.uint64), np.empty(len(starts), np.uint8)
        row, what, nulls = kernels.decimal128_column(buf, starts, scale, out, valid, _digits())
        _check(row, what)
        return _fixed(pa.decimal128(limits.DECIMAL_DIGITS_MAX, scale), out, valid, nulls)

    return decode


def _declared_decimal(precision: int, scale: int) -> _Decode:
    decode = _decimal128(scale)
    if precision == limits.DECIMAL_DIGITS_MAX:
        return decode
    whole = pa.decimal128(limits.DECIMAL_DIGITS_MAX, scale)
    limit = pa.scalar(Decimal(10) ** (precision - scale), whole)

    def decode_checked(buf: Bytes, starts: Starts, options: ColumnOptions) -> pa.Array:
        column = decode(buf, starts, options)
        too_long = pc.indices_nonzero(pc.greater_equal(pc.abs(column), limit)).to_pylist()
        if too_long:
            raise _Misfit(too_long, limits.TOO_PRECISE)
        return pa.Array.from_buffers(pa.decimal128(precision, scale), len(column), column.buffers(), column.null_count)

    return decode_checked


def _decimal_text(buf: Bytes, starts: Starts, options: ColumnOptions) -> pa.Array:
    """Return decimals as digits: the unquoted JSON text of a decimal, or of an integer in a decimal field."""
    _check(*kernels.decimal_kinds(buf, starts, _digits()))
    column = pc.utf8_trim(_json_values(buf, starts, options), '"')
    # `json_plain` writes a decimal that is out of range as an object, not as digits.
    too_long = pc.indices_nonzero(pc.starts_with(column, "{")).to_pylist()
    if too_long:
        raise _Misfit(too_long, limits.TOO_PRECISE)
    return column


def _json_values(buf: Bytes, starts: Starts, _: ColumnOptions) -> pa.Array:
    ends: Cells = np.empty(len(starts), np.int64)
    kernels.value_ends(buf, starts, ends)
    return json_spans(buf, starts.astype(np.int64), ends)


def json_spans(buf: Bytes, begins: Cells, ends: Cells) -> pa.Array:
    """Return the JSON text of the values at `begins`; a missing value (-1) or nil is null. JsonError: one is broken."""
    present = begins >= 0
    has_bytes = np.flatnonzero(present & (begins < ends))
    present[has_bytes] = buf[begins[has_bytes]] != NIL
    offsets, data = json_column(buf, np.where(present, begins, -1), ends)
    if offsets[-1] > limits.OFFSET_MAX:
        raise ColumnError("JSON texts of one batch take more than 2 GiB", hint=_GENERIC)
    nulls = len(begins) - int(np.count_nonzero(present))
    return _variable(pa.string(), offsets.astype(np.int32), data, present.view(np.uint8), nulls)


def _value(buf: Bytes, at: int) -> Any:
    return msgpack.unpack(buf[at : skip_value(buf, at, len(buf))].tobytes())


NOT_UTF8, IS_NULL = 100, 101
_GENERIC = "read the space in the generic shape"
_WORDS = {
    limits.WRONG_TYPE: ("is not of type {type}", _GENERIC),
    limits.TOO_LARGE: (
        "is above 2^63-1 and does not fit int64",
        "choose unsignedAs=decimal or unsignedAs=double",
    ),
    limits.TOO_PRECISE: (
        "has more digits than the column keeps",
        "choose another decimalScale, or omit it to get strings",
    ),
    limits.OUT_OF_RANGE: ("is too far from 1970 for a timestamp", _GENERIC),
    limits.COLUMN_FULL: ("makes the column larger than 2 GiB", _GENERIC),
    NOT_UTF8: ("is not UTF-8", "choose stringsAs=binary"),
    IS_NULL: ("is null, but not declared nullable", _GENERIC),
}

REASONS: Final = {
    limits.WRONG_TYPE: "wrong_type",
    limits.TOO_LARGE: "too_large",
    limits.TOO_PRECISE: "too_precise",
    limits.OUT_OF_RANGE: "out_of_range",
    NOT_UTF8: "not_utf8",
}
"""Codes of reasons why a single value does not fit its column, for programs."""

RESUME_ROWS: Final = 4096
"""Rows that are decoded at a time to find misfits: small enough to cost little after each misfit, and large enough for
kernels to be fast."""

MISFIT_TEXT_MAX: Final = 1024
"""Longest text of a misfit, in characters: the tuple has the whole value."""

_Decode = Callable[[Bytes, Starts, ColumnOptions], pa.Array]


@dataclass(frozen=True, slots=True)
class FieldMisfits:
    """The values of one column that do not fit: their rows in the batch, ascending, reasons, and values as JSON.

    `REASONS` lists the reasons. Values are cut to MISFIT_TEXT_MAX characters.
    """

    column: str
    rows: Cells
    reasons: list[str]
    values: pa.Array


def _decoded_with_misfits(
    decode: _Decode, buf: Bytes, starts: Starts, options: ColumnOptions
) -> tuple[pa.Array, dict[int, int]]:
    """Return the column with null in place of each misfit, and the reason for each misfit by row.

    Kernels stop at the first misfit. The search resumes after it, in slices of RESUME_ROWS rows, so the cost is linear
    in the number of rows and misfits. A column without misfits is decoded once.
    """
    left, found = starts, dict[int, int]()
    while True:
        try:
            return decode(buf, left, options), found
        except _Misfit as misfit:
            if misfit.what not in REASONS:
                raise
            if left is starts:
                left = starts.copy()
            _put_out(misfit, 0, left, found)
            at = misfit.rows[-1] + 1
        while at < len(left):
            try:
                decode(buf, left[at : at + RESUME_ROWS], options)
            except _Misfit as misfit:
                if misfit.what not in REASONS:
                    raise
                _put_out(misfit, at, left, found)
                at += misfit.rows[-1] + 1
            else:
                at += RESUME_ROWS


def _put_out(misfit: _Misfit, start: int, starts: Starts, found: dict[int, int]) -> None:
    """Treat the rows of a misfit as missing; they are relative to `start`."""
    for row in misfit.rows:
        starts[start + row] = -1
        found[start + row] = misfit.what


_INTEGERS = ("integer", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
_UNSIGNED: dict[str, tuple[pa.DataType, _Decode]] = {
    "int64": (pa.int64(), _int_values),
    "double": (pa.float64(), _double_values),
    "decimal": (pa.decimal128(limits.DECIMAL_DIGITS_MAX, 0), _decimal128(0)),
}
_PLAIN: dict[str, tuple[pa.DataType, _Decode]] = {
    **dict.fromkeys(_INTEGERS, (pa.int64(), _int_values)),
    **dict.fromkeys(("number", "double", "float32", "float64"), (pa.float64(), _double_values)),
    "string": (pa.string(), _string_values),
    "varbinary": (pa.binary(), _binary_values),
    "boolean": (pa.bool_(), _bool_values),
    "uuid": (pa.string(), _uuid_values),
    "datetime": (MOMENT, _datetime_values),
    "date": (pa.date32(), _date_values),
}


def _decoding_of(kind: str, options: ColumnOptions) -> tuple[pa.DataType, _Decode]:
    if kind in ("unsigned", "uint64"):
        return _UNSIGNED[options.unsigned_as]
    if kind == "integer" and options.unsigned_as != "int64":
        return _UNSIGNED[options.unsigned_as]  # integer fields hold numbers up to 2^64-1 too
    if kind == "string" and options.strings_as == "binary":
        return _PLAIN["varbinary"]
    if kind.startswith("decimal("):
        return _declared_decoding(ColumnType.parse(kind), "decimal")
    if kind.startswith("decimal"):
        if options.decimal_scale is None:
            return pa.string(), _decimal_text
        scale = options.decimal_scale
        return pa.decimal128(limits.DECIMAL_DIGITS_MAX, scale), _decimal128(scale)
    return _PLAIN.get(kind, (pa.string(), _json_values))


def _field_misfits(name: str, buf: Bytes, starts: Starts, found: dict[int, int]) -> FieldMisfits:
    rows = np.array(sorted(found), np.int64)
    begins = np.ascontiguousarray(starts[rows])
    texts = _json_values(buf, begins, DEFAULT_OPTIONS)
    values = pc.utf8_slice_codeunits(texts, 0, MISFIT_TEXT_MAX)
    return FieldMisfits(name, rows, [REASONS[found[row]] for row in rows.tolist()], values)


def _declared_decoding(kind: ColumnType, field_type: str) -> tuple[pa.DataType, _Decode]:
    if kind.name == "decimal":
        return pa.decimal128(kind.precision, kind.scale), _declared_decimal(kind.precision, kind.scale)
    if kind.name == "string":
        if field_type.startswith("decimal"):
            return pa.string(), _decimal_text
        if field_type == "varbinary":
            return _PLAIN["string"]
        return _PLAIN[field_type] if field_type in ("string", "uuid") else (pa.string(), _json_values)
    return _PLAIN[_DECLARED[kind.name]]


_DECLARED: Final = {
    "bigint": "integer",
    "double": "double",
    "binary": "varbinary",
    "boolean": "boolean",
    "timestamp": "datetime",
}
"""Types with the same column as a type of fields."""


class TypedDecoder:
    """Decoder for the rows of one space with one definition of its fields.

    `key_fields` are the field numbers of the primary key's parts; a DELETE or UPDATE shows its key in these columns.
    `wanted` limits the columns of the result by name. Every field is nullable if `partial` rows (UPDATE, DELETE) can
    occur, as in a log. In a snapshot, fields are nullable as declared, and fields of type any always: servers accept
    nil for any.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        *,
        key_fields: Sequence[int] = (),
        partial: bool = True,
        options: ColumnOptions = DEFAULT_OPTIONS,
        wanted: Collection[str] | None = None,
    ) -> None:
        self._columns = tuple(columns)
        self._is_partial = partial
        self._options = options
        self._key_fields: Cells = np.array(key_fields, np.int64)
        self._decodings = [
            _decoding_of(each.type, options) if each.declared is None else _declared_decoding(each.declared, each.type)
            for each in columns
        ]
        fields = [pa.field(f"_{name}", kind, nullable) for name, kind, nullable in _HEADER_FIELDS]
        fields += [
            pa.field(column.name, kind, partial or column.nullable or column.type == "any")
            for column, (kind, _) in zip(columns, self._decodings, strict=True)
        ]
        fields += TRAILING_FIELDS
        self._all = [field.name for field in fields]
        twice = [name for number, name in enumerate(self._all) if name in self._all[:number]]
        if twice:
            raise FlowstoneError(f"duplicate column {twice[0]!r}", hint=_GENERIC)
        unknown = sorted(set(wanted or ()) - set(self._all))
        if unknown:
            raise FlowstoneError(f"no column {unknown[0]!r}", hint=f"known columns: {', '.join(self._all)}")
        self.schema = pa.schema([field for field in fields if wanted is None or field.name in wanted])

    def batch(self, slab: Slab, rows: Cells, misfits: list[FieldMisfits] | None = None) -> pa.RecordBatch:
        """Return the rows with the ascending numbers `rows`, all of this decoder's space and definition.

        A value that does not fit its column raises ColumnError. With `misfits`, the value is null instead, and is
        appended to that list; the decoder must then be one for partial rows, whose columns are all nullable.
        """
        assert misfits is None or self._is_partial, "misfits need nullable columns"
        chosen = _Selection(slab, rows)
        starts: Starts = np.empty((len(self._columns) + 1, len(rows)), np.int32)
        row = kernels.split_tuples(slab.buf, slab.cells, rows, self._key_fields, starts)
        if row >= 0:
            raise ColumnError(f"{chosen.where(row)}: tuple or key is not an array")
        header = self._all[: len(_HEADER_FIELDS)]
        arrays: dict[str, pa.Array] = {}
        if not {*header}.isdisjoint(self.schema.names):
            arrays = dict(zip(header, chosen.header(), strict=True))
        for number, column in enumerate(self._columns):
            if column.name in self.schema.names:
                arrays[column.name] = self._field(chosen, number, starts[number], misfits)
        if "_extra" in self.schema.names:
            arrays["_extra"] = self._extra(slab.buf, starts[-1], chosen)
        if "_key" in self.schema.names:
            arrays["_key"] = chosen.key()
        if "_operations" in self.schema.names:
            arrays["_operations"] = chosen.operations()
        arrays["_index_id"] = chosen.small(INDEX_ID, "index id")
        arrays["_index_base"] = chosen.small(INDEX_BASE, "index base")
        # Go through a struct: a batch without columns still needs its row count.
        children = [arrays[name] for name in self.schema.names]
        struct = pa.Array.from_buffers(pa.struct(self.schema), len(rows), [None], children=children)
        return pa.RecordBatch.from_struct_array(struct)

    def _field(self, chosen: _Selection, number: int, starts: Starts, misfits: list[FieldMisfits] | None) -> pa.Array:
        column, (_, decode) = self._columns[number], self._decodings[number]
        buf = chosen.slab.buf
        try:
            if misfits is not None:
                array, found = _decoded_with_misfits(decode, buf, starts, self._options)
                if found:
                    misfits.append(_field_misfits(column.name, buf, starts, found))
                return array
            array = decode(buf, starts, self._options)
            if array.null_count and not self.schema.field(column.name).nullable:
                raise _Misfit([pc.index(array.is_null(), True).as_py()], IS_NULL)
        except _Misfit as misfit:
            words, hint = _WORDS[misfit.what]
            where = f"{chosen.where(misfit.rows[0])}: field {column.name!r}"
            raise ColumnError(f"{where} {words.format(type=column.type)}", hint=hint) from None
        return array

    def _extra(self, buf: Bytes, starts: Starts, chosen: _Selection) -> pa.Array:
        """Return the fields after the declared fields as one JSON array; null if there are no such fields."""
        present = starts >= 0
        if not present.any():
            return pa.nulls(len(starts), pa.string())
        tuple_ends = chosen.line(TUPLE_END)
        size = int(np.sum((tuple_ends - starts + limits.ARRAY_HEADER_SIZE)[present]))
        gathered: Bytes = np.empty(size, np.uint8)
        begins, ends = np.empty((2, len(starts)), np.int64)
        row = kernels.gather_extra(buf, starts, tuple_ends, gathered, begins, ends)
        if row >= 0:
            raise ColumnError(f"{chosen.where(row)}: tuple is not an array")
        return json_spans(gathered, begins, ends)
