"""Images: each change as the tuples before and after it, from archives with images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flowstone.columns.change_contract import ChangeContract
from flowstone.columns.image_rows import Images
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.stream_order import StreamPlace, stamp
from tests.node.archived_rows import slab
from tests.spark.change_rows import (
    DELETE,
    INSERT,
    ORDERS,
    REPLACE,
    SCHEMA,
    UPDATE,
    UPSERT,
    UUID,
    statement,
    truncate,
    whole,
)

ONE, TWO, OTHER = (1, "one"), (2, "two"), (1, "eins", "more")


def row(kind: RequestType, lsn: int, body: dict[int, Any], old: object = None, new: object = None) -> Row:
    images = ({0x2C: old} if old else {}) | ({0x2D: new} if new else {})
    return statement(kind, lsn, {0x10: 512, **body, **images})


ROWS = whole(
    row(INSERT, 1, {0x21: ONE}),
    row(REPLACE, 2, {0x21: TWO}),
    row(REPLACE, 3, {0x21: OTHER}, old=ONE),
    row(UPDATE, 4, {0x20: (1,), 0x21: (("=", 1, "one"),)}, old=OTHER, new=ONE),
    row(UPSERT, 5, {0x21: (3, "x"), 0x28: ()}, new=(3, "x")),
    row(DELETE, 6, {0x20: (1,)}, old=ONE),
    row(DELETE, 7, {0x20: (9,)}),
    row(UPDATE, 8, {0x20: (9,), 0x21: ()}),
    truncate(9),
)


def changes(images: Images, space: Any = ORDERS) -> pa.Table:
    together = slab(ROWS)
    contract = ChangeContract(UUID, space, images=images)
    stamps, _ = stamp(together.cells, StreamPlace(VClock()), "log")
    table = pa.Table.from_batches(contract.batches(together, np.arange(len(together)), stamps, SCHEMA), contract.schema)
    table.validate(full=True)
    return table


def test_full_images_have_the_tuples_before_and_after_each_change() -> None:
    table = changes("full").select(["_lsn", "_operation", "_change_type", "id", "name", "_extra"])
    assert [tuple(each.values()) for each in table.to_pylist()] == [
        (1, "insert", "insert", 1, "one", None),
        (2, "replace", "insert", 2, "two", None),
        (3, "replace", "update_preimage", 1, "one", None),
        (3, "replace", "update_postimage", 1, "eins", '["more"]'),
        (4, "update", "update_preimage", 1, "eins", '["more"]'),
        (4, "update", "update_postimage", 1, "one", None),
        (5, "upsert", "insert", 3, "x", None),
        (6, "delete", "delete", 1, "one", None),
        (9, "truncate", "delete", None, None, None),
    ]


def test_post_images_have_the_tuple_after_each_change_or_the_deleted_one() -> None:
    table = changes("post")
    assert table.column_names[:3] == ["_operation", "_change_type", "_commit_version"]
    assert table.column("_lsn").to_pylist() == [1, 2, 3, 4, 5, 6, 9]
    assert "update_preimage" not in table.column("_change_type").to_pylist()
    assert set(table.column("_commit_version").to_pylist()) == {9}


def test_images_are_tuples_without_a_space() -> None:
    tuples = changes("full", None).column("_tuple").to_pylist()
    assert tuples[2:5] == ['[1,"one"]', '[1,"eins","more"]', '[1,"eins","more"]']


@pytest.mark.parametrize("images", ["post", "full"])
def test_operations_are_omitted_if_there_are_images(images: Images) -> None:
    assert not any(changes(images).column("_operations").to_pylist())
