"""Declared types of columns: how they are written, and which fields they can hold."""

from __future__ import annotations

import pytest

from flowstone.columns.column_types import ColumnType, WrongType, types_for


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("decimal(20,0)", "decimal(20,0)"),
        (" Decimal( 38 , 6 ) ", "decimal(38,6)"),
        ("decimal(5)", "decimal(5,0)"),
        ("BIGINT", "bigint"),
        ("string", "string"),
        ("timestamp", "timestamp"),
    ],
)
def test_type_is_parsed(text: str, shown: str) -> None:
    assert str(ColumnType.parse(text)) == shown
    assert ColumnType.parse(shown) == ColumnType.parse(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "unknown type ''; use bigint"),
        ("int", "unknown type 'int'; use bigint"),
        ("decimal", r"has no number of digits; write it as decimal\(38,6\)"),
        ("decimal(39,0)", "invalid type 'decimal.39,0.'; use 1 to 38 digits"),
        ("decimal(0)", "use 1 to 38 digits"),
        ("decimal(4,5)", "and a scale that is not larger"),
        ("decimal(4,-1)", "unknown type"),
    ],
)
def test_invalid_type_is_an_error_with_the_valid_ones(text: str, problem: str) -> None:
    with pytest.raises(WrongType, match=problem):
        ColumnType.parse(text)


def test_types_hold_the_fields_whose_values_they_can_represent() -> None:
    decimal = ColumnType.parse("decimal(20,0)")
    assert all(decimal.holds(each) for each in ("unsigned", "integer", "number", "decimal", "decimal128", "any"))
    assert not any(decimal.holds(each) for each in ("string", "double", "datetime", "map"))
    assert all(ColumnType("string").holds(each) for each in ("unsigned", "map", "interval"))
    assert ColumnType("binary").holds("string")
    assert types_for("unsigned") == "bigint, decimal(P,S), double, string"
    assert types_for("decimal64") == "decimal(P,S), double, string"
    assert types_for("map") == "string"
