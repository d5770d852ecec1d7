"""Constraints of a space as `_space` stores them: foreign keys and check functions, in the format or in the flags.

Definitions only: `foreign_keys.py` enforces them. `read_constraints` trusts rows from a log or a peer and skips
malformed constraints; the checks raise the errors of a real server for local definitions. Servers before 2.10 do not
support constraints: dialect 2.6 ignores these keys of a format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from flowstone.iproto import errors

CONSTRAINT: Final = "constraint"
FOREIGN_KEY: Final = "foreign_key"
NAME_MAX: Final = 65000

FieldId = int | str
"""Number (from 0) or name of a field."""


class ForeignKey(msgspec.Struct, frozen=True):
    """A foreign key: `fields` are pairs of a local field and the field of the parent space that it refers to.

    `space_id` is None if the parent is the space itself. `field` is the number of the field whose format has the key,
    or None for a key of the whole tuple, from the flags of the space.
    """

    name: str
    space_id: int | None
    fields: tuple[tuple[FieldId, FieldId], ...]
    field: int | None = None

    def parent_id(self, child_id: int) -> int:
        """Return the id of the space that the key of space `child_id` refers to."""
        return self.space_id or child_id


class CheckConstraint(msgspec.Struct, frozen=True):
    """A function that decides whether a field, or the whole tuple (`field` is None), may be stored."""

    name: str
    function_id: int
    field: int | None = None


def read_constraints(
    flags: Mapping[Any, Any], format: Sequence[Any]
) -> tuple[tuple[ForeignKey, ...], tuple[CheckConstraint, ...]]:
    """Return the foreign keys and checks of a space in the server's order of checks: whole tuples first."""
    places: list[tuple[int | None, Any]] = [(None, flags), *enumerate(format)]
    keys = [key for field, options in places for key in _foreign_keys(field, options)]
    checks = [check for field, options in places for check in _checks(field, options)]
    return tuple(keys), tuple(checks)


def _foreign_keys(field: int | None, options: Any) -> Iterator[ForeignKey]:
    for name, value in _named(options, FOREIGN_KEY):
        given: Any = value.get("field") if isinstance(value, dict) else None
        space_id = value.get("space") if isinstance(value, dict) else None
        if space_id is not None and type(space_id) is not int:
            continue
        if field is not None and _is_field_id(given):
            yield ForeignKey(name, space_id, ((field, given),), field)
        elif field is None and isinstance(given, dict) and given and all(map(_is_field_id, (*given, *given.values()))):
            yield ForeignKey(name, space_id, tuple(given.items()))


def _checks(field: int | None, options: Any) -> Iterator[CheckConstraint]:
    for name, function_id in _named(options, CONSTRAINT):
        if type(function_id) is int:
            yield CheckConstraint(name, function_id, field)


def _named(options: Any, kind: str) -> Iterator[tuple[str, Any]]:
    found = options.get(kind) if isinstance(options, dict) else None
    for name, value in found.items() if isinstance(found, dict) else ():
        if isinstance(name, str):
            yield name, value


def _is_field_id(value: Any) -> bool:
    return isinstance(value, str) or (type(value) is int and value >= 0)


# --- errors of servers (tuple_constraint_def.c) -----------------------------------------------------------------------


def check_field_constraints(number: int, field: Mapping[Any, Any]) -> None:
    """Raise the error of a server for malformed constraints in entry `number`, from 1, of a format."""
    try:
        _check_maps(field, is_complex=False)
    except _Malformed as problem:
        raise errors.WrongSpaceFormat(f"Wrong space format field {number}: {problem}") from None


def check_tuple_constraints(flags: Mapping[Any, Any]) -> None:
    """Raise the error of a server for malformed constraints in the flags of a space."""
    try:
        _check_maps(flags, is_complex=True)
    except _Malformed as problem:
        raise errors.WrongSpaceOptions(f"Wrong space options: {problem}") from None


class _Malformed(Exception):
    """The reason why a constraint is malformed."""


def _check_maps(options: Mapping[Any, Any], *, is_complex: bool) -> None:
    if CONSTRAINT in options:
        for name, function_id in _map_of(options[CONSTRAINT], "constraint field is expected to be a MAP"):
            _check_constraint_name(name, "constraint")
            _expect(_is_unsigned(function_id), "constraint function ID is expected to be a number")
    if FOREIGN_KEY in options:
        for name, value in _map_of(options[FOREIGN_KEY], "foreign key field is expected to be a MAP"):
            _check_constraint_name(name, "foreign key")
            _check_foreign_key(value, is_complex)


def _check_foreign_key(value: Any, is_complex: bool) -> None:
    shape = "foreign key definition is expected to be {[space=..,] field=..}"
    for key, given in _map_of(value, "foreign key definition is expected to be a map"):
        _expect(isinstance(key, str), "foreign key definition key is expected to be a string")
        _expect(key in ("space", "field"), shape)
        if key == "space":
            _expect(_is_unsigned(given), "foreign key: space must be a number")
            continue
        mapping = "field mapping is expected to be a map"
        fields = [each for pair in _map_of(given, mapping) for each in pair] if is_complex else [given]
        _expect(bool(fields), mapping)
        _expect(all(map(_is_field_id, fields)), "foreign key: field must be number or string")
    _expect("field" in value, shape)


def _check_constraint_name(name: Any, what: str) -> None:
    _expect(isinstance(name, str), f"{what} name is expected to be a string")
    _expect(len(name.encode("utf-8", "surrogateescape")) <= NAME_MAX, f"{what} name is too long")
    _expect(bool(name) and name.isprintable(), f"{what} name isn't a valid identifier")


def _map_of(value: Any, problem: str) -> list[tuple[Any, Any]]:
    _expect(isinstance(value, dict), problem)
    return list(value.items())


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and value >= 0


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise _Malformed(problem)
