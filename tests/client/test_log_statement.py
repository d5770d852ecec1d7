"""Rows as statements: which rows are replayed, and that their bytes are unchanged."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.client.log_statement import LogStatement, rebase, statement_of
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row, RowError

EXACT = b"\x93\x01\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xc4\x01a"  # [1, 1.0, binary a]


def statement(type: RequestType, body: bytes) -> LogStatement:
    found = statement_of(Row(type, lsn=5, body=body))
    assert found is not None
    return found


def test_insert_keeps_the_bytes_of_its_tuple() -> None:
    found = statement(RequestType.INSERT, b"\x82\x10\xcd\x02\x00\x21" + EXACT)
    assert found.for_lua() == (2, 512, 0, EXACT, b"")


def test_update_has_key_index_and_operations() -> None:
    operations = pack([["=", 2, 1.5]])
    body = b"\x85\x10\x05\x11\x03\x15\x01\x20" + EXACT + b"\x21" + operations
    found = statement(RequestType.UPDATE, body)
    assert found.for_lua() == (4, 5, 3, EXACT, operations)


def test_upsert_without_a_base_counts_from_zero() -> None:
    body = b"\x83\x10\xcd\x02\x00\x28" + pack([["+", 1, 1]]) + b"\x21" + EXACT
    found = statement(RequestType.UPSERT, body)
    assert found.subject == EXACT
    assert unpack(found.for_lua()[4]) == (("+", 2, 1),)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["=", 0, 7], ("=", 1, 7)),
        (["=", -1, 7], ("=", -1, 7)),
        (["=", "name", 7], ("=", "name", 7)),
        ([":", 2, 0, 5, "x"], (":", 3, 1, 5, "x")),
        ([":", 2, -1, 5, "x"], (":", 3, -1, 5, "x")),
        (["#", 127, 1], ("#", 128, 1)),
    ],
)
def test_field_numbers_change_from_base_zero_to_base_one(before: Any, after: Any) -> None:
    assert unpack(rebase(pack([before]), 0)) == (after,)
    assert unpack(rebase(pack([before, before]), 0)) == (after, after)


def test_field_numbers_are_converted_from_any_base() -> None:
    assert unpack(rebase(pack([["=", 5, 1], ["=", 1, 1]]), 3)) == (("=", 3, 1), ("=", 0, 1))


def test_arguments_keep_their_bytes() -> None:
    operations = b"\x91\x93\xa1=\x01" + EXACT
    assert rebase(operations, 0) == b"\x91\x93\xa1=\x02" + EXACT


@pytest.mark.parametrize("type", [RequestType.NOP, RequestType.RAFT, RequestType.RAFT_CONFIRM])
def test_rows_that_change_no_space_are_skipped(type: RequestType) -> None:
    assert statement_of(Row(type, body=b"\x80")) is None


def truncate(*key: Any, replica_id: int = 1) -> Row:
    return Row(RequestType.REPLACE, replica_id, lsn=5, body=pack({0x10: 330, 0x21: key}))


def test_truncate_belongs_to_the_truncated_space() -> None:
    found = statement_of(truncate(512, 1, "new field"))
    assert found is not None
    assert (found.space_id, found.changed_space_id) == (330, 512)
    assert statement(RequestType.INSERT, b"\x82\x10\xcd\x02\x00\x21" + EXACT).changed_space_id == 512


@pytest.mark.parametrize("key", [(), ("text",), (-1,)])
def test_malformed_truncate_belongs_to_its_own_space(key: tuple[Any, ...]) -> None:
    found = statement_of(truncate(*key))
    assert found is not None
    assert found.changed_space_id == 330


def test_snapshot_truncate_counts_are_not_replayed() -> None:
    assert statement_of(truncate(512, 1, replica_id=0)) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80",
        b"\x81\x10\x05",
        b"\x82\x10\x05\x21\x01",
        b"\x82\x10\xc0\x21\x90",
        b"\x82\x10\x05\x21\x92\x01",
    ],
)
def test_error_names_the_missing_key_of_a_row(body: bytes) -> None:
    with pytest.raises(RowError):
        statement_of(Row(RequestType.INSERT, lsn=7, body=body))


@given(st.binary(max_size=60), st.sampled_from([2, 3, 4, 5, 9]), st.integers(0, 5))
def test_random_bodies_give_a_statement_or_a_row_error(body: bytes, type: int, base: int) -> None:
    with contextlib.suppress(RowError):
        statement_of(Row(type, body=body))
    with contextlib.suppress(RowError):
        rebase(body, base)
