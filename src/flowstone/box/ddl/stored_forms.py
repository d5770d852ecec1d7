"""Converts formats and index parts from the API's form to the form stored in `_space` and `_index` (schema.lua).

Names of fields and collations become numbers; omitted options of parts are taken from the format. Lua tables arrive as
tuples, lists or dicts; a dict with the keys 1 and 2 is a Lua table with an array part. Fields count from 1 in the API
and from 0 when stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, Final

from flowstone.iproto import errors

ResolveCollation = Callable[[str], int | None]
Format = Sequence[Mapping[Any, Any]]

_ALIASES: Final = {"num": "unsigned", "uint": "unsigned", "str": "string", "int": "integer", "*": "any"}


def illegal(problem: str) -> errors.TarantoolError:
    """Return the error for invalid arguments."""
    return errors.IllegalParams(f"Illegal parameters, {problem}")


def check_options(options: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Raise IllegalParams unless each option is known and has one of its Lua types, listed as `string, number`."""
    for name, value in options.items():
        if name not in known:
            raise illegal(f"unexpected option '{name}'")
        kinds = known[name].replace(" ", "").split(",")
        if lua_type(value) not in kinds:
            if len(kinds) == 1:
                raise illegal(f"options parameter '{name}' should be of type {known[name]}")
            raise illegal(f"options parameter '{name}' should be one of types: {known[name]}")


def lua_type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "table" if isinstance(value, Mapping | tuple | list) else "nil" if value is None else "userdata"


def _pairs(table: Any) -> Iterable[tuple[Any, Any]]:
    return table.items() if isinstance(table, Mapping) else enumerate(table, 1)


def _array(table: Any) -> list[Any]:
    """Return the values that Lua's ipairs finds in a table."""
    if not isinstance(table, Mapping):
        return list(table)
    return list(takewhile(lambda value: value is not None, (table.get(number) for number in count(1))))


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping | tuple | list)


def stored_format(format: Any, collation_id: ResolveCollation) -> list[dict[Any, Any]]:
    """Return the format with each field as a map that has at least name and type."""
    return [_stored_field(number, field, collation_id) for number, field in enumerate(_array(format), 1)]


def _stored_field(number: int, given: Any, collation_id: ResolveCollation) -> dict[Any, Any]:
    field: dict[Any, Any] = {}
    if not _is_table(given):
        field["name"] = given
    else:
        names = given if isinstance(given, Mapping) else {}
        for key, value in _pairs(given):
            if key == 1 and not names.get("name"):
                field["name"] = value
            elif (key == 1 and not names.get("type")) or (key == 2 and not names.get("type") and not names.get("name")):
                field["type"] = value
            elif key == "collation":
                field[key] = _collation(f"format[{number}]", value, collation_id)
            else:
                field[key] = value
    if not isinstance(field.get("name"), str):
        raise illegal(f"format[{number}]: name (string) is expected")
    if field.get("type") is None:
        field["type"] = "any"
    elif not isinstance(field["type"], str):
        raise illegal(f"format[{number}]: type must be a string")
    return field


def _collation(what: str, name: Any, collation_id: ResolveCollation) -> int:
    found = collation_id(str(name))
    if found is None:
        raise illegal(f"{what}: collation was not found by name '{name}'")
    return found


def stored_parts(
    format: Format, parts: Any, collation_id: ResolveCollation, *, inherits_collation: bool = False
) -> list[Any]:
    """Return the stored parts of an index on a space with `format`: pairs if all parts have only field and type.

    With `inherits_collation`, a part without a collation gets the collation of its field, as in 2.11.
    """
    result = [_with_known_type(part) for part in _full_parts(format, parts, collation_id)]
    if inherits_collation:
        for part in result:
            collation = format[part["field"]].get("collation") if part["field"] < len(format) else None
            if collation is not None:
                part.setdefault("collation", collation)
    if any(part.keys() - {"field", "type"} for part in result):
        return result
    return [[part["field"], part["type"]] for part in result]


def _full_parts(format: Format, parts: Any, collation_id: ResolveCollation) -> list[dict[str, Any]]:
    if not _is_table(parts):
        raise illegal("options.parts parameter should be a table")
    given = _array(parts)
    if not given:
        raise illegal("options.parts must have at least one part")
    if lua_type(given[0]) == "number" and len(given) > 1 and isinstance(given[1], str):
        return _flat_parts(given)
    return [_part(format, number, part, collation_id) for number, part in enumerate(given, 1)]


def _flat_parts(parts: list[Any]) -> list[dict[str, Any]]:
    """Read parts in the form of 1.6: field, type, field, type, …"""
    problem = "options.parts: expected field_no (number), type (string) pairs"
    if len(parts) % 2:
        raise illegal(problem)
    result = []
    for field, kind in zip(parts[::2], parts[1::2], strict=True):
        if lua_type(field) != "number":
            raise illegal(problem)
        if field == 0:
            raise illegal("invalid index parts: field_no must be one-based")
        if not isinstance(kind, str):
            raise illegal(problem)
        result.append({"field": field - 1, "type": kind})
    return result


def _part(format: Format, number: int, given: Any, collation_id: ResolveCollation) -> dict[str, Any]:
    what = f"options.parts[{number}]"
    part: dict[Any, Any] = {}
    for key, value in _pairs(given) if _is_table(given) else ((1, given),):
        if key in (1, "field"):
            part["field"] = value
        elif key in (2, "type"):
            part["type"] = value
        elif key == "collation":
            part["collation"] = _collation(what, value, lambda name: collation_id(name) or collation_id(name.lower()))
        else:
            part[key] = value
    if lua_type(part.get("field")) not in ("number", "string"):
        raise illegal(f"{what}: field (name or number) is expected")
    part["field"], path = resolve_field(format, part["field"], what)
    if path is not None:
        part["path"] = path
    _take_after_format(format, part, what)
    return part


def _take_after_format(format: Format, part: dict[str, Any], what: str) -> None:
    field = format[part["field"]] if part["field"] < len(format) else {}
    if part.get("type") is None:
        part["type"] = field.get("type") or "scalar"
    elif not isinstance(part["type"], str):
        raise illegal(f"{what}: type (string) is expected")
    if part.get("is_nullable") is None:
        part.pop("is_nullable", None)
        if field.get("is_nullable"):
            part["is_nullable"] = True
    elif not isinstance(part["is_nullable"], bool):
        raise illegal(f"{what}: type (boolean) is expected")
    if part.get("exclude_null"):
        if part.get("is_nullable") is False:
            raise illegal(f"{what}: exclude_null=true and is_nullable=false are incompatible")
        part["is_nullable"] = True


def _with_known_type(part: dict[str, Any]) -> dict[str, Any]:
    kind = part["type"].lower()
    return {**part, "type": _ALIASES.get(kind, kind)}


def resolve_field(format: Format, field: float | str, what: str) -> tuple[int, str | None]:
    """Return the number, from 0, and the rest of the path of a field given by number, name or JSON path."""
    number, rest = (field, None) if not isinstance(field, str) else _resolve_path(format, field)
    if number is None:
        raise illegal(f"{what}: field was not found by name '{field}'")
    if number <= 0:
        raise illegal(f"{what}: field (number) must be one-based")
    return int(number) - 1, rest


def _resolve_path(format: Format, path: str) -> tuple[int | None, str | None]:
    numbers = {field.get("name"): number for number, field in enumerate(format, 1)}
    if path in numbers:
        return numbers[path], None
    for pattern in (r"\[(\d+)\]", r"\[\"([^\]]+)\"\]", r"\['([^\]]+)'\]", r"([^.\[]+)"):
        match = re.match(pattern, path)
        if match is not None:
            number = int(match[1]) if match[1].isdecimal() and path.startswith("[") else numbers.get(match[1])
            if number is not None:
                return number, path[match.end() :]
    return None, None
