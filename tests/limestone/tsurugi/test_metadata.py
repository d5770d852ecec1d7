"""Definitions out of metadata entries: recorded, generated, of unknown versions, damaged."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from flowstone.limestone.errors import BadMetadata
from flowstone.limestone.tsurugi.definitions import KeyColumn, SecondaryIndex, SqlTable, TypeName
from flowstone.limestone.tsurugi.metadata import VERSIONS, defined_storage, parse_metadata
from tests.limestone.tsurugi.encoder import (
    ColumnSpec,
    TableSpec,
    block,
    envelope,
    index_metadata,
    named,
    number,
    table_metadata,
)
from tests.limestone.tsurugi.specs import tables

TABLE = TableSpec(
    "t",
    (
        ColumnSpec("a", "int4", nullable=False, descending=True),
        ColumnSpec("b", "character", length=5),
        ColumnSpec("c", "decimal", precision=10, scale=3),
        ColumnSpec("d", "octet"),
        ColumnSpec("e", "int8", nullable=False, hidden=True),
    ),
    ("e", "a"),
)
DAMAGES = 10_000


def test_table_has_its_columns_keys_and_values() -> None:
    table = parse_metadata(table_metadata(TABLE, 5 << 32, 3))
    assert isinstance(table, SqlTable)
    assert (table.name, table.storage_id, table.is_visible) == ("t", 5 << 32, True)
    assert [(each.name, str(each.type)) for each in table.columns] == [
        ("a", "INT"),
        ("b", "VARCHAR(5)"),
        ("c", "DECIMAL(10,3)"),
        ("d", "VARBINARY(*)"),
        ("e", "BIGINT"),
    ]
    assert [each.is_nullable for each in table.columns] == [False, True, True, True, False]
    assert [each.is_hidden for each in table.columns] == [False, False, False, False, True]
    assert table.keys == (KeyColumn(4, False), KeyColumn(0, True))
    assert table.key_names == ("e", "a")
    assert table.values == (0, 1, 2, 3), "a descending key column is in the values, too"


def test_secondary_index_names_its_table() -> None:
    index = parse_metadata(index_metadata("ix", "t", [("b", True)], 6 << 32, 4))
    assert index == SecondaryIndex("ix", 6 << 32, "t", 14)


def test_table_being_dropped_is_not_visible() -> None:
    table = parse_metadata(table_metadata(TABLE, 5 << 32, 3, reserved=True))
    assert isinstance(table, SqlTable)
    assert not table.is_visible


@pytest.mark.parametrize("version", VERSIONS)
def test_every_supported_version_is_read(version: int) -> None:
    table = parse_metadata(table_metadata(TABLE, 5 << 32, 3, version=version))
    assert isinstance(table, SqlTable)
    assert table.metadata_version == version


@pytest.mark.parametrize("version", [0, 1, 9, 15, 2**40])
def test_other_versions_are_rejected(version: int) -> None:
    with pytest.raises(BadMetadata, match=f"metadata version {version} is not supported"):
        parse_metadata(table_metadata(TABLE, 5 << 32, 3, version=version))


def test_storage_without_a_definition_is_none() -> None:
    value = table_metadata(TABLE, 5 << 32, 3)[:16]
    assert parse_metadata(value) is None
    assert defined_storage(value) == 5 << 32


def test_unknown_fields_are_ignored() -> None:
    value = table_metadata(TABLE, 5 << 32, 3) + number(99, 7) + block(98, b"new")
    assert parse_metadata(value) == parse_metadata(table_metadata(TABLE, 5 << 32, 3))


@given(tables())
def test_generated_table_is_read_as_it_was_written(spec: TableSpec) -> None:
    table = parse_metadata(table_metadata(spec, 1 << 32, 1))
    assert isinstance(table, SqlTable)
    assert table.column_names == tuple(each.name for each in spec.columns)
    assert table.key_names == spec.keys
    assert [table.columns[place].name for place in table.values] == [each.name for each in spec.stored]
    assert [part.is_descending for part in table.keys] == [spec.column(name).descending for name in spec.keys]
    for column, wanted in zip(table.columns, spec.columns, strict=True):
        assert column.is_nullable == wanted.nullable
        if column.type.name is TypeName.DECIMAL:
            assert (column.type.precision, column.type.scale) == (wanted.precision, wanted.scale)
        if column.type.name in (TypeName.CHARACTER, TypeName.OCTET):
            assert (column.type.length, column.type.varying) == (wanted.length, wanted.varying)


def broken(index: bytes) -> bytes:
    return envelope(1 << 32, index, 14)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"short", "metadata of 5 bytes"),
        (broken(b""), "no name"),
        (broken(named(20, "x")), "neither a table nor a secondary index"),
        (broken(named(20, "x") + number(30, 1)), "is a number"),
        (broken(block(20, block(3, b"\xff"))), "not UTF-8"),
        (broken(named(20, "x") + block(30, b"")), "no primary key"),
        (table_metadata(TableSpec("t", (ColumnSpec("a", "int4"), ColumnSpec("a", "int4")), ("a",)), 1, 1), "one name"),
        (table_metadata(TableSpec("t", (ColumnSpec("", "int4"),), ("",)), 1, 1), "column without a name"),
        (
            table_metadata(TableSpec("t", (ColumnSpec("a", "decimal", precision=39),), ("a",)), 1, 1),
            r"column t.a: DECIMAL\(39,0\) is not supported",
        ),
        (
            table_metadata(TableSpec("t", (ColumnSpec("a", "octet", varying=False),), ("a",)), 1, 1),
            "OCTET of length None",
        ),
    ],
)
def test_invalid_definition_is_rejected(value: bytes, problem: str) -> None:
    with pytest.raises(BadMetadata, match=problem):
        parse_metadata(value)


def test_column_of_an_unknown_type_is_rejected() -> None:
    value = table_metadata(TABLE, 1, 1).replace(
        block(1, b"d") + block(2, number(1, 11)), block(1, b"d") + block(2, b"")
    )
    assert parse_metadata(value)
    odd = table_metadata(TABLE, 1, 1).replace(b"\x12\x02\x08\x05", b"\x12\x02\x08\x0d")  # BIT
    with pytest.raises(BadMetadata, match=r"column t\.e: type 13 is not supported"):
        parse_metadata(odd)


def test_damaged_metadata_raise_nothing_else() -> None:
    rng = random.Random(22)
    whole = table_metadata(TABLE, 5 << 32, 3)
    failures = 0
    for _ in range(DAMAGES):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        del data[len(data) - rng.choice((0, 0, rng.randrange(len(data)))) :]
        try:
            parse_metadata(bytes(data))
        except BadMetadata:
            failures += 1
    assert failures > DAMAGES // 4
