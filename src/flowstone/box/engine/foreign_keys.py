"""Enforcement of foreign keys and check constraints (tuple_constraint_fkey.c of real servers).

When a child tuple is written, its parent tuple must exist; a parent tuple cannot be deleted while a child refers to it.
Lookups use the indexes as they are before the statement, one statement at a time. Recovery and joins trust their rows;
statements of clients and appliers are checked. Check functions cannot be run here: rows that a peer has accepted are
applied, and local writes are rejected.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flowstone.box.definitions import IndexDefinition, SpaceDefinition
from flowstone.box.engine.constraints import CheckConstraint, FieldId, ForeignKey
from flowstone.box.engine.paths import INDEX_BASE
from flowstone.iproto import errors
from flowstone.iproto.msgpack import unpack

if TYPE_CHECKING:
    from flowstone.box.box import Box
    from flowstone.box.engine.index import EngineIndex
    from flowstone.box.engine.space import EngineSpace, Values
    from flowstone.box.engine.transaction import BoxTransaction

EQ: Final = 0
_FIELD: Final = re.compile(r"Tuple field \[?(\d+)")


class Guards(NamedTuple):
    """Constraints on statements on a space. `referrers` are foreign keys of child spaces, with the child's id."""

    foreign_keys: tuple[ForeignKey, ...]
    checks: tuple[CheckConstraint, ...]
    referrers: tuple[tuple[int, ForeignKey], ...]


def guards_of(definition: SpaceDefinition, keys: dict[int, tuple[ForeignKey, ...]]) -> Guards | None:
    """Return the guards of a space, or None; `keys` holds all foreign keys by the id of the child space."""
    referrers = tuple(
        (child_id, key) for child_id, each in keys.items() for key in each if key.parent_id(child_id) == definition.id
    )
    if not (definition.foreign_keys or definition.checks or referrers):
        return None
    return Guards(definition.foreign_keys, definition.checks, referrers)


def is_enforced(txn: BoxTransaction) -> bool:
    """Return True unless the rows come from a log or a snapshot, or the dialect has no constraints."""
    box = txn.box
    return (txn.enforces_keys or not box.is_recovering) and box.dialect.has_constraints


# --- statements -------------------------------------------------------------------------------------------------------


def check_runnable(box: Box, space: EngineSpace, checks: tuple[CheckConstraint, ...]) -> None:
    """Reject a local write to a space with check constraints, whose functions cannot be run here."""
    if not checks:
        return
    check = checks[0]
    function = next((each for each in box.functions.values() if each.id == check.function_id), None)
    called = f"#{check.function_id}" if function is None else f"'{function.name}' ({function.language})"
    place = "" if check.field is None else f" on field {_where(space.definition, check.field)}"
    raise errors.Unsupported(
        f"Flowstone does not support writing to space '{space.name}': its check constraint '{check.name}'{place} calls"
        f" function {called}, which only a Tarantool server can run; write through a Tarantool member of the replica"
        " set, or remove the constraint from the space"
    )


def check_tuple(txn: BoxTransaction, space: EngineSpace, raw: bytes, values: Values) -> None:
    """Check a new tuple of a guarded space: its format and its foreign keys, in the server's order."""
    guards = space.guards
    if guards is None or not guards.foreign_keys or not is_enforced(txn):
        space.format.check(raw, values)
        return
    check_foreign_keys(txn, space, [key for key in guards.foreign_keys if key.field is None], values)
    of_fields = [key for key in guards.foreign_keys if key.field is not None]
    try:
        space.format.check(raw, values)
    except errors.FieldType as error:
        # Servers check field by field: a foreign key before the field with the wrong type fails first.
        found = _FIELD.match(error.message)
        wrong = int(found[1]) - INDEX_BASE if found else 0
        check_foreign_keys(txn, space, [key for key in of_fields if (key.field or 0) < wrong], values)
        raise
    check_foreign_keys(txn, space, of_fields, values)


def check_foreign_keys(txn: BoxTransaction, space: EngineSpace, keys: list[ForeignKey], values: Values) -> None:
    """Raise error 239 or 240 unless each foreign key of a tuple of `space` is nil or refers to an existing tuple."""
    for key in keys:
        problem = _child_problem(txn, space, key, values)
        if problem is None:
            continue
        if key.field is None:
            raise errors.ComplexForeignKeyFailed(f"Foreign key constraint '{key.name}' failed: {problem}")
        where = _where(space.definition, key.field)
        raise errors.FieldForeignKeyFailed(f"Foreign key constraint '{key.name}' failed for field '{where}': {problem}")


def _child_problem(txn: BoxTransaction, space: EngineSpace, key: ForeignKey, values: Values) -> str | None:
    if key.field is not None and (key.field >= len(values) or values[key.field] is None):
        return None
    parent = _parent(txn, space, key)
    foreign = [_number(parent.definition, field) for _, field in key.fields] if parent is not None else []
    index = _index_over(parent, foreign, unique=True) if parent is not None else None
    if index is None:
        return "foreign index was not found"
    local = [_number(space.definition, field) for field, _ in key.fields]
    if None in local:
        return "wrong local field name"
    fields = dict(zip(foreign, local, strict=True))
    wanted = [fields[part.field] for part in index.definition.parts]
    there = [values[number] for number in wanted if number is not None and number < len(values)]
    if all(value is None for value in there):
        return None
    if len(there) < len(wanted):
        return "extract key failed"
    return _missing(txn, index, tuple(there))


def _missing(txn: BoxTransaction, index: EngineIndex, key: Values) -> str | None:
    if not index.is_served:
        return "index get failed"
    try:
        entry = index.key.exact(key)
    except errors.TarantoolError:
        return "wrong key type"
    return "foreign tuple was not found" if txn.find(index, entry) is None else None


def check_referrers(txn: BoxTransaction, space: EngineSpace, old: bytes, new: bytes | None) -> None:
    """Raise error 238 if a tuple refers to `old`, which is replaced by `new`, or deleted if `new` is None."""
    guards = space.guards
    if guards is None or not guards.referrers or not is_enforced(txn):
        return
    old_values = unpack(old)
    new_values = None if new is None else unpack(new)
    for child_id, key in guards.referrers:
        problem = _parent_problem(txn, space, child_id, key, old_values, new_values)
        if problem is not None:
            raise errors.ForeignKeyIntegrity(f"Foreign key '{key.name}' integrity check failed: {problem}")


def _parent_problem(
    txn: BoxTransaction, space: EngineSpace, child_id: int, key: ForeignKey, old: Values, new: Values | None
) -> str | None:
    foreign = [_number(space.definition, field) for _, field in key.fields]
    if None in foreign:
        return "wrong foreign field name"
    if new is not None:
        # A replaced tuple keeps its primary key.
        named = _index_over(space, foreign, unique=True)
        if named is not None and (named is space.primary or named.key.entries(old) == named.key.entries(new)):
            return None
    child = space if child_id == space.id else txn.space(child_id)
    local = [_number(child.definition, field) for field, _ in key.fields]
    index = _index_over(child, local, unique=False)
    if index is None or not index.is_served:
        return "index was not found"
    fields = dict(zip(local, foreign, strict=True))
    numbers = [fields[part.field] for part in index.definition.parts]
    wanted = tuple(old[number] if number is not None and number < len(old) else None for number in numbers)
    if None in wanted or (key.field is None and 0 in wanted and txn.box.is_recovering):
        # Servers treat 0 as nil here and let the parent be deleted. Rows that a peer has accepted must be applied.
        return None
    try:
        span = index.key.span(EQ, wanted)
    except errors.TarantoolError:
        return "wrong key type"
    if index.definition.unique:
        return "tuple is referenced" if txn.find(index, index.key.exact(wanted)) is not None else None
    return "tuple is referenced" if next(iter(txn.scan(index, span)), None) is not None else None


def _parent(txn: BoxTransaction, space: EngineSpace, key: ForeignKey) -> EngineSpace | None:
    parent_id = key.parent_id(space.id)
    if parent_id == space.id:
        return space
    return txn.space(parent_id) if parent_id in txn.box.spaces else None


def _number(definition: SpaceDefinition, field: FieldId) -> int | None:
    if isinstance(field, int):
        return field
    names = definition.field_names
    return names.index(field) if field in names else None


def _index_over(space: EngineSpace, fields: list[Any], *, unique: bool) -> EngineIndex | None:
    """Return the first index over exactly these fields, in any order."""
    if None in fields:
        return None
    for index in space.indexes.values():
        definition = index.definition
        if _covers(definition, fields) and (definition.unique or not unique):
            return index
    return None


def _covers(definition: IndexDefinition, fields: list[int]) -> bool:
    return len(definition.parts) == len(fields) and {part.field for part in definition.parts} == {*fields}


def _where(definition: SpaceDefinition, field: int) -> str:
    """Return the name of a field in error messages of 2.11."""
    names = definition.field_names
    return f"{field + INDEX_BASE} ({names[field]})" if field < len(names) else str(field + INDEX_BASE)


# --- definitions ------------------------------------------------------------------------------------------------------


def check_definition(txn: BoxTransaction, definition: SpaceDefinition) -> None:
    """Raise error 237 for an invalid foreign key, 234 for a check whose function cannot be used."""
    if not is_enforced(txn):
        return
    for key in definition.foreign_keys:
        parent_id = key.parent_id(definition.id)
        parent = txn.box.spaces.get(parent_id)
        other = definition if parent_id == definition.id else parent.definition if parent is not None else None
        problem = f"foreign space '{parent_id}' was not found by id" if other is None else _misfit(definition, other)
        if problem is not None:
            raise errors.CreateForeignKey(
                f"Failed to create foreign key '{key.name}' in space '{definition.name}': {problem}"
            )
    for check in definition.checks:
        problem = _function_problem(txn.box, check)
        if problem is not None:
            raise errors.CreateConstraint(
                f"Failed to create constraint '{check.name}' in space '{definition.name}': {problem}"
            )


def _misfit(child: SpaceDefinition, parent: SpaceDefinition) -> str | None:
    if parent.is_temporary and not child.is_temporary:
        return "foreign key from non-temporary space can't refer to temporary space"
    if parent.is_local and not child.is_local:
        return "foreign key from non-local space can't refer to local space"
    return None


def _function_problem(box: Box, check: CheckConstraint) -> str | None:
    function = next((each for each in box.functions.values() if each.id == check.function_id), None)
    if function is None:
        return f"constraint function '{check.function_id}' was not found by ID"
    if function.language == "LUA" and not function.body:
        return f"constraint lua function '{function.name}' must have persistent body"
    if not function.is_deterministic:
        return f"constraint function '{function.name}' must be deterministic"
    return None


def check_rows(txn: BoxTransaction, altered: EngineSpace, before: SpaceDefinition) -> None:
    """Check the tuples of a space against constraints that `before` does not have. Renamed constraints are not checked
    again."""
    if not is_enforced(txn) or not len(altered):
        return
    definition = altered.definition
    known = {(key.space_id, key.fields) for key in before.foreign_keys}
    added = [key for key in definition.foreign_keys if (key.space_id, key.fields) not in known]
    checks = {(check.function_id, check.field) for check in before.checks}
    unchecked = tuple(check for check in definition.checks if (check.function_id, check.field) not in checks)
    if not txn.box.is_recovering:
        check_runnable(txn.box, altered, unchecked)
    for raw in altered.tuples() if added else ():
        check_foreign_keys(txn, altered, added, unpack(raw))


def check_unreferenced(txn: BoxTransaction, space: EngineSpace, *, if_filled: bool) -> None:
    """Raise error 12 if another space refers to `space`; with `if_filled`, only if that space has tuples."""
    if space.guards is None or not is_enforced(txn):
        return
    for child_id, _ in space.guards.referrers:
        child = txn.box.spaces.get(child_id)
        if child_id != space.id and child is not None and not (if_filled and not len(child)):
            raise errors.AlterSpace(f"Can't modify space '{space.name}': space is referenced by foreign key")
