"""Assignment of changes to files, and the end of states in a history."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.lake.row_changes import RowChanges, RowStates, ended_at, in_key_order, shares, without_keys
from flowstone.lake.table_files import KeyRange, SortedKeys
from flowstone.lake.table_schema import LakeSchema
from tests.spark.lake_rows_given import ORDERS, folded, key_of, moment, packed, states

KEYS = st.binary(max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(KEYS, KEYS), min_size=1), st.lists(KEYS, unique=True))
def test_new_key_belongs_to_one_file_and_old_keys_are_found(
    bounds: list[tuple[bytes, bytes]], new: list[bytes]
) -> None:
    ranges = sorted((KeyRange(min(pair), max(pair)) for pair in bounds), key=lambda each: each.first)
    keys = sorted(new)
    ordered = SortedKeys(pa.array(keys, pa.binary()))
    found = shares(ranges, ordered, ordered)
    homes = [place for share in found for place in share.home]
    assert homes == list(range(len(keys)))
    for between, share in zip(ranges, found, strict=True):
        assert between.last is not None
        touched = [place for place, key in enumerate(keys) if between.first <= key <= between.last]
        assert list(share.touched) == touched
        assert bool(share) == bool(share.touched or share.home)


def test_changes_are_in_key_order_without_deleted_rows() -> None:
    changes = RowChanges.of(folded({300: packed(300), 2: None, 1: packed(1)}), b"p")
    assert changes.keys.to_pylist() == [b"p" + key_of(number) for number in (1, 2, 300)]
    assert changes.upserts(LakeSchema(ORDERS), 0, 3)["id"].to_pylist() == [1, 300]
    assert changes.upserts(LakeSchema(ORDERS), 1, 2).num_rows == 0


def test_rows_are_split_by_keys_and_merged_in_order() -> None:
    schema = LakeSchema(ORDERS)
    rows = schema.rows(pa.array([b"a", b"b", b"c"]), pa.array([packed(1), packed(2), packed(3)]))
    kept, gone = without_keys(rows, pa.array([b"b", b"x"]))
    assert (kept["id"].to_pylist(), gone["id"].to_pylist()) == ([1, 3], [2])
    assert without_keys(rows, pa.array([b"x"]))[0] is rows
    assert in_key_order([kept, gone]) == rows
    assert in_key_order([rows.slice(0, 0), rows.slice(0, 0)]).num_rows == 0


def test_state_ends_when_the_next_state_of_its_key_begins() -> None:
    schema = LakeSchema(ORDERS, history=True)
    given = RowStates(states((2, packed(2, "a"), 3), (1, packed(1, "b"), 5), (1, packed(1, "a"), 4), (2, None, 6)), b"")
    current, former = given.current(schema), given.former(schema)
    shown = ("name", "_from_version", "_to_version", "_valid_to")
    assert [tuple(row[name] for name in shown) for row in current.to_pylist()] == [("b", 5, None, None)]
    assert [tuple(row[name] for name in shown) for row in former.to_pylist()] == [
        ("a", 4, 5, moment(5).timestamp),
        ("a", 3, 6, moment(6).timestamp),
    ]
    assert given.touched.to_pylist() == [
        {"_key": key_of(number), "commit_version": version, "commit_timestamp": moment(version).timestamp}
        for number, version in ((1, 4), (2, 3))
    ]
    assert ended_at(current, moment(9))["_to_version"].to_pylist() == [9]
