"""Converts constraints from the API's form to the form stored in `_space` (normalize_constraint in schema.lua).

Names of functions and spaces become ids, field numbers count from 0, and a constraint without a name gets the name of
its function or of the foreign space. Only for dialects that support constraints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowstone.box.ddl.stored_forms import illegal, lua_type
from flowstone.box.engine.constraints import CONSTRAINT, FOREIGN_KEY
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction


def with_stored_constraints(txn: BoxTransaction, space: tuple[int, str], format: list[dict[Any, Any]]) -> None:
    """Convert the constraints in `format` to their stored form, in place. `space` is the id and name of the space."""
    for number, field in enumerate(format, 1):
        prefix = f"format[{number}]: "
        if field.get(CONSTRAINT) is not None:
            field[CONSTRAINT] = stored_constraint(txn, field[CONSTRAINT], prefix)
        if field.get(FOREIGN_KEY) is not None:
            field[FOREIGN_KEY] = stored_foreign_key(txn, space, field[FOREIGN_KEY], prefix)


def stored_constraint(txn: BoxTransaction, given: Any, prefix: str = "") -> dict[str, int]:
    """Return the ids of functions by constraint name; `given` is a function name or a table of function names."""
    if isinstance(given, str):
        given = (given,)
    if lua_type(given) != "table":
        raise illegal(f"{prefix}constraint must be string or table")
    found: dict[str, int] = {}
    for name, function in given.items() if isinstance(given, Mapping) else ((each, each) for each in given):
        if not isinstance(function, str):
            raise illegal(f"{prefix}constraint function is expected to be a string, but got {lua_type(function)}")
        if function not in txn.box.functions:
            raise illegal(f"{prefix}constraint function was not found by name '{function}'")
        found[name if isinstance(name, str) else function] = txn.box.functions[function].id
    return found


def stored_foreign_key(
    txn: BoxTransaction, space: tuple[int, str], given: Any, prefix: str = "", *, is_complex: bool = False
) -> dict[str, Any]:
    """Return foreign keys by name; `given` is one key or a table of keys. `is_complex`: keys of the whole tuple."""
    if not isinstance(given, Mapping):
        raise illegal(f"{prefix}foreign key must be a table")
    parent, field = given.get("space"), given.get("field")
    if field is not None and not (lua_type(parent) == lua_type(field) == "table"):
        name = space[1] if parent in (None, *space) else str(getattr(_parent(txn, parent), "name", parent))
        return {name: _stored_key(txn, space, given, prefix, is_complex)}
    for name, key in given.items():
        if not isinstance(name, str):
            raise illegal(f"{prefix}foreign key name must be a string")
        if not isinstance(key, Mapping):
            raise illegal(f"{prefix}foreign key definition must be a table with 'space' and 'field' members")
    return {name: _stored_key(txn, space, key, prefix, is_complex) for name, key in given.items()}


def _stored_key(
    txn: BoxTransaction, space: tuple[int, str], given: Mapping[Any, Any], prefix: str, is_complex: bool
) -> dict[str, Any]:
    parent, field = given.get("space"), given.get("field")
    if field is None:
        raise illegal(f"{prefix}foreign key: field must be specified")
    if parent is not None and lua_type(parent) not in ("string", "number"):
        raise illegal(f"{prefix}foreign key: space must be string or number")
    if is_complex:
        if not isinstance(field, Mapping) or not field:
            what = "field must be a table with local field -> foreign field mapping"
            raise illegal(f"{prefix}foreign key: {what}")
        stored: Any = {
            _stored_field(local, prefix, "local field"): _stored_field(foreign, prefix, "foreign field")
            for local, foreign in field.items()
        }
    else:
        stored = _stored_field(field, prefix, "field")
    is_own = parent in (None, *space)
    there = None if parent is None or is_own else _parent(txn, parent)
    if not is_own and there is None:
        raise illegal(f"{prefix}foreign key: space {parent} was not found")
    for name in given:
        if name not in ("space", "field"):
            raise illegal(f"{prefix}foreign key: unexpected parameter '{name}'")
    return {"field": stored} if there is None else {"space": there.id, "field": stored}


def _stored_field(field: Any, prefix: str, what: str) -> int | str:
    """Return the stored form of a field: its name, or its number, from 1 in the API and from 0 when stored."""
    if isinstance(field, str):
        return field
    if lua_type(field) != "number":
        raise illegal(f"{prefix}foreign key: {what} must be string or number")
    return int(field) - 1


def _parent(txn: BoxTransaction, space: int | str) -> EngineSpace | None:
    return txn.box.names.get(space) if isinstance(space, str) else txn.box.spaces.get(int(space))
