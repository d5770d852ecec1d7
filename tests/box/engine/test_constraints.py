"""Constraints of a space: their form in `_space`, and the errors for malformed ones."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.engine.constraints import (
    CheckConstraint,
    ForeignKey,
    check_field_constraints,
    check_tuple_constraints,
    read_constraints,
)
from flowstone.iproto import errors


def test_tuple_constraints_are_checked_before_field_constraints() -> None:
    flags = {"foreign_key": {"k": {"space": 515, "field": {"c": "code", 2: 1}}}, "constraint": {"big": 66}}
    format = (
        {"name": "a", "constraint": {"positive": 67}},
        {"name": "c", "foreign_key": {"p": {"space": 515, "field": "code"}, "self": {"field": 0}}},
    )
    keys, checks = read_constraints(flags, format)
    assert keys == (
        ForeignKey("k", 515, (("c", "code"), (2, 1))),
        ForeignKey("p", 515, ((1, "code"),), 1),
        ForeignKey("self", None, ((1, 0),), 1),
    )
    assert checks == (CheckConstraint("big", 66), CheckConstraint("positive", 67, 0))
    assert [key.parent_id(600) for key in keys] == [515, 515, 600]


@pytest.mark.parametrize(
    "given",
    [
        {"foreign_key": 1},
        {"foreign_key": {"f": 1}},
        {"foreign_key": {"f": {"field": None}}},
        {"foreign_key": {1: {"field": "a"}}},
        {"foreign_key": {"f": {"space": "name", "field": "a"}}},
        {"constraint": {"c": "name"}},
    ],
)
def test_invalid_constraint_is_ignored_on_recovery_and_rejected_on_creation(given: dict[str, Any]) -> None:
    assert read_constraints({}, ({"name": "a", **given},)) == ((), ())
    assert read_constraints(given, ()) == ((), ())
    with pytest.raises(errors.WrongSpaceFormat, match="Wrong space format field 3: "):
        check_field_constraints(3, given)
    with pytest.raises(errors.WrongSpaceOptions, match="Wrong space options: "):
        check_tuple_constraints(given)


@pytest.mark.parametrize("name", ["", "a\x00b", "x" * 65001])
def test_names_of_constraints_are_identifiers(name: str) -> None:
    for kind, value in (("constraint", 66), ("foreign_key", {"field": 0})):
        with pytest.raises(errors.WrongSpaceFormat, match=r"(isn't a valid identifier|name is too long)"):
            check_field_constraints(1, {kind: {name: value}})
