"""Encode record batches as requests: match columns to the fields of a space and build the bytes of each row.

Pure. Columns are matched to fields by name and checked before anything is sent. Kernels encode numbers, strings, bytes
and other scalars one column at a time; documents are encoded value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from flowstone.box.definitions import FieldDefinition, SpaceDefinition
from flowstone.columns.change_contract import EXTRA
from flowstone.errors import FlowstoneError, LocalProtocolError
from flowstone.iproto.constants import RequestType
from flowstone.iproto.extensions import DECIMAL_DIGITS_MAX
from flowstone.iproto.msgpack import pack
from flowstone.iproto.scan import Bytes, Cells
from flowstone.native.msgpack import NIL
from flowstone.spark.sources.state_contract import GENERIC_FIELDS, TUPLE_MSGPACK
from flowstone.spark.sources.tarantool import encode_kernels as kernels

_INT64_MIN: Final = -(2**63)
_MOMENT: Final = pa.timestamp("us", tz="UTC")


class CannotWrite(FlowstoneError):
    """Rows cannot be written to the space. Raised before the first row is sent unless it depends on their values."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Packets, one per row, with consecutive SYNCs from `first_sync`; `ends` has the end offset of each packet."""

    packets: Bytes
    ends: Cells
    first_sync: int

    def __len__(self) -> int:
        return len(self.ends)

    def packet(self, row: int) -> bytes:
        start = int(self.ends[row - 1]) if row else 0
        return self.packets[start : int(self.ends[row])].tobytes()


class _Unfit(Exception):
    """The row number of a value that its field cannot hold, and the reason."""

    def __init__(self, row: int, why: str) -> None:
        self.row = row
        self.why = why


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A column encoded as MessagePack. `edges` has the start of each value and the end of the last one."""

    data: Bytes
    edges: Cells


_Encode = Callable[[pa.Array], _Pieces]


class TupleEncoder:
    """Encodes batches with the columns of `schema` as requests for `space`. Raises CannotWrite if they do not fit."""

    def __init__(self, space: SpaceDefinition, schema: pa.Schema, kind: RequestType) -> None:
        self._space = space
        self._kind = kind.value
        self._is_whole = TUPLE_MSGPACK.name in schema.names
        self._encodings: list[tuple[str | None, _Encode]] = []
        self._extra = EXTRA.name in schema.names and not self._is_whole
        _check_names(space, schema)
        if self._is_whole:
            _check_type(space.name, TUPLE_MSGPACK.name, schema, pa.binary())
            self._encodings = [(TUPLE_MSGPACK.name, _raw_values)]
            return
        for field in space.fields:
            self._encodings.append(_encoding(space, field, schema))
        if self._extra:
            _check_type(space.name, EXTRA.name, schema, pa.string())

    def requests(self, batch: pa.RecordBatch, first_sync: int) -> Requests:
        """Return one request per row of `batch`, with SYNCs from `first_sync`."""
        columns = [self._column(batch, name, encode) for name, encode in self._encodings]
        extra: Cells = np.zeros(len(batch), np.int64)
        if not self._is_whole:
            columns.append(self._extra_fields(batch, extra))
        sizes = [int(column.edges[-1]) for column in columns]
        starts = np.cumsum([0, *sizes])
        data: Bytes = np.empty(int(starts[-1]), np.uint8)
        edges: Cells = np.empty((len(columns), len(batch) + 1), np.int64)
        for number, column in enumerate(columns):
            data[starts[number] : starts[number + 1]] = column.data[: sizes[number]]
            edges[number] = column.edges + starts[number]
        out: Bytes = np.empty(int(starts[-1]) + kernels.REQUEST_SIZE * len(batch), np.uint8)
        ends: Cells = np.empty(len(batch), np.int64)
        size = kernels.build_requests(
            data, edges, extra, int(self._is_whole), self._kind, self._space.id, first_sync, out, ends
        )
        return Requests(out[:size], ends, first_sync)

    def _column(self, batch: pa.RecordBatch, name: str | None, encode: _Encode) -> _Pieces:
        if name is None:
            return _nils(len(batch))
        column = batch.column(name)
        try:
            return encode(column)
        except _Unfit as unfit:
            raise self._unfit(batch, name, unfit) from None
        except pa.ArrowInvalid as error:
            raise CannotWrite(f"column {name!r} does not fit space {self._space.name!r}: {error}") from None

    def _unfit(self, batch: pa.RecordBatch, name: str, unfit: _Unfit) -> CannotWrite:
        key = self._space.primary_key
        names = (
            [self._space.fields[part.field].name for part in key.parts if part.field < len(self._space.fields)]
            if key
            else []
        )
        at = ", ".join(
            f"{each} = {batch.column(each)[unfit.row].as_py()!r}" for each in names if each in batch.schema.names
        )
        value = batch.column(name)[unfit.row].as_py()
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "…"
        where = f"row with {at}" if at else f"row {unfit.row} of a batch"
        return CannotWrite(
            f"{where} cannot be written to space {self._space.name!r}: column {name!r} is {shown}, {unfit.why}"
        )

    def _extra_fields(self, batch: pa.RecordBatch, counts: Cells) -> _Pieces:
        """Encode the fields beyond the format, from JSON arrays; null means no fields."""
        if not self._extra:
            return _Pieces(np.zeros(0, np.uint8), np.zeros(len(batch) + 1, np.int64))
        pieces = []
        for row, text in enumerate(batch.column(EXTRA.name).to_pylist()):
            values = [] if text is None else _json(row, text)
            if not isinstance(values, list):
                raise self._unfit(batch, EXTRA.name, _Unfit(row, "which is not an array"))
            counts[row] = len(values)
            pieces.append(b"".join(map(_packed, values)))
        return _joined(pieces)


def _check_names(space: SpaceDefinition, schema: pa.Schema) -> None:
    known = {*space.field_names, EXTRA.name}
    if TUPLE_MSGPACK.name in schema.names:
        known = {each.name for each in GENERIC_FIELDS}
    twice = [name for number, name in enumerate(schema.names) if name in schema.names[:number]]
    if twice:
        raise CannotWrite(f"duplicate column {twice[0]!r}")
    unknown = [name for name in schema.names if name not in known]
    if not unknown:
        return
    if not space.fields:
        raise CannotWrite(
            f"space {space.name!r} has no format to match columns with",
            hint=f"set a format with box.space.{space.name}:format(), or write column {TUPLE_MSGPACK.name}",
        )
    raise CannotWrite(
        f"space {space.name!r} has no field {unknown[0]!r}",
        hint=f"its fields are: {', '.join(space.field_names)}",
    )


def _check_type(space: str, name: str, schema: pa.Schema, wanted: pa.DataType) -> None:
    if schema.field(name).type != wanted:
        raise CannotWrite(f"column {name!r} for space {space!r} has type {schema.field(name).type}, expected {wanted}")


def _encoding(space: SpaceDefinition, field: FieldDefinition, schema: pa.Schema) -> tuple[str | None, _Encode]:
    if field.name not in schema.names:
        if not field.is_nullable and field.type != "any":
            raise CannotWrite(
                f"column {field.name!r} is missing: the field of space {space.name!r} is not nullable",
                hint=f"columns are matched by name; given: {', '.join(schema.names)}",
            )
        return None, _raw_values
    kind = schema.field(field.name).type
    encode = encoding_of(field.type, kind)
    if encode is None:
        raise CannotWrite(
            f"column {field.name!r} of type {_spark_name(kind)} cannot be written to a field of type {field.type!r} of "
            f"space {space.name!r}",
            hint=f"{field.type} takes {_TAKES.get(field.type, 'column ' + TUPLE_MSGPACK.name + ' only')}",
        )
    return field.name, encode


_TAKES: Final = {
    "unsigned": "BIGINT, INT, SMALLINT, TINYINT or DECIMAL(n, 0)",
    "integer": "BIGINT, INT, SMALLINT, TINYINT or DECIMAL(n, 0)",
    "number": "whole numbers, DOUBLE, FLOAT or DECIMAL",
    "double": "DOUBLE, FLOAT or whole numbers",
    "string": "STRING or BINARY",
    "varbinary": "BINARY",
    "boolean": "BOOLEAN",
    "uuid": "STRING",
    "datetime": "TIMESTAMP",
    "decimal": "DECIMAL, whole numbers, or STRING",
    "array": "ARRAY, or JSON in a STRING",
    "map": "MAP, STRUCT, or JSON in a STRING",
    "any": "any column; a STRING is JSON",
    "scalar": "whole numbers, DOUBLE, BOOLEAN, BINARY, or JSON in a STRING",
}


def _spark_name(kind: pa.DataType) -> str:
    names = {
        "string": "STRING",
        "binary": "BINARY",
        "bool": "BOOLEAN",
        "int64": "BIGINT",
        "int32": "INT",
        "double": "DOUBLE",
    }
    return "TIMESTAMP" if kind == _MOMENT else names.get(str(kind), str(kind).upper())


def encoding_of(field: str, kind: pa.DataType) -> _Encode | None:
    """Return the encoder from Arrow type `kind` to the Tarantool type `field`, or None if there is none."""
    is_int, is_float = pa.types.is_signed_integer(kind), pa.types.is_floating(kind)
    is_whole_decimal = pa.types.is_decimal128(kind) and kind.scale == 0
    is_text, is_bytes = kind == pa.string(), kind == pa.binary()
    if pa.types.is_null(kind):
        return lambda column: _nils(len(column))
    match field:
        case "unsigned" | "uint8" | "uint16" | "uint32" | "uint64":
            return _unsigned if is_int else _wide_unsigned if is_whole_decimal else None
        case "integer" | "int8" | "int16" | "int32" | "int64":
            return _integers if is_int else _wide_integers if is_whole_decimal else None
        case "double" | "float32" | "float64":
            return _doubles if is_int or is_float else None
        case "string":
            return _texts if is_text or is_bytes else None
        case "varbinary":
            return _bytes if is_bytes else None
        case "boolean":
            return _booleans if pa.types.is_boolean(kind) else None
        case "uuid":
            return _uuids if is_text else None
        case "datetime":
            return _datetimes if pa.types.is_timestamp(kind) and kind.tz is not None else None
        case "array":
            return _documents if pa.types.is_list(kind) else _json_values if is_text else None
        case "map":
            nested = pa.types.is_map(kind) or pa.types.is_struct(kind)
            return _documents if nested else _json_values if is_text else None
    if field.startswith("decimal"):
        return _decimals if is_int or is_text or pa.types.is_decimal128(kind) else None
    if field not in ("number", "any", "scalar"):
        return None
    if is_int:
        return _integers
    if is_float:
        return _doubles
    if pa.types.is_decimal128(kind):
        return _decimals
    if field == "number":
        return None
    if pa.types.is_boolean(kind):
        return _booleans
    if is_bytes:
        return _bytes
    if is_text:
        return _json_values
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return _datetimes
    return _documents if pa.types.is_nested(kind) and field == "any" else None


# --- columns ------------------------------------------------------------------------------------------------------


def _valid(column: pa.Array) -> Bytes:
    if not column.null_count:
        return np.ones(len(column), np.uint8)
    return np.ascontiguousarray(column.is_valid().to_numpy(zero_copy_only=False)).view(np.uint8)


def _fixed(column: pa.Array, dtype: Any, width: int = 1) -> Any:
    """Return the values of a column of numbers; values of null rows are undefined."""
    start = column.offset * width
    return (
        np.frombuffer(column.buffers()[1], dtype)[start : start + width * len(column)]
        if len(column)
        else np.zeros(0, dtype)
    )


def _room(count: int, size: int) -> tuple[Bytes, Cells]:
    return np.empty(count * size, np.uint8), np.empty(count + 1, np.int64)


def _checked(row: int, why: str) -> None:
    if row >= 0:
        raise _Unfit(row, why)


def _nils(count: int) -> _Pieces:
    return _Pieces(np.full(count, NIL, np.uint8), np.arange(count + 1, dtype=np.int64))


def _ints(column: pa.Array, least: int) -> _Pieces:
    out, edges = _room(len(column), kernels.NUMBER_SIZE)
    values = _fixed(column.cast(pa.int64()), np.int64)
    _checked(kernels.put_ints(values, _valid(column), least, out, edges), "which is below 0")
    return _Pieces(out, edges)


def _unsigned(column: pa.Array) -> _Pieces:
    return _ints(column, 0)


def _integers(column: pa.Array) -> _Pieces:
    return _ints(column, _INT64_MIN)


def _wide(column: pa.Array, least: int) -> _Pieces:
    out, edges = _room(len(column), kernels.NUMBER_SIZE)
    words = _fixed(column, np.int64, 2)
    row = kernels.put_wide_ints(words, _valid(column), least, out, edges)
    _checked(row, "which is below 0 or above 2^64-1" if least == 0 else "which does not fit 64 bits")
    return _Pieces(out, edges)


def _wide_unsigned(column: pa.Array) -> _Pieces:
    return _wide(column, 0)


def _wide_integers(column: pa.Array) -> _Pieces:
    return _wide(column, -1)


def _doubles(column: pa.Array) -> _Pieces:
    out, edges = _room(len(column), kernels.NUMBER_SIZE)
    kernels.put_doubles(_fixed(column.cast(pa.float64()), np.int64), _valid(column), out, edges)
    return _Pieces(out, edges)


def _booleans(column: pa.Array) -> _Pieces:
    out, edges = _room(len(column), 1)
    values = _fixed(column.cast(pa.uint8()), np.uint8)
    kernels.put_booleans(values, _valid(column), out, edges)
    return _Pieces(out, edges)


def _spans(column: pa.Array) -> tuple[Bytes, Any]:
    _, offsets, data = column.buffers()
    if not len(column):
        return np.zeros(0, np.uint8), np.zeros(1, np.int32)
    edges = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
    return (np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)), edges


def _sized(column: pa.Array, is_text: int) -> _Pieces:
    data, offsets = _spans(column)
    content = int(offsets[-1] - offsets[0])
    out: Bytes = np.empty(len(column) * kernels.HEAD_SIZE_MAX + content, np.uint8)
    edges: Cells = np.empty(len(column) + 1, np.int64)
    kernels.put_sized(data, offsets, _valid(column), is_text, out, edges)
    return _Pieces(out, edges)


def _texts(column: pa.Array) -> _Pieces:
    return _sized(column, 1)


def _bytes(column: pa.Array) -> _Pieces:
    return _sized(column, 0)


def _raw_values(column: pa.Array) -> _Pieces:
    data, offsets = _spans(column)
    out: Bytes = np.empty(len(column) + int(offsets[-1] - offsets[0]), np.uint8)
    edges: Cells = np.empty(len(column) + 1, np.int64)
    _checked(kernels.put_raw(data, offsets, _valid(column), out, edges), "which is not the MessagePack of one value")
    return _Pieces(out, edges)


def _uuids(column: pa.Array) -> _Pieces:
    data, offsets = _spans(column)
    out, edges = _room(len(column), kernels.UUID_SIZE)
    _checked(kernels.put_uuids(data, offsets, _valid(column), out, edges), "which is not a UUID")
    return _Pieces(out, edges)


def _datetimes(column: pa.Array) -> _Pieces:
    out, edges = _room(len(column), kernels.DATETIME_SIZE)
    values = _fixed(column.cast(_MOMENT), np.int64)
    kernels.put_datetimes(values, _valid(column), out, edges)
    return _Pieces(out, edges)


def _decimals(column: pa.Array) -> _Pieces:
    data, offsets = _spans(column.cast(pa.string()))
    out, edges = _room(len(column), kernels.DECIMAL_SIZE)
    digits: Bytes = np.empty(DECIMAL_DIGITS_MAX, np.uint8)
    row = kernels.put_decimals(data, offsets, _valid(column), digits, out, edges)
    _checked(row, "which is not a decimal of at most 76 digits")
    return _Pieces(out, edges)


def _json_values(column: pa.Array) -> _Pieces:
    texts = column.to_pylist()
    return _joined([b"\xc0" if text is None else _packed(_json(row, text)) for row, text in enumerate(texts)])


def _json(row: int, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        raise _Unfit(row, "which is not JSON") from None


def _documents(column: pa.Array) -> _Pieces:
    return _joined([_packed(_plain(value, column.type)) for value in column.to_pylist()])


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Convert a value from Arrow, which returns a map as a list of pairs, to plain dicts and lists."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value}
    if pa.types.is_struct(kind):
        return {each.name: _plain(value[each.name], each.type) for each in kind}
    if pa.types.is_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value


def _packed(value: Any) -> bytes:
    try:
        return pack(value)
    except LocalProtocolError as error:
        raise CannotWrite(f"cannot encode document: {error.message}") from error


def _joined(pieces: Sequence[bytes]) -> _Pieces:
    edges: Cells = np.zeros(len(pieces) + 1, np.int64)
    edges[1:] = np.cumsum([len(piece) for piece in pieces])
    return _Pieces(np.frombuffer(b"".join(pieces), np.uint8), edges)
