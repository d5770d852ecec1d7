"""Definitions of functions, as stored in `_func`: name, owner, and how a function may be called.

These are definitions only. `node/lua/` runs bodies in Lua; functions in C are kept and replicated, never run.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from flowstone.box.ddl.definition_checks import check_identifier, check_name_length, check_options
from flowstone.box.engine.field_types import ACCEPTS
from flowstone.iproto import errors

FUNCTION_ID_MAX: Final = 32000
LANGUAGES: Final = ("LUA", "C", "SQL_BUILTIN")
_EXPORTS: Final = ("LUA", "SQL")
_AGGREGATES: Final = ("none", "group")
_OPTIONS: Final = {"is_multikey": "boolean"}


class FunctionDefinition(msgspec.Struct, frozen=True):
    """A row of `_func`. `is_setuid`: runs with the rights of its owner. `body` is empty if only the name is stored."""

    id: int
    owner: int
    name: str
    is_setuid: bool = False
    language: str = "LUA"
    body: str = ""
    param_list: tuple[str, ...] = ()
    returns: str = "any"
    aggregate: str = "none"
    is_deterministic: bool = False
    is_sandboxed: bool = False
    exports: tuple[str, ...] = ("LUA",)
    options: tuple[tuple[str, Any], ...] = ()
    comment: str = ""


def read_function(row: tuple[Any, ...]) -> FunctionDefinition:
    """Return the function that a tuple of `_func` defines; before 2.2 the tuple ended after the language."""
    short = FunctionDefinition(
        id=row[0],
        owner=row[1],
        name=row[2],
        is_setuid=len(row) > 3 and bool(row[3]),
        language=row[4].upper() if len(row) > 4 else "LUA",
    )
    if len(row) < 17:
        return short
    return msgspec.structs.replace(
        short,
        body=row[5],
        param_list=row[7],
        returns=row[8],
        aggregate=row[9],
        is_deterministic=row[11],
        is_sandboxed=row[12],
        exports=tuple(str(export).upper() for export in row[14]),
        options=tuple(sorted(row[15].items())),
        comment=row[16],
    )


def check_function(row: tuple[Any, ...]) -> None:
    """Raise the error of a real server for an invalid tuple of `_func`, which has passed the format of that space."""
    name: str = row[2]
    check_name_length(name, errors.CreateFunction, "Failed to create function '{}': {}", "function name is too long")
    check_identifier(name)
    has_body = len(row) > 5
    if has_body:
        for value, expected, option in (
            (row[6].lower(), "function", "routine_type"),
            (row[10].lower(), "none", "sql_data_access"),
            (row[13], True, "is_null_call"),
        ):
            if value != expected:
                raise _refused(name, f"unsupported {option} value")
    if row[0] > FUNCTION_ID_MAX:
        raise _refused(name, "function id is too big")
    if len(row) > 4 and row[4].upper() not in LANGUAGES:
        raise errors.FunctionLanguage(f"Unsupported language '{row[4]}' specified for function '{name}'")
    if has_body:
        _check_signature(name, row)
    _check_body(read_function(row))


def _check_signature(name: str, row: tuple[Any, ...]) -> None:
    if row[8].lower() not in ACCEPTS:
        raise _refused(name, "invalid returns value")
    _check_strings(row[14], 15)
    if any(export.upper() not in _EXPORTS for export in row[14]):
        raise _refused(name, "invalid exports value")
    if row[9].lower() not in _AGGREGATES:
        raise _refused(name, "invalid aggregate value")
    _check_strings(row[7], 8)
    if any(kind.lower() not in ACCEPTS for kind in row[7]):
        raise _refused(name, "invalid argument type")
    check_options(row[15], _OPTIONS, errors.WrongSpaceOptions, "Wrong space options (field {}): {}", 15)


def _check_strings(values: tuple[object, ...], field: int) -> None:
    if not all(isinstance(value, str) for value in values):
        raise errors.FieldType(f"Tuple field {field} type does not match one required by operation: expected string")


def _check_body(function: FunctionDefinition) -> None:
    if function.language == "LUA":
        if function.is_sandboxed and not function.body:
            raise _refused(
                function.name,
                "is_sandboxed option may be set only for a persistent Lua function (one with a non-empty body)",
            )
    elif function.body or function.is_sandboxed:
        language = "C" if function.language == "C" else "SQL"
        raise _refused(function.name, f"body and is_sandboxed options are not compatible with {language} language")


def _refused(name: str, reason: str) -> errors.TarantoolError:
    return errors.CreateFunction(f"Failed to create function '{name}': {reason}")
