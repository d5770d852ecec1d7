"""A space keeps its tuples through changes of its definition, or reports the violation."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.box import Box
from flowstone.box.engine import statements
from flowstone.box.engine.space import EngineSpace
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack
from tests.box.spaces import box_with, definition, on

ROWS = ((1, "b", 7), (2, "a", 7), (3, "c", None))


@pytest.fixture
def box() -> Box:
    box = box_with(definition(512, on("0:unsigned"), on("1:string"), fields="id:unsigned name:string"))
    for row in ROWS:
        statements.insert(box.begin(), box.space(512), pack(row))
    return box


def order(space: EngineSpace, index_id: int) -> list[Any]:
    return [unpack(raw)[0] for _, raw in space.index(index_id).scan()]


def test_index_is_found_by_id_and_by_name(box: Box) -> None:
    space = box.space(512)
    assert space.index(1) is space.index("i1")
    with pytest.raises(errors.NoSuchIndexId, match="No index #7 is defined in space 's512'"):
        space.index(7)
    with pytest.raises(errors.NoSuchIndexName, match="No index 'x' is defined in space 's512'"):
        space.index("x")


def test_altered_space_shares_unchanged_indexes(box: Box) -> None:
    old = box.space(512)
    altered = old.altered(
        definition(512, on("0:unsigned"), on("1:string"), on("2:number?", unique=False), name="renamed"), box.collations
    )
    assert altered.index(0) is old.index(0)
    assert altered.index(1) is old.index(1)
    assert order(altered, 2) == [3, 1, 2]
    assert len(altered) == 3
    assert old.indexes.keys() == {0, 1}


def test_changed_parts_rebuild_the_index_and_a_changed_primary_key_rebuilds_all(box: Box) -> None:
    old = box.space(512)
    reversed_parts = old.altered(definition(512, on("0:unsigned"), on("1:string 0:unsigned")), box.collations)
    assert reversed_parts.index(0) is old.index(0)
    assert reversed_parts.index(1) is not old.index(1)
    by_name = old.altered(definition(512, on("1:string"), on("2:number?", unique=False)), box.collations)
    assert order(by_name, 0) == [2, 1, 3]
    assert order(by_name, 1) == [3, 2, 1]
    assert order(old, 0) == [1, 2, 3]


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (definition(512, on("0:unsigned"), on("2:unsigned?")), errors.TupleFound),
        (definition(512, on("0:unsigned"), on("2:unsigned", unique=False)), errors.FieldType),
        (definition(512, on("0:unsigned"), on("5:unsigned")), errors.FieldMissing),
        (definition(512, on("0:unsigned"), fields="id:unsigned name:unsigned"), errors.FieldType),
        (definition(512, on("0:unsigned"), field_count=2), errors.ExactFieldCount),
    ],
)
def test_definition_that_existing_tuples_violate_is_rejected(
    box: Box, wanted: Any, error: type[errors.TarantoolError]
) -> None:
    with pytest.raises(error):
        box.space(512).altered(wanted, box.collations)
    assert order(box.space(512), 1) == [2, 1, 3]


def test_emptying_does_not_change_the_old_space(box: Box) -> None:
    old = box.space(512)
    emptied = old.empty(box.collations)
    assert (len(emptied), len(old)) == (0, 3)
    assert emptied.definition is old.definition


def test_space_without_a_primary_key_has_no_tuples() -> None:
    space = box_with(definition(512)).space(512)
    assert (space.primary, len(space), list(space.tuples())) == (None, 0, [])


def test_entries_are_divided_into_removed_and_added(box: Box) -> None:
    space = box.space(512)
    (_, gone, there), (_, names_gone, names_there) = space.entries((1, "b"), (1, "z"))
    assert (gone, there) == ([], [1])
    assert (names_gone, names_there) == ([b"b"], [b"z"])


def test_unsupported_index_type_gets_no_entries() -> None:
    box = box_with(definition(512, on("0:unsigned"), on("1:array", type="rtree", unique=False)))
    space = box.space(512)
    statements.insert(box.begin(), space, pack((1, (1, 2))))
    assert [index.definition.id for index in space.served] == [0]
    assert len(space.index(1)) == 0
