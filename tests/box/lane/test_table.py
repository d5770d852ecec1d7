"""Tables: which spaces have one, what of them is compiled, and how long a table is kept."""

from __future__ import annotations

import pytest

from flowstone.box.lane.table import table_of
from tests.box.spaces import box_with, definition, on


@pytest.mark.parametrize(
    ("parts", "is_compiled"),
    [
        ("0:unsigned", True),
        ("1:string", True),
        ("1:string 0:integer", True),
        ("1:scalar?", True),
        ("1:number 2:boolean", True),
        ("1:uuid", True),
        ("1:varbinary", True),
        ("1.name:string", False),
        ("1[*]:unsigned", False),
        ("1:string 1:string", False),
        ("1:decimal", False),
        ("1:double", False),
    ],
)
def test_table_compiles_keys_of_plain_parts(parts: str, is_compiled: bool) -> None:
    table = table_of(box_with(definition(512, on("0:unsigned"), on(parts))).space(512))
    assert table is not None
    assert [index.is_compiled for index in table.indexes] == [True, is_compiled]
    assert table.is_plain


def test_table_is_kept_until_the_space_changes() -> None:
    space = box_with(definition(512, on("0:unsigned"))).space(512)
    assert table_of(space) is table_of(space)
    altered = space.altered(definition(512, on("0:unsigned"), on("1:unsigned")), {})
    changed = table_of(altered)
    assert changed is not None
    assert len(changed.indexes) == 2


def test_space_without_an_index_or_of_the_system_has_no_table() -> None:
    box = box_with(definition(512), definition(280, on("0:unsigned")))
    assert table_of(box.space(512)) is None
    assert table_of(box.space(280)) is None


@pytest.mark.parametrize("flags", [{"temporary": True}, {"group_id": 1}])
def test_table_of_a_space_with_rows_of_its_own_kind_is_not_plain(flags: dict[str, object]) -> None:
    table = table_of(box_with(definition(512, on("0:unsigned"), flags=flags)).space(512))
    assert table is not None
    assert not table.is_plain
