"""Rows as YAML documents, in the format of `tt cat`: HEADER and BODY, tuples in flow style.

Has its own emitter: the types in a log are known, and a general emitter would take ten times as long per row. The text
is valid YAML 1.1 and 1.2. Strings are always quoted, so that none is mistaken for a number or a date; bytes, and
strings that are not UTF-8, are `!!binary`. With names, tuples and keys are maps of field names, and operations name
their field. Strips of rows are formatted as columns, their bodies by the kernels of `flow_text`; rows that the kernels
do not support are formatted one at a time from their `Record`.
"""

from __future__ import annotations

import datetime
import math
import re
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from flowstone.box.schema import SpaceDefinition
from flowstone.history.log_reading import Piece
from flowstone.history.records import Record, Records, alone, header_of, key_names, strips, transaction_numbers
from flowstone.history.selection import Mask
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import RequestType
from flowstone.iproto.extensions import Datetime, ErrorStack, Extension, decimal_text
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Bytes, Cells
from flowstone.iproto.slab import Slab
from flowstone.text.flow_shapes import HAS_INDEX_BASE, HAS_INDEX_ID, STRANGE, Shape
from flowstone.text.flow_text import flow_texts
from flowstone.text.flow_text_kernels import body_marks

_CHANGES = [
    kind.value
    for kind in (
        RequestType.INSERT,
        RequestType.REPLACE,
        RequestType.UPDATE,
        RequestType.DELETE,
        RequestType.UPSERT,
    )
]
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = frozenset("null true false yes no on off y n".split())
"""Plain scalars that some YAML parsers do not read as strings."""

KEY_SIZE_MAX = 1000
"""Maximum length of a simple key. A longer key needs `?`: YAML parsers look at most 1024 characters ahead."""


def yaml_documents(records: Records, *, names: bool = True) -> Iterator[str]:
    """Yield texts of many documents, one document per row, with a comment before a transaction of several rows."""
    slab: Slab | None = None
    number = -1
    waiting: list[str] = []
    announcement: int | None = None
    for strip in strips(records.pieces):
        cells = strip.slab.cells[:, strip.rows]
        documents = _documents(strip, cells, names)
        tsns = np.where(alone(cells), -1, cells[rows_of.TSN]).tolist()
        of_slab = transaction_numbers(strip.slab)
        numbers = of_slab[strip.rows]
        texts: list[str] = []
        for start, end in pairwise([0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(documents)]):
            if start or strip.slab is not slab or numbers[0] != number:
                texts += _announced(waiting, announcement)
                waiting, announcement = [], tsns[start] if tsns[start] >= 0 else None
            waiting += documents[start:end]
        slab, number = strip.slab, int(numbers[-1])
        # Yield complete transactions before reading the next strip, which may fail.
        if number not in of_slab[strip.rows[-1] + 1 : strip.rows[-1] + 2]:
            texts += _announced(waiting, announcement)
            waiting = []
        yield "".join(texts)
    if waiting:
        yield "".join(_announced(waiting, announcement))


def _announced(documents: list[str], tsn: int | None) -> list[str]:
    if tsn is None or not documents:
        return documents
    count = f"{len(documents)} rows" if len(documents) > 1 else "1 of its rows"
    return [f"# transaction {tsn}: {count}\n", *documents]


def _documents(strip: Piece, cells: Cells, names: bool) -> list[str]:
    """Return the document of each row of the strip: built from columns, or by `yaml_document` for rare content."""
    parts = body_parts(strip, cells, Shape.MAP if names else Shape.LIST)
    heads = _headers(cells)
    documents = [head + body for head, body in zip(heads, _bodies(strip, cells, parts, names), strict=True)]
    for at, record in zip(parts.rare.tolist(), Records([replace(strip, rows=strip.rows[parts.rare])]), strict=True):
        documents[at] = yaml_document(record, names=names)
    return documents


def _headers(cells: Cells) -> list[str]:
    lines = (rows_of.FLAGS, rows_of.REPLICA_ID, rows_of.GROUP_ID, rows_of.TYPE)
    constant = zip(*(cells[line].tolist() for line in lines), alone(cells).tolist(), strict=True)
    lsns, tsns = cells[rows_of.LSN].tolist(), cells[rows_of.TSN].tolist()
    stamps = np.ascontiguousarray(cells[rows_of.TIMESTAMP]).view(np.float64).tolist()
    return [
        (f"---\nHEADER:\n  lsn: {lsn}\n" if lsn else "---\nHEADER:\n")
        + _constant(*which)
        + (_stamp(stamp) if which[4] else f"  tsn: {tsn}\n{_stamp(stamp)}")
        for lsn, tsn, which, stamp in zip(lsns, tsns, constant, stamps, strict=True)
    ]


@lru_cache(maxsize=1024)
def _constant(flags: int, replica_id: int, group_id: int, kind: int, is_alone: bool) -> str:
    """Return the part of a header between LSN and TSN, which many rows share."""
    row = Row(kind, replica_id=replica_id, group_id=group_id, flags=flags, lsn=0, tsn=0 if is_alone else 1)
    return "".join(
        f"  {name}: {value if name == 'type' else yaml_value(value)}\n"
        for name, value in header_of(Record(row, {}, None, (0, 0)))
        if name != "tsn"
    )


@lru_cache(maxsize=1024)
def _stamp(timestamp: float) -> str:
    return f"  timestamp: {yaml_value(timestamp)}{_when(timestamp)}\n" if timestamp else ""


def _bodies(strip: Piece, cells: Cells, parts: YamlParts, names: bool) -> list[str]:
    marks, indexes, bases = parts.marks.tolist(), cells[rows_of.INDEX_ID].tolist(), cells[rows_of.INDEX_BASE].tolist()
    heads = {space_id: _body_head(space_id, strip.schema.get(space_id)) for space_id in parts.space_ids}
    texts = []
    for at, space_id in enumerate(cells[rows_of.SPACE_ID].tolist()):
        key, values, operations, mark = parts.key[at], parts.tuple[at], parts.operations[at], marks[at]
        text = heads.get(space_id, "")
        if mark & HAS_INDEX_ID:
            text += f"  index_id: {indexes[at]}\n"
        # Named fields need no index base.
        if mark & HAS_INDEX_BASE and not (operations and names and strip.schema.get(space_id) is not None):
            text += f"  index_base: {bases[at]}\n"
        if key:
            text += f"  key: {key}\n"
        if values:
            text += f"  tuple: {values}\n"
        texts.append(f"{text}  operations: {operations}\n" if operations else text)
    return texts


def _body_head(space_id: int, space: SpaceDefinition | None) -> str:
    name = f"  space: {yaml_value(space.name)}\n" if space is not None else ""
    return f"BODY:\n  space_id: {space_id}\n{name}"


@dataclass
class YamlParts:
    """The texts of the bodies in a strip, one entry per row; "" if a row lacks the part, or is rare."""

    key: list[str]
    tuple: list[str]
    operations: list[str]
    marks: Cells
    space_ids: list[int]
    rare: Cells
    """Numbers of the rows that must be formatted from their record instead."""


def body_parts(strip: Piece, cells: Cells, shape: Shape) -> YamlParts:
    """Return the texts of keys, tuples (in `shape`) and operations, with field names unless `shape` is LIST."""
    count, buf = cells.shape[1], strip.slab.buf
    marks: Cells = np.empty(count, np.int64)
    body_marks(buf, cells[rows_of.BODY_AT], cells[rows_of.ROW_END], marks)
    kinds, space_ids = cells[rows_of.TYPE], cells[rows_of.SPACE_ID]
    usual = np.isin(kinds, _CHANGES) & (marks & STRANGE == 0) & (space_ids >= 0)
    keys, tuples, operations = (
        cells[[start, end]]
        for start, end in (
            (rows_of.KEY_AT, rows_of.KEY_END),
            (rows_of.TUPLE_AT, rows_of.TUPLE_END),
            (rows_of.OPS_AT, rows_of.OPS_END),
        )
    )
    if shape is not Shape.LIST:
        updates = kinds == RequestType.UPDATE
        operations[:, updates], tuples[:, updates] = tuples[:, updates], -1
    known = np.unique(space_ids[usual]).tolist()
    parts = YamlParts([""] * count, [""] * count, [""] * count, marks, known, np.empty(0, np.int64))
    bases = cells[rows_of.INDEX_BASE]
    for space_id in known:
        space = strip.schema.get(space_id) if shape is not Shape.LIST else None
        fields = space.field_names if space is not None else ()
        here = usual & (space_ids == space_id)
        form = Shape.LIST if space is None else shape
        _write(parts.tuple, buf, tuples, here, form, [f"{yaml_key(name)}: " for name in fields])
        form = Shape.LIST if shape is Shape.LIST else Shape.OPERATIONS
        _write(parts.operations, buf, operations, here, form, [yaml_value(name) for name in fields], bases)
        with_key = here & (keys[0] >= 0)
        for index_id in np.unique(cells[rows_of.INDEX_ID, with_key]).tolist():
            named = key_names(space, index_id) if space is not None else []
            chosen = with_key & (cells[rows_of.INDEX_ID] == index_id)
            form = Shape.LIST if space is None else Shape.MAP
            _write(parts.key, buf, keys, chosen, form, [f"{yaml_key(name)}: " for name in named])
    for texts, places in ((parts.key, keys), (parts.tuple, tuples), (parts.operations, operations)):
        usual &= (places[0] < 0) | np.fromiter(map(bool, texts), np.bool_, count)
    parts.rare = np.flatnonzero(~usual)
    return parts


def _write(
    texts: list[str],
    buf: Bytes,
    places: Cells,
    chosen: Mask,
    shape: Shape,
    names: list[str],
    bases: Cells | None = None,
) -> None:
    """Set `texts` for the chosen rows that have a value at `places`."""
    rows = np.flatnonzero(chosen & (places[0] >= 0))
    if not len(rows):
        return
    found = flow_texts(buf, places[0, rows], places[1, rows], shape, names, None if bases is None else bases[rows])
    if len(rows) == len(texts):
        texts[:] = found
    else:
        for row, text in zip(rows.tolist(), found, strict=True):
            texts[row] = text


def yaml_document(record: Record, *, names: bool = True) -> str:
    """Return the document of one row, with a newline at its end."""
    lines = ["---", "HEADER:"]
    for name, value in header_of(record):
        lines.append(f"  {name}: {value if name == 'type' else yaml_value(value)}")
    if record.row.timestamp:
        lines[-1] += _when(record.row.timestamp)
    body = record.named_body() if names else record.plain_body()
    if body:
        lines.append("BODY:")
        lines += [f"  {yaml_key(name)}: {yaml_value(value)}" for name, value in body.items()]
    lines.append("")
    return "\n".join(lines)


def _when(timestamp: float) -> str:
    """Return a comment with the timestamp as date and time; "" if it is out of range."""
    try:
        return f"  # {datetime.datetime.fromtimestamp(timestamp, datetime.UTC).isoformat()}"
    except (ValueError, OverflowError, OSError):
        return ""


def yaml_key(key: object) -> str:
    """Return the text of a map key."""
    if type(key) is str:
        return _named_key(key)
    text = yaml_value(key)
    return f"? {text} " if text[0] in "[{" else text


@lru_cache(maxsize=1024)
def _named_key(key: str) -> str:
    if len(key) < KEY_SIZE_MAX and _PLAIN_KEY.fullmatch(key) and key.lower() not in _WORDS:
        return key
    text = _string(key)
    return text if len(text) < KEY_SIZE_MAX else f"? {text} "


def yaml_value(value: Any) -> str:
    """Return the text of a value, on one line."""
    write = _WRITERS.get(type(value))
    return write(value) if write is not None else _string(str(value))


def _array(values: Iterable[Any]) -> str:
    return f"[{', '.join([yaml_value(value) for value in values])}]"


def _map(values: dict[Any, Any]) -> str:
    return "{" + ", ".join([f"{yaml_key(key)}: {yaml_value(value)}" for key, value in values.items()]) + "}"


def _errors(stack: ErrorStack) -> str:
    return _array({"type": error.type, "message": error.message, "code": error.code} for error in stack.errors)


def _double(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # YAML 1.1 reads 1e+300 as a string: a number with an exponent needs a decimal point.
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _string(text: str) -> str:
    if text.isprintable():
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    try:
        text.encode()
    except UnicodeEncodeError:
        return _binary(text.encode("utf-8", "surrogateescape"))
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    code = ord(char)
    return _ESCAPES.get(char) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )


_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}


def _binary(data: bytes) -> str:
    return f'!!binary "{b64encode(data).decode()}"'


_WRITERS: dict[type, Callable[[Any], str]] = {
    type(None): lambda _: "null",
    bool: lambda value: "true" if value else "false",
    int: str,
    float: _double,
    str: _string,
    bytes: _binary,
    tuple: _array,
    list: _array,
    dict: _map,
    Decimal: decimal_text,
    uuid.UUID: str,
    Datetime: str,
    ErrorStack: _errors,
    Extension: lambda value: _map({"ext": value.code, "data": value.data}),
}
"""Writers by type; a value of any other type, such as an interval, is written as the string of `str()`."""
