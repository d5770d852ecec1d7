"""Declared types of single columns: options, files, and errors that say what is wrong and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.columns.column_types import ColumnType, WrongType
from flowstone.spark.mirror.field_types import FieldTypes, read_types
from tests.spark.lake_rows_given import ORDERS, space

DECIMAL = ColumnType("decimal", 20, 0)


def test_types_are_parsed_from_options_and_mappings() -> None:
    types = FieldTypes.parse(["orders.id=decimal(20,0)", "a.b.note=binary"])
    assert list(types) == [("orders", "id", DECIMAL), ("a.b", "note", ColumnType("binary"))]
    assert FieldTypes.of({"orders.id": "decimal(20,0)", "a.b.note": "binary"}) == types
    assert FieldTypes.from_setting(types.setting) == types
    assert (FieldTypes().setting, FieldTypes.from_setting(""), bool(FieldTypes())) == ("", FieldTypes(), False)


def test_types_of_a_space_are_those_under_its_name() -> None:
    types = FieldTypes.parse(["orders.name=string", "orders.id=bigint", "other.id=double"])
    assert types.of_space(ORDERS) == (("id", "bigint"), ("name", "string"))


def test_later_types_replace_earlier_ones() -> None:
    both = FieldTypes.parse(["a.b=bigint", "a.c=bigint"]) | FieldTypes.parse(["a.b=double"])
    assert [str(kind) for _, _, kind in both] == ["double", "bigint"]


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["orders.id"], "invalid type 'orders.id'; use SPACE.FIELD=TYPE"),
        (["id=bigint"], "invalid field 'id'; use SPACE.FIELD=TYPE"),
        (["orders.id=number"], "orders.id: unknown type 'number'; use bigint"),
        (["orders.id=bigint", "orders.id=double"], "orders.id has two types; specify each field once"),
    ],
)
def test_invalid_option_is_an_error(texts: list[str], problem: str) -> None:
    with pytest.raises(WrongType, match=problem):
        FieldTypes.parse(texts)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("order.id=bigint", r"--type: no space 'order'; did you mean orders\?"),
        ("zzz.id=bigint", "--type: no space 'zzz'; known spaces: orders"),
        ("orders.nam=string", r"--type: space 'orders' has no field 'nam'; did you mean name\?"),
        (
            "orders.name=bigint",
            "--type orders.name=bigint: .* cannot hold a field of type string; use",
        ),
    ],
)
def test_unsuitable_type_is_an_error_that_names_the_field(text: str, problem: str) -> None:
    with pytest.raises(WrongType, match=problem):
        FieldTypes.parse([text]).check({"orders": ORDERS}, "--type")


def test_suitable_types_pass() -> None:
    FieldTypes.parse(["orders.id=decimal(20,0)", "orders.name=binary"]).check({"orders": ORDERS}, "--type")
    with pytest.raises(WrongType, match="there are no named fields"):
        FieldTypes.parse(["orders.id=bigint"]).check({"orders": space()}, "--type")


def test_file_has_tables_of_types(tmp_path: Path) -> None:
    path = tmp_path / "mirror.toml"
    path.write_text("[types.orders]\nid = 'decimal(20,0)'\n[types.\"a.b\"]\nnote = 'binary'\n")
    assert read_types(str(path)) == FieldTypes.parse(["orders.id=decimal(20,0)", "a.b.note=binary"])
    path.write_text("")
    assert not read_types(str(path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[types", r"mirror.toml: .*; use tables of types: \[types.orders\]"),
        ("once = true", "mirror.toml: unknown option once"),
        ("types = 1", "mirror.toml: types of spaces are not a table"),
        ("types.orders = 1", "mirror.toml: types of orders are not a table"),
        ("types.orders.id = 20", "mirror.toml: type of orders.id is not a text: 20"),
        ("types.orders.id = 'big'", "mirror.toml: orders.id: unknown type 'big'; use bigint"),
    ],
)
def test_invalid_file_is_an_error_that_names_it(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "mirror.toml"
    path.write_text(text)
    with pytest.raises(WrongType, match=problem):
        read_types(str(path))


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WrongType, match="No such file or directory; specify a TOML file"):
        read_types(str(tmp_path / "none.toml"))
