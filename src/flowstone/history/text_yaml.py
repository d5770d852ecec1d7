"""Rows as YAML documents, in the shape of `tt cat`: HEADER and BODY, tuples in flow style.

An emitter of our own: what a log holds is known, and a general one would cost ten times as much per row. The text is
YAML 1.1 and 1.2 alike. Strings are always quoted, so none is mistaken for a number or a date; bytes, and strings that
are not UTF-8, are `!!binary`. With names, tuples and keys are maps of field names and operations name their field.
"""

from __future__ import annotations

import datetime
import math
import re
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import lru_cache
from itertools import groupby
from typing import Any

from flowstone.history.records import Record, header_of
from flowstone.iproto.extensions import Datetime, ErrorStack, Extension

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = frozenset("null true false yes no on off y n".split())
"""Plain scalars that some reader of YAML takes for something else than a string."""

KEY_SIZE_MAX = 1000
"""A longer key has to be announced: no reader looks further ahead than 1024 characters."""


def yaml_documents(records: Iterable[Record], *, names: bool = True) -> Iterator[str]:
    """One document per row. A transaction of several rows is announced before its first."""
    for _, together in groupby(records, lambda record: record.transaction):
        rows = list(together)
        if not rows[0].is_alone:
            count = f"{len(rows)} rows" if len(rows) > 1 else "1 of its rows"
            yield f"# transaction {rows[0].row.tsn}: {count}\n"
        for record in rows:
            yield yaml_document(record, names=names)


def yaml_document(record: Record, *, names: bool = True) -> str:
    """The document of one row, which ends with a newline."""
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
    """The moment in words: a log is read to find out what happened when."""
    try:
        return f"  # {datetime.datetime.fromtimestamp(timestamp, datetime.UTC).isoformat()}"
    except (ValueError, OverflowError, OSError):
        return ""


def yaml_key(key: object) -> str:
    """The text of a map's key."""
    if type(key) is str:
        return _named_key(key)
    text = yaml_value(key)
    return f"? {text} " if text[0] in "[{" else text


@lru_cache(maxsize=1024)
def _named_key(key: str) -> str:
    if _PLAIN_KEY.fullmatch(key) and key.lower() not in _WORDS:
        return key
    text = _string(key)
    return text if len(text) < KEY_SIZE_MAX else f"? {text} "


def yaml_value(value: Any) -> str:
    """The text of a value, on one line."""
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
    # YAML 1.1 takes 1e+300 for a string: a number with an exponent needs a point there.
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _string(text: str) -> str:
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
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
    Decimal: "{:f}".format,
    uuid.UUID: str,
    Datetime: str,
    ErrorStack: _errors,
    Extension: lambda value: _map({"ext": value.code, "data": value.data}),
}
"""By type; anything else, as an interval, is the string that it prints as."""
