"""Rows as Lua statements that a Tarantool server can run, in the format of `tarantoolctl cat --format=lua`.

Unlike the output of `tarantoolctl`, these statements reproduce the same data: null is `box.NULL`; decimals, UUIDs and
datetimes are created by their modules; integers beyond 2^53 and doubles without a fraction keep their type; maps stay
maps. A transaction of several rows is enclosed in `box.begin()` and `box.commit()`. Rows that change no space have no
statement. Uses `records`. A value that Lua cannot create (an extension of unknown type) is an error.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from flowstone.errors import FlowstoneError
from flowstone.history.records import Record
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.extensions import Datetime, ErrorStack, Interval, decimal_text

EXACT_MAX = 1 << 53
"""Lua's numbers are doubles: an integer from here on needs a suffix (LL or ULL)."""

LUA_BASE = 1

_FUNCTIONS = {
    RequestType.INSERT.value: "insert",
    RequestType.REPLACE.value: "replace",
    RequestType.UPDATE.value: "update",
    RequestType.DELETE.value: "delete",
    RequestType.UPSERT.value: "upsert",
}


class NoLuaForm(FlowstoneError):
    """A value cannot be created in Lua."""


def lua_statements(records: Iterable[Record]) -> Iterator[str]:
    """Yield one line per row that changes a space; the lines of a transaction as one string."""
    waiting: list[str] = []
    transaction = None
    for record in records:
        if waiting and record.transaction != transaction:
            yield _together(waiting)
            waiting = []
        transaction = record.transaction
        line = lua_statement(record)
        if line is not None:
            waiting.append(line)
    if waiting:
        yield _together(waiting)


def _together(lines: list[str]) -> str:
    return "".join(lines) if len(lines) == 1 else "".join(("box.begin()\n", *lines, "box.commit()\n"))


def lua_statement(record: Record) -> str | None:
    """Return the statement of one row; None if the row changes no space."""
    body, kind = record.body, record.row.type
    if kind not in _FUNCTIONS or Key.SPACE_ID not in body:
        return None
    index_id = body.get(Key.INDEX_ID, 0)
    where = f"box.space[{body[Key.SPACE_ID]}]" + (f".index[{index_id}]" if index_id else "")
    try:
        arguments = ", ".join(map(lua_value, _arguments(record)))
    except NoLuaForm as error:
        row = record.row
        raise NoLuaForm(f"row {row.lsn} of replica {row.replica_id}: {error.message}", hint=error.hint) from None
    return f"{where}:{_FUNCTIONS[kind]}({arguments})\n"


def _arguments(record: Record) -> list[Any]:
    body = record.body
    match record.row.type:
        case RequestType.UPDATE:
            return [body.get(Key.KEY, ()), _operations(body.get(Key.TUPLE, ()), body.get(Key.INDEX_BASE, 0))]
        case RequestType.DELETE:
            return [body.get(Key.KEY, ())]
        case RequestType.UPSERT:
            operations = _operations(body.get(Key.OPS, ()), body.get(Key.INDEX_BASE, 0))
            return [body.get(Key.TUPLE, ()), operations]
        case _:
            return [body.get(Key.TUPLE, ())]


def _operations(operations: Any, base: int) -> Any:
    """Convert field numbers and splice offsets to Lua's counting from 1; keep negative numbers and names.

    Malformed operations are kept as they are: a server rejects them.
    """
    if not isinstance(operations, tuple):
        return operations

    def moved(number: object) -> object:
        return number - base + LUA_BASE if isinstance(number, int) and number >= 0 else number

    shifted: list[Any] = []
    for operation in operations:
        if not isinstance(operation, tuple) or len(operation) < 2:
            shifted.append(operation)
            continue
        what, field, *rest = operation
        if what == ":" and rest:
            rest[0] = moved(rest[0])
        shifted.append([what, moved(field), *rest])
    return shifted


def lua_value(value: Any) -> str:
    """Return a Lua expression for `value`."""
    if value is None or value is True or value is False:
        return {None: "box.NULL", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return lua_string(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return _double(value)
    if isinstance(value, tuple | list):
        return "{" + ", ".join(f"[{number}] = {lua_value(item)}" for number, item in enumerate(value, 1)) + "}"
    if isinstance(value, Mapping):
        return _map(value)
    if isinstance(value, Decimal):
        return f"require('decimal').new('{decimal_text(value)}')"
    if isinstance(value, uuid.UUID):
        return f"require('uuid').fromstr('{value}')"
    return _newer(value)


def _newer(value: object) -> str:
    """Return a Lua expression for a type that only servers since 2.10 (bytes: since 3.0) support."""
    if isinstance(value, bytes):
        return f"require('varbinary').new({lua_string(value)})"
    if isinstance(value, Datetime):
        zone = f", tzoffset = {value.tz_offset}" if value.tz_offset else ""
        return f"require('datetime').new({{timestamp = {value.seconds}, nsec = {value.nsec}{zone}}})"
    if isinstance(value, Interval):
        names = ("year", "month", "week", "day", "hour", "min", "sec", "nsec")
        amounts = (value.year, value.month, value.week, value.day, value.hour, value.minute, value.second, value.nsec)
        parts = ", ".join(f"{name} = {amount}" for name, amount in zip(names, amounts, strict=True) if amount)
        return f"require('datetime').interval.new({{{parts}}})"
    if isinstance(value, ErrorStack) and value.errors:
        error = value.errors[0]
        return f"box.error.new({{code = {error.code}, reason = {lua_value(error.message)}}})"
    raise NoLuaForm(
        f"cannot represent {value!r} in Lua", hint="print the row as yaml or json, or replay it with flowstone play"
    )


def _integer(value: int) -> str:
    if abs(value) < EXACT_MAX:
        return str(value)
    if value >= 0:
        return f"{value}ULL"
    # Lua would parse -2^63 as the negation of 2^63, which does not fit into 64 bits.
    return f"{value}LL" if value > -(1 << 63) else "-9223372036854775807LL - 1LL"


def _double(value: float) -> str:
    if math.isnan(value):
        return "0/0"
    if math.isinf(value):
        return "1/0" if value > 0 else "-1/0"
    # Lua does not distinguish 1 from 1.0; without the cast the server would store an integer.
    return f"require('ffi').cast('double', {value!r})" if value.is_integer() else repr(value)


def _map(value: Mapping[Any, Any]) -> str:
    pairs = ", ".join(f"[{lua_value(key)}] = {lua_value(item)}" for key, item in value.items())
    if any(isinstance(key, str) for key in value):
        return f"{{{pairs}}}"
    # The server treats an empty table, or one with keys 1, 2, 3, as an array.
    return f"setmetatable({{{pairs}}}, {{__serialize = 'map'}})"


def lua_string(data: bytes) -> str:
    """Return a quoted Lua string: text as it is, other bytes as `\\xNN`."""
    try:
        return "'" + "".join(map(_escaped, data.decode())) + "'"
    except UnicodeDecodeError:
        return "'" + "".join(_escaped(chr(byte)) if byte < 0x80 else f"\\x{byte:02x}" for byte in data) + "'"


def _escaped(char: str) -> str:
    if char in "'\\":
        return "\\" + char
    if char.isprintable():
        return char
    return "\\n" if char == "\n" else "".join(f"\\x{byte:02x}" for byte in char.encode())
