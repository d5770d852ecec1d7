"""Sequences and functions: box.schema.sequence.*, box.sequence.* and box.schema.func.*, as in schema.lua."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from flowstone.box.ddl import schema_rows as rows
from flowstone.box.ddl.stored_forms import check_options, illegal
from flowstone.box.engine.sequence import INT64_MAX, INT64_MIN, Sequence, check_sequence
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import errors

_SEQUENCE_OPTIONS: Final = {
    "step": "number",
    "min": "number",
    "max": "number",
    "start": "number",
    "cache": "number",
    "cycle": "boolean",
}
_FUNCTION_OPTIONS: Final = {
    "setuid": "boolean",
    "language": "string",
    "body": "string",
    "is_deterministic": "boolean",
    "is_sandboxed": "boolean",
    "comment": "string",
    "param_list": "table",
    "returns": "string",
    "exports": "table",
    "opts": "table",
}


def create_sequence(txn: BoxTransaction, name: str, /, **options: Any) -> Sequence:
    if not isinstance(name, str):
        raise illegal("name should be a string")
    check_options(options, {**_SEQUENCE_OPTIONS, "if_not_exists": "boolean"})
    if find_sequence(txn, name) is not None:
        if options.get("if_not_exists"):
            return sequence(txn, name)
        raise errors.SequenceExists(f"Sequence '{name}' already exists")
    is_ascending = options.get("step", 1) > 0
    low, high = (1, INT64_MAX) if is_ascending else (INT64_MIN, -1)
    start = options.get("min", 1) if is_ascending else options.get("max", -1)
    values = {"step": 1, "min": low, "max": high, "start": start, "cache": 0, "cycle": False, **options}
    rows.auto_increment(txn, "_sequence", txn.user, name, *(values[option] for option in _SEQUENCE_OPTIONS))
    return sequence(txn, name)


def alter_sequence(txn: BoxTransaction, name: str | int, /, **options: Any) -> None:
    check_options(options, {**_SEQUENCE_OPTIONS, "name": "string"})
    row = _row(txn, name)
    if not options:
        return
    values = dict(zip(_SEQUENCE_OPTIONS, row[3:], strict=False)) | options
    new_name = options.get("name", row[2])
    rows.replace(txn, "_sequence", row[0], row[1], new_name, *(values[option] for option in _SEQUENCE_OPTIONS))


def drop_sequence(txn: BoxTransaction, name: str | int, *, if_exists: bool = False) -> None:
    sequence_id = find_sequence(txn, name)
    if sequence_id is None:
        if if_exists:
            return
        raise errors.NoSuchSequence(f"Sequence '{name}' does not exist")
    rows.revoke_all(txn, "sequence", sequence_id)
    rows.delete(txn, "_sequence_data", sequence_id)
    rows.delete(txn, "_sequence", sequence_id)


def find_sequence(txn: BoxTransaction, name: str | int) -> int | None:
    """Return the id of a sequence that the user can see, or None."""
    row = rows.get(txn, "_vsequence", name, index=rows.BY_NAME if isinstance(name, str) else 0)
    return None if row is None else int(row[0])


def _row(txn: BoxTransaction, name: str | int) -> rows.Row:
    row = rows.get(txn, "_vsequence", name, index=rows.BY_NAME if isinstance(name, str) else 0)
    if row is None:
        raise errors.NoSuchSequence(f"Sequence '{name}' does not exist")
    return row


def sequence(txn: BoxTransaction, name: str | int) -> Sequence:
    """Return the sequence with this name or id, even if the user cannot see it."""
    for found in txn.box.sequences.values():
        if name in (found.definition.name, found.definition.id):
            return found
    raise errors.NoSuchSequence(f"Sequence '{name}' does not exist")


def next_value(txn: BoxTransaction, name: str | int) -> int:
    """Return the next number of the sequence. Unlike a number taken by a space, it is logged."""
    numbers = sequence(txn, name)
    check_sequence(txn, numbers)
    value = numbers.next()
    _store(txn, numbers, value)
    return value


def current_value(txn: BoxTransaction, name: str | int) -> int:
    numbers = sequence(txn, name)
    check_sequence(txn, numbers)
    return numbers.current


def set_value(txn: BoxTransaction, name: str | int, value: int) -> None:
    numbers = sequence(txn, name)
    check_sequence(txn, numbers)
    _store(txn, numbers, value)


def reset_sequence(txn: BoxTransaction, name: str | int) -> None:
    """Reset the sequence to its start value."""
    numbers = sequence(txn, name)
    check_sequence(txn, numbers)
    numbers.set(None)
    with rows.as_admin(txn):
        rows.delete(txn, "_sequence_data", numbers.definition.id)


def _store(txn: BoxTransaction, numbers: Sequence, value: int) -> None:
    with rows.as_admin(txn):
        rows.replace(txn, "_sequence_data", numbers.definition.id, value)


def create_function(txn: BoxTransaction, name: str, /, *, time: int = 0, **options: Any) -> None:
    """Create a row of `_func`, so that EXECUTE on `name` can be granted. `time` is the current Unix time."""
    check_options(options, {**_FUNCTION_OPTIONS, "if_not_exists": "boolean"})
    if _find_function(txn, name) is not None:
        if options.get("if_not_exists"):
            return
        raise errors.FunctionExists(f"Function '{name}' already exists")
    now = datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    rows.auto_increment(
        txn,
        "_func",
        txn.user,
        name,
        int(options.get("setuid", False)),
        options.get("language", "lua").upper(),
        options.get("body", ""),
        "function",
        options.get("param_list", ()),
        options.get("returns", "any"),
        "none",
        "none",
        options.get("is_deterministic", False),
        options.get("is_sandboxed", False),
        True,
        options.get("exports", ("LUA",)),
        options.get("opts", {}),
        options.get("comment", ""),
        now,
        now,
    )


def drop_function(txn: BoxTransaction, name: str | int, *, if_exists: bool = False) -> None:
    function_id = _find_function(txn, name)
    if function_id is None:
        if if_exists:
            return
        raise errors.NoSuchFunction(f"Function '{name}' does not exist")
    rows.revoke_all(txn, "function", function_id)
    rows.delete(txn, "_func", function_id)


def function_exists(txn: BoxTransaction, name: str | int) -> bool:
    return _find_function(txn, name) is not None


def _find_function(txn: BoxTransaction, name: str | int) -> int | None:
    row = rows.get(txn, "_vfunc", name, index=rows.BY_NAME if isinstance(name, str) else 0)
    return None if row is None else int(row[0])
