"""Checks of definitions that differ by dialect; test_functions.py compares the others with the real server."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.ddl.definition_checks import (
    check_identifier,
    check_part_types,
    checked_index,
    checked_space,
    known_type,
)
from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.iproto import errors

SPACE = SpaceDefinition(512, "t")


def space_row(*, flags: dict[str, Any] | None = None, format: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    return (512, 1, "t", "memtx", 0, flags or {}, format)


def test_types_of_2_11_are_unknown_to_2_6() -> None:
    assert known_type("datetime", Dialect.V2_11) == "datetime"
    assert known_type("datetime", Dialect.V2_6) is None
    assert known_type("NUM", Dialect.V2_6) == "unsigned"
    row = space_row(format=({"name": "at", "type": "datetime"},))
    assert checked_space(row, errors.CreateSpace, Dialect.V2_11).fields[0].type == "datetime"
    with pytest.raises(errors.CreateSpace, match="Failed to create space 't': field 1 has unknown field type"):
        checked_space(row, errors.CreateSpace, Dialect.V2_6)


def test_options_of_2_11_are_unexpected_in_2_6() -> None:
    row = (512, 0, "pk", "tree", {"unique": True, "hint": False}, ((0, "unsigned"),))
    assert checked_index(row, SPACE, {}, Dialect.V2_11).name == "pk"
    with pytest.raises(errors.WrongIndexOptions, match="unexpected option 'hint'"):
        checked_index(row, SPACE, {}, Dialect.V2_6)


def test_error_names_an_altered_space() -> None:
    with pytest.raises(errors.AlterSpace, match="Can't modify space 't': field 1 name is not specified"):
        checked_space(space_row(format=({"type": "string"},)), errors.AlterSpace, Dialect.V2_6)


@pytest.mark.parametrize("name", ["", "a\nb", "\u2028", "\ufffd", "\x7f"])
def test_name_with_unprintable_characters_is_rejected(name: str) -> None:
    with pytest.raises(errors.Identifier):
        check_identifier(name)


def test_any_printable_name_is_accepted() -> None:
    for name in ("t", "с пробелом", "名", "a'b\"c", "🜁"):
        check_identifier(name)


def test_indexes_of_a_field_must_have_compatible_types() -> None:
    def space(*kinds: str) -> SpaceDefinition:
        indexes = tuple(
            IndexDefinition(512, number, f"i{number}", "tree", True, (IndexPart(0, kind),))
            for number, kind in enumerate(kinds)
        )
        return SpaceDefinition(512, "t", indexes=indexes)

    check_part_types(space("scalar", "number", "unsigned"))
    check_part_types(space("unsigned", "scalar"))
    message = "Field 1 has type 'unsigned' in one index, but type 'string' in another"
    with pytest.raises(errors.IndexPartTypeMismatch, match=message):
        check_part_types(space("unsigned", "string"))
