"""Spaces and their indexes: box.schema.space.*, box.schema.index.* and space:truncate(), as in schema.lua."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flowstone.box import system
from flowstone.box.ddl import schema_rows as rows
from flowstone.box.ddl.constraint_forms import stored_constraint, stored_foreign_key, with_stored_constraints
from flowstone.box.ddl.definition_checks import SPACE_ID_MAX
from flowstone.box.ddl.sequence_functions import create_sequence, drop_sequence, find_sequence
from flowstone.box.ddl.stored_forms import check_options, illegal, lua_type, resolve_field, stored_format, stored_parts
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.constraints import CONSTRAINT, FOREIGN_KEY
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack

_SPACE_OPTIONS: Final = {
    "if_not_exists": "boolean",
    "engine": "string",
    "id": "number",
    "field_count": "number",
    "user": "string, number",
    "format": "table",
    "is_local": "boolean",
    "temporary": "boolean",
    "is_sync": "boolean",
}
_CONSTRAINT_OPTIONS: Final = {CONSTRAINT: "string, table", FOREIGN_KEY: "table"}
_STORED_INDEX_OPTIONS: Final = {
    "unique": "boolean",
    "dimension": "number",
    "distance": "string",
    "run_count_per_level": "number",
    "run_size_ratio": "number",
    "range_size": "number",
    "page_size": "number",
    "bloom_fpr": "number",
    "func": "number, string",
}
_ALTER_OPTIONS: Final = {
    "id": "number",
    "name": "string",
    "type": "string",
    "parts": "table",
    "sequence": "boolean, number, string, table",
    **_STORED_INDEX_OPTIONS,
}
_CREATE_OPTIONS: Final = {**_ALTER_OPTIONS, "if_not_exists": "boolean"}
_DEFAULT_PARTS: Final = {"rtree": (2, "array"), "bitset": (2, "unsigned")}
_VINYL_OPTIONS: Final = {
    "page_size": 8192,
    "run_count_per_level": 2,
    "run_size_ratio": 3.5,
    "bloom_fpr": 0.05,
}
"""Defaults of box.cfg that servers write into definitions of vinyl indexes."""


def create_space(txn: BoxTransaction, name: str, /, **options: Any) -> tuple[EngineSpace, str]:
    """Create a space; return it and "created", or the existing space and "not created"."""
    if not isinstance(name, str):
        raise illegal("name should be a string")
    options = _given(options)
    has_constraints = txn.box.dialect.has_constraints
    check_options(options, _SPACE_OPTIONS | (_CONSTRAINT_OPTIONS if has_constraints else {}))
    if name in txn.box.names:
        if options.get("if_not_exists"):
            return txn.space(name), "not created"
        raise errors.SpaceExists(f"Space '{name}' already exists")
    space_id = options["id"] if "id" in options else _new_space_id(txn)
    owner = _owner(txn, options.get("user"))
    format = stored_format(options.get("format", ()), lambda text: _collation_id(txn, text))
    flags: dict[str, Any] = {}
    if options.get("is_local"):
        flags["group_id"] = 1
    if options.get("temporary"):
        flags["temporary"] = True
    if "is_sync" in options:
        flags["is_sync"] = options["is_sync"]
    if has_constraints:
        with_stored_constraints(txn, (space_id, name), format)
    if CONSTRAINT in options:
        flags[CONSTRAINT] = stored_constraint(txn, options[CONSTRAINT])
    if FOREIGN_KEY in options:
        flags[FOREIGN_KEY] = stored_foreign_key(txn, (space_id, name), options[FOREIGN_KEY], is_complex=True)
    engine, field_count = options.get("engine", "memtx"), options.get("field_count", 0)
    rows.insert(txn, "_space", space_id, owner, name, engine, field_count, flags, format)
    return txn.space(space_id), "created"


def _new_space_id(txn: BoxTransaction) -> int:
    if txn.box.dialect.has_max_id:
        row = rows.update(txn, "_schema", ("max_id",), ("+", 2, 1))
        if row is None:
            highest = max(txn.box.spaces, default=0)
            row = ("max_id", max(highest, system.FIRST_USER_SPACE_ID - 1) + 1)
            rows.insert(txn, "_schema", *row)
        counted: int = row[1]
        return counted
    highest = max(*txn.box.spaces, system.FIRST_USER_SPACE_ID - 1)
    if highest < SPACE_ID_MAX:
        return highest + 1
    return next(number for number in range(system.FIRST_USER_SPACE_ID, SPACE_ID_MAX) if number not in txn.box.spaces)


def _owner(txn: BoxTransaction, user: str | int | None) -> int:
    if user is None:
        return txn.user
    row = rows.get(txn, "_vuser", user, index=rows.BY_NAME if isinstance(user, str) else 0)
    if row is None:
        raise errors.NoSuchUser(f"User '{user}' is not found")
    owner: int = row[0]
    return owner


def _collation_id(txn: BoxTransaction, name: str) -> int | None:
    row = rows.get(txn, "_vcollation", name, index=1)
    return None if row is None else int(row[0])


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not nil: in Lua a nil option is absent."""
    return {name: value for name, value in options.items() if value is not None}


def drop_space(txn: BoxTransaction, space: int | str, *, if_exists: bool = False) -> None:
    """Drop the space with its indexes, its generated sequence and all privileges on it."""
    if if_exists and not _is_there(txn, space):
        return
    space_id = _space(txn, space).id
    _drop_space_sequence(txn, space_id)
    for row in rows.select(txn, "_trigger", space_id, index=1):
        rows.delete(txn, "_trigger", row[0])
    if txn.box.dialect.has_max_id:
        for row in rows.select(txn, "_fk_constraint", space_id, index=1):
            rows.delete(txn, "_fk_constraint", row[0], space_id)
        for row in rows.select(txn, "_ck_constraint", space_id):
            rows.delete(txn, "_ck_constraint", space_id, row[1])
    for row in rows.select(txn, "_func_index", space_id):
        rows.delete(txn, "_func_index", space_id, row[1])
    for row in reversed(rows.select(txn, "_vindex", space_id)):
        rows.delete(txn, "_index", row[0], row[1])
    rows.revoke_all(txn, "space", space_id)
    rows.delete(txn, "_truncate", space_id)
    rows.delete(txn, "_space", space_id)


def _space(txn: BoxTransaction, space: int | str) -> EngineSpace:
    if not _is_there(txn, space):
        name = space if isinstance(space, str) else f"#{space}"
        raise errors.NoSuchSpace(f"Space '{name}' does not exist")
    return txn.space(space)


def _is_there(txn: BoxTransaction, space: object) -> bool:
    return space in txn.box.names if isinstance(space, str) else type(space) is int and space in txn.box.spaces


def _drop_space_sequence(txn: BoxTransaction, space_id: int) -> None:
    row = rows.delete(txn, "_space_sequence", space_id)
    if row is not None and row[2]:
        drop_sequence(txn, row[1])


def rename_space(txn: BoxTransaction, space: int | str, name: str) -> None:
    if not isinstance(name, str):
        raise illegal("space_name should be a string")
    rows.update(txn, "_space", (_space(txn, space).id,), ("=", 3, name))


def format_space(txn: BoxTransaction, space: int | str, format: Any) -> None:
    """Change the format of the space; existing tuples must match it."""
    if lua_type(format) != "table":
        raise illegal("format should be a table")
    stored = stored_format(format, lambda text: _collation_id(txn, text))
    there = _space(txn, space)
    if txn.box.dialect.has_constraints:
        with_stored_constraints(txn, (there.id, there.name), stored)
    rows.update(txn, "_space", (there.id,), ("=", 7, stored))


def truncate(txn: BoxTransaction, space: int | str) -> None:
    """Delete all tuples of the space."""
    truncated = _space(txn, space)
    row, operations = pack((truncated.id, 1)), pack((("+", 1, 1),))
    statements.upsert(txn, txn.space(system.TRUNCATE_ID), row, operations)
    if truncated.definition.is_local or truncated.definition.is_temporary:
        # Other members have their own data in this space, so the row must be as local as the space.
        txn.statements[-1] = txn.statements[-1]._replace(space=truncated)


# --- indexes --------------------------------------------------------------------------------------


def create_index(txn: BoxTransaction, space: int | str, name: str, /, **options: Any) -> tuple[EngineIndex, str]:
    """Create an index; return it and "created", or the existing index and "not created"."""
    if not isinstance(name, str):
        raise illegal("name should be a string")
    options = _given(options)
    check_options(options, _CREATE_OPTIONS)
    owner = _space(txn, space)
    kind = options.get("type", "tree")
    format = _format(txn, owner)
    if owner.definition.engine == "vinyl":
        options = {**_VINYL_OPTIONS, **options}
    if rows.get(txn, "_vindex", owner.id, name, index=rows.BY_NAME) is not None:
        if options.get("if_not_exists"):
            return owner.index(name), "not created"
        raise errors.IndexExists(f"Index '{name}' already exists")
    index_id = options["id"] if "id" in options else _new_index_id(txn, owner)
    parts = options["parts"] if "parts" in options else _default_parts(format, kind)
    stored = _stored_parts(txn, format, parts)
    unique = kind not in _DEFAULT_PARTS
    stored_options = {option: options[option] for option in _STORED_INDEX_OPTIONS if option in options}
    stored_options.setdefault("unique", unique)
    if isinstance(stored_options.get("func"), str):
        stored_options["func"] = _function_id(txn, stored_options["func"])
    numbering = _prepare_sequence(txn, format, stored, options.get("sequence"), owner, index_id, name)
    rows.insert(txn, "_index", owner.id, index_id, name, kind, stored_options, stored)
    _attach_sequence(txn, owner.id, numbering)
    if "func" in stored_options:
        rows.insert(txn, "_func_index", owner.id, index_id, stored_options["func"])
    return txn.space(owner.id).index(name), "created"


def _format(txn: BoxTransaction, space: EngineSpace) -> tuple[dict[str, Any], ...]:
    row = rows.get(txn, "_vspace", space.id)
    if row is None:
        raise errors.NoSuchSpace(f"Space '#{space.id}' does not exist")
    format: tuple[dict[str, Any], ...] = row[6]
    return format


def _stored_parts(txn: BoxTransaction, format: tuple[dict[str, Any], ...], parts: Any) -> list[Any]:
    inherits = txn.box.dialect is Dialect.V2_11
    return stored_parts(format, parts, lambda text: _collation_id(txn, text), inherits_collation=inherits)


def _new_index_id(txn: BoxTransaction, space: EngineSpace) -> int:
    indexes = rows.select(txn, "_vindex", space.id)
    return indexes[-1][1] + 1 if indexes else 0


def _default_parts(format: tuple[dict[str, Any], ...], kind: str) -> tuple[Any, ...]:
    field, type = _DEFAULT_PARTS.get(kind, (1, "unsigned"))
    if len(format) >= field and format[field - 1].get("type", "any") != "any":
        return ((field, format[field - 1]["type"]),)
    return (field, type)


def _function_id(txn: BoxTransaction, name: str) -> int:
    row = rows.get(txn, "_func", name, index=rows.BY_NAME)
    if row is None:
        raise errors.NoSuchFunction(f"Function '{name}' does not exist")
    function_id: int = row[0]
    return function_id


def drop_index(txn: BoxTransaction, space: int | str, index: int | str) -> None:
    owner = _space(txn, space)
    index_id = owner.index(index).definition.id
    if index_id == 0:
        _drop_space_sequence(txn, owner.id)
    for row in rows.select(txn, "_func_index", owner.id, index_id):
        rows.delete(txn, "_func_index", row[0], row[1])
    rows.delete(txn, "_index", owner.id, index_id)


def rename_index(txn: BoxTransaction, space: int | str, index: int | str, name: str) -> None:
    if not isinstance(name, str):
        raise illegal("name should be a string")
    owner = _space(txn, space)
    rows.update(txn, "_index", (owner.id, owner.index(index).definition.id), ("=", 3, name))


def alter_index(txn: BoxTransaction, space: int | str, index: int | str, /, **options: Any) -> None:
    """Change the given `options` of an index; the others stay as they are."""
    options = _given(options)
    owner = _space(txn, space)
    index_id = owner.index(index).definition.id
    check_options(options, _ALTER_OPTIONS)
    if not options:
        return
    if "id" in options:
        _renumber(txn, owner, index_id, options)
        return
    row = rows.get(txn, "_index", owner.id, index_id)
    assert row is not None
    name: str = options["name"] if "name" in options else row[2]
    kind = options.get("type", row[3])
    stored_options = row[4] | {option: options[option] for option in _STORED_INDEX_OPTIONS if option in options}
    format, parts = _format(txn, owner), row[5]
    if "parts" in options:
        parts = _stored_parts(txn, format, options["parts"])
    numbering = _prepare_sequence(txn, format, parts, options.get("sequence"), owner, index_id, name)
    rows.replace(txn, "_index", owner.id, index_id, name, kind, stored_options, parts)
    _attach_sequence(txn, owner.id, numbering)


def _renumber(txn: BoxTransaction, space: EngineSpace, index_id: int, options: dict[str, Any]) -> None:
    others = [option for option in options if option not in ("id", "name", "type")]
    if others:
        raise errors.ProcLua("Don't know how to update both id and " + " ".join(others))
    operations = [
        ("=", number, options[name]) for number, name in ((2, "id"), (3, "name"), (4, "type")) if name in options
    ]
    rows.update(txn, "_index", (space.id, index_id), *operations)


# --- sequences of spaces --------------------------------------------------------------------------


class _Numbering:
    """A change of a space's sequence: the new `row` of `_space_sequence`, and the id of a sequence to drop."""

    def __init__(self, row: tuple[Any, ...] | None, dropped: int | None) -> None:
        self.row = row
        self.dropped = dropped


def _prepare_sequence(
    txn: BoxTransaction,
    format: tuple[dict[str, Any], ...],
    parts: Any,
    given: Any,
    space: EngineSpace,
    index_id: int,
    name: str,
) -> _Numbering | None:
    """Check the option `sequence` and detach the old sequence, before the index changes."""

    def refused(reason: str) -> errors.TarantoolError:
        return errors.ModifyIndex(f"Can't create or modify index '{name}' in space '{space.name}': {reason}")

    if index_id != 0:
        if not given:
            return None
        raise refused("sequence cannot be used with a secondary key")
    old = rows.get(txn, "_space_sequence", space.id)
    if given is None:
        if old is not None and len(old) > 3:
            _check_place(parts, old[3], old[4], refused)
        return None
    row = None if given is False else _new_row(txn, format, parts, given, space, old, refused)
    if old is not None:
        rows.delete(txn, "_space_sequence", space.id)
    dropped = old[1] if old is not None and old[2] and (row is None or row[1] != old[1]) else None
    return _Numbering(row, dropped)


def _new_row(
    txn: BoxTransaction,
    format: tuple[dict[str, Any], ...],
    parts: Any,
    given: Any,
    space: EngineSpace,
    old: rows.Row | None,
    refused: Any,
) -> tuple[Any, ...]:
    if given is True:
        sequence_id, field, path = None, None, None
    elif isinstance(given, Mapping):
        sequence_id, field, path = given.get("id"), given.get("field"), None
    else:
        sequence_id, field, path = given, None, None
    is_generated = False
    if sequence_id is not None:
        sequence_id = _attachable(txn, sequence_id, space)
    if field is not None:
        field, path = resolve_field(format, field, "sequence field")
    if old is not None:
        if sequence_id is None and old[2]:
            sequence_id, is_generated = old[1], True
        if field is None:
            field, path = old[3], old[4]
    if field is None:
        field, path, kind = _place(parts[0])
        _check_type(kind, refused)
    else:
        _check_place(parts, field, path or "", refused)
    if sequence_id is None:
        sequence_id = create_sequence(txn, f"{space.name}_seq").definition.id
        is_generated = True
    return space.id, sequence_id, is_generated, field, path or ""


def _attachable(txn: BoxTransaction, name: str | int, space: EngineSpace) -> int:
    sequence_id = find_sequence(txn, name)
    if sequence_id is None:
        raise errors.NoSuchSequence(f"Sequence '{name}' does not exist")
    attached = rows.select(txn, "_space_sequence", sequence_id, index=1)
    if attached and attached[0][2]:
        raise errors.AlterSpace(f"Can't modify space '{space.name}': can not attach generated sequence")
    return sequence_id


def _place(part: Any) -> tuple[int, str, str]:
    """Return field, path and type of a stored part."""
    if isinstance(part, Mapping):
        return part["field"], part.get("path") or "", part["type"]
    return part[0], "", part[1]


def _check_place(parts: Any, field: int, path: str, refused: Any) -> None:
    for part in parts:
        part_field, part_path, kind = _place(part)
        if (part_field, part_path) == (field, path):
            _check_type(kind, refused)
            return
    raise refused("sequence field must be a part of the index")


def _check_type(kind: str, refused: Any) -> None:
    if kind not in ("integer", "unsigned"):
        raise refused("sequence cannot be used with a non-integer key")


def _attach_sequence(txn: BoxTransaction, space_id: int, numbering: _Numbering | None) -> None:
    if numbering is None:
        return
    if numbering.row is not None:
        rows.insert(txn, "_space_sequence", *numbering.row)
    if numbering.dropped is not None:
        drop_sequence(txn, numbering.dropped)
