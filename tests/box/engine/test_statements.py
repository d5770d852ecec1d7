"""Statements: their checks in order, their results, and their log rows.

`test_model.py` and the conformance table check their effects on tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.access import Privilege
from flowstone.box.box import Box
from flowstone.box.engine import statements
from flowstone.box.engine.statements import ALL, EQ, GE, GT, LE, LT, REQ
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from tests.box.bootstrapped import bootstrapped
from tests.box.spaces import box_with, definition, on, put

READER = 50


@pytest.fixture
def box() -> Box:
    made = box_with(
        definition(
            512, on("0:unsigned"), on("1:string", unique=False), name="things", fields="id:unsigned name:string?"
        )
    )
    for row in ((1, "a"), (2, "b"), (3, "b")):
        statements.insert(made.begin(), made.space(512), pack(row))
    return made


def rows(transaction: BoxTransaction) -> list[tuple[int, dict[int, Any]]]:
    return [(statement.type, unpack(statement.body)) for statement in transaction.statements]


# --- the rows for the log -------------------------------------------------------------------------


def test_log_contains_the_statement_as_sent_by_the_client(box: Box) -> None:
    """In the key order of real servers."""
    transaction, space = box.begin(), box.space(512)
    statements.insert(transaction, space, pack((4, "d")))
    statements.replace(transaction, space, pack((4, "e")))
    statements.update(transaction, space, 0, pack((4,)), pack((("=", 2, "f"),)), index_base=1)
    statements.delete(transaction, space, 0, pack((4,)))
    statements.upsert(transaction, space, pack((5, "x")), pack((("=", 1, "y"),)))
    statements.upsert(transaction, space, pack((5, "x")), pack((("=", 2, "y"),)), index_base=1)
    assert [(type, list(body.items())) for type, body in rows(transaction)] == [
        (RequestType.INSERT, [(0x10, 512), (0x21, (4, "d"))]),
        (RequestType.REPLACE, [(0x10, 512), (0x21, (4, "e"))]),
        (RequestType.UPDATE, [(0x10, 512), (0x15, 1), (0x20, (4,)), (0x21, (("=", 2, "f"),))]),
        (RequestType.DELETE, [(0x10, 512), (0x20, (4,))]),
        (RequestType.UPSERT, [(0x10, 512), (0x28, (("=", 1, "y"),)), (0x21, (5, "x"))]),
        (RequestType.UPSERT, [(0x10, 512), (0x15, 1), (0x28, (("=", 2, "y"),)), (0x21, (5, "x"))]),
    ]
    assert statements.select(box.begin(), space, 0, key=pack((5,))) == [pack((5, "y"))]


def test_update_and_delete_of_an_absent_tuple_are_logged(box: Box) -> None:
    transaction, space = box.begin(), box.space(512)
    assert statements.update(transaction, space, 0, pack((9,)), pack((("=", 1, "x"),))) is None
    assert statements.delete(transaction, space, 0, pack((9,))) is None
    assert [type for type, _ in rows(transaction)] == [RequestType.UPDATE, RequestType.DELETE]


def test_statement_by_another_unique_index_is_logged_with_the_primary_key() -> None:
    box = box_with(definition(512, on("0:unsigned"), on("1:string")))
    transaction, space = box.begin(), box.space(512)
    statements.insert(transaction, space, pack((1, "a")))
    assert statements.update(transaction, space, 1, pack(("a",)), pack((("=", 2, 5),))) == pack((1, "a", 5))
    assert statements.delete(transaction, space, 1, pack(("a",))) == pack((1, "a", 5))
    assert statements.delete(transaction, space, 1, pack(("a",))) is None
    assert [list(body.items()) for _, body in rows(transaction)[1:]] == [
        [(0x10, 512), (0x20, (1,)), (0x21, (("=", 2, 5),))],
        [(0x10, 512), (0x20, (1,))],
        [(0x10, 512), (0x11, 1), (0x20, ("a",))],  # a statement that found no tuple names its index
    ]


def test_failed_statement_leaves_no_row(box: Box) -> None:
    transaction, space = box.begin(), box.space(512)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: statements.insert(transaction, space, pack((1, "x"))),
        lambda: statements.replace(transaction, space, pack(("x", "x"))),
        lambda: statements.update(transaction, space, 0, pack((1,)), pack((("=", 0, 7),))),
        lambda: statements.delete(transaction, space, 0, pack(("x",))),
        lambda: statements.upsert(transaction, space, pack((1, "x")), pack((("=", 1, 7),))),
    )
    for attempt in attempts:
        with pytest.raises(errors.TarantoolError):
            attempt()
    assert rows(transaction) == []


# --- reading --------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 20)), st.sampled_from(range(7)), st.none() | st.integers(0, 20))
def test_count_equals_the_number_of_selected_tuples(keys: set[int], iterator: int, key: int | None) -> None:
    box = box_with(definition(512, on("0:unsigned")))
    space = box.space(512)
    for each in sorted(keys):
        statements.insert(box.begin(), space, pack((each,)))
    raw = pack(() if key is None else (key,))
    found = statements.select(box.begin(), space, 0, iterator=iterator, key=raw)
    for transaction in (box.begin(), box.begin_interactive()):
        assert statements.count(transaction, space, 0, iterator=iterator, key=raw) == len(found)


@given(
    st.sets(st.tuples(st.integers(0, 6), st.sampled_from("abc"))),
    st.sampled_from((EQ, REQ, ALL, LT, LE, GE, GT)),
    st.sampled_from((0, 1)),
    st.sampled_from(((), ("b",), ("a",))),
    st.integers(1, 4),
)
def test_consecutive_pages_equal_the_whole_select(
    values: set[tuple[int, str]], iterator: int, index_id: int, key: tuple[Any, ...], size: int
) -> None:
    box = box_with(definition(512, on("1:string 0:unsigned"), on("1:string", unique=False)))
    space = box.space(512)
    for row in sorted(values):
        statements.insert(box.begin(), space, pack(row))
    index, raw = space.index(index_id), pack(key)
    found: list[bytes] = []
    after: bytes | None = None
    while page := statements.select(box.begin(), space, index_id, iterator=iterator, key=raw, limit=size, after=after):
        found += page
        after = statements.position_of(index, page[-1])
    assert found == statements.select(box.begin(), space, index_id, iterator=iterator, key=raw)


def test_page_may_start_after_a_deleted_tuple(box: Box) -> None:
    space = box.space(512)
    position = statements.position_of(space.index(0), pack((2, "b")))
    statements.delete(box.begin(), space, 0, pack((2,)))
    assert statements.select(box.begin(), space, 0, iterator=ALL, after=position) == [pack((3, "b"))]


@pytest.mark.parametrize("position", [b"", b"%%%", b"kQ==", b"BQ==", b"xAE=", b"/w==", b"wQ=="])
def test_position_of_another_index_is_rejected(box: Box, position: bytes) -> None:
    with pytest.raises(errors.IteratorPosition, match="Iterator position is invalid"):
        statements.select(box.begin(), box.space(512), 1, iterator=ALL, after=position)


def test_position_outside_of_the_selection_is_rejected(box: Box) -> None:
    space = box.space(512)
    position = statements.position_of(space.index(0), pack((1, "a")))
    with pytest.raises(errors.IteratorPosition):
        statements.select(box.begin(), space, 0, iterator=GT, key=pack((2,)), after=position)


def test_multikey_index_has_no_pages() -> None:
    box = box_with(definition(512, on("0:unsigned"), on("1[*]:unsigned", unique=False)))
    with pytest.raises(errors.Unsupported, match="does not support pagination"):
        statements.position_of(box.space(512).index(1), pack((1, (2, 3))))


def test_get_requires_a_full_key_of_a_unique_index(box: Box) -> None:
    transaction, space = box.begin(), box.space(512)
    assert statements.get(transaction, space, 0, pack((1,))) == pack((1, "a"))
    assert statements.get(transaction, space, 0, pack((9,))) is None
    with pytest.raises(errors.MoreThanOneTuple):
        statements.get(transaction, space, 1, pack(("a",)))
    with pytest.raises(errors.ExactMatch):
        statements.get(transaction, space, 0, pack(()))


def test_unsupported_index_is_rejected_with_an_explanation() -> None:
    box = box_with(definition(512, on("0:unsigned"), on("1:array", type="rtree", unique=False), name="places"))
    space = box.space(512)
    statements.insert(box.begin(), space, pack((1, (1, 2))))
    with pytest.raises(errors.Unsupported, match="reading through RTREE index 'i1' of space 'places': use another"):
        statements.select(box.begin(), space, 1, iterator=ALL)
    assert len(statements.select(box.begin(), space, 0, iterator=ALL)) == 1


# --- checks before execution --------------------------------------------------------------------

WRITES: dict[str, Callable[[BoxTransaction, Any], Any]] = {
    "insert": lambda txn, space: statements.insert(txn, space, pack((9, "x"))),
    "replace": lambda txn, space: statements.replace(txn, space, pack((1, "x"))),
    "update": lambda txn, space: statements.update(txn, space, 0, pack((1,)), pack((("=", 1, "x"),))),
    "upsert": lambda txn, space: statements.upsert(txn, space, pack((1, "x")), pack(())),
    "delete": lambda txn, space: statements.delete(txn, space, 0, pack((1,))),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_requires_the_write_privilege(name: str) -> None:
    box = bootstrapped()
    space = put(box, definition(512, on("0:unsigned"), name="things"))
    statements.insert(box.begin(), box.space("_user"), pack((READER, 1, "reader", "user", {})))
    box.access.put_grant(READER, "universe", 0, Privilege.SESSION | Privilege.USAGE)
    box.access.put_grant(READER, "space", 512, Privilege.READ)
    statements.insert(box.begin(), space, pack((1, "a")))
    transaction = box.begin(READER)
    with pytest.raises(errors.AccessDenied, match="Write access to space 'things' is denied for user 'reader'"):
        WRITES[name](transaction, space)
    assert statements.select(transaction, space, 0, iterator=ALL) == [pack((1, "a"))]
    box.access.put_grant(READER, "space", 512, Privilege.WRITE)
    WRITES[name](transaction, space)
    with pytest.raises(errors.AccessDenied, match="Read access to space 'things' is denied for user 'reader'"):
        statements.select(transaction, space, 0, iterator=ALL)


@pytest.mark.parametrize("name", WRITES)
def test_read_only_instance_accepts_writes_only_to_temporary_and_local_spaces(name: str) -> None:
    box = box_with(
        definition(512, on("0:unsigned")),
        definition(513, on("0:unsigned"), flags={"temporary": True}),
        definition(514, on("0:unsigned"), flags={"group_id": 1}),
    )
    box.is_read_only = True
    with pytest.raises(errors.Readonly):
        WRITES[name](box.begin(), box.space(512))
    for space_id in (513, 514):
        WRITES[name](box.begin(), box.space(space_id))


@pytest.mark.parametrize("name", WRITES)
def test_system_views_reject_writes(name: str) -> None:
    box = bootstrapped()
    with pytest.raises(errors.ViewIsRo, match="View '_vspace' is read-only"):
        WRITES[name](box.begin(), box.space("_vspace"))


@pytest.mark.parametrize("name", ["insert", "replace", "update", "upsert"])
def test_tuple_above_the_size_limit_is_rejected(box: Box, name: str) -> None:
    box.tuple_size_max = 10
    with pytest.raises(errors.MemtxMaxTupleSize):
        WRITES[name](box.begin(), box.space(512))


@pytest.mark.parametrize("name", WRITES)
def test_space_without_a_primary_key_rejects_writes(name: str) -> None:
    box = box_with(definition(512, name="bare"))
    with pytest.raises(errors.NoSuchIndexId, match="No index #0 is defined in space 'bare'"):
        WRITES[name](box.begin(), box.space(512))


def test_invalid_iterator_is_rejected_before_the_key_is_checked(box: Box) -> None:
    with pytest.raises(errors.IllegalParams, match="Invalid iterator type"):
        statements.select(box.begin(), box.space(512), 0, iterator=12, key=pack(("x",)))
    with pytest.raises(errors.UnsupportedIndexFeature, match="does not support requested iterator type"):
        statements.select(box.begin(), box.space(512), 0, iterator=7, key=pack((1,)))


def test_hash_index_is_paged_by_the_key_of_the_last_tuple() -> None:
    box = box_with(definition(512, on("0:string 1:unsigned", type="hash")))
    for number in range(10):
        statements.insert(box.begin(), box.space(512), pack((str(number), number)))
    transaction = box.begin_interactive()
    statements.insert(transaction, transaction.space(512), pack(("mine", 99)))
    for reader, count in ((box.begin(), 10), (transaction, 11)):
        found: list[bytes] = []
        piece = statements.select(reader, box.space(512), 0, iterator=GT, limit=3)
        while piece:
            found += piece
            piece = statements.select(reader, box.space(512), 0, iterator=GT, limit=3, key=piece[-1])
        assert len(set(found)) == len(found) == count
        assert statements.count(reader, box.space(512), 0, iterator=GT, key=pack(("3", 3))) < count - 1


def test_hash_index_has_nothing_after_a_key_that_does_not_exist() -> None:
    box = box_with(definition(512, on("0:unsigned", type="hash")))
    for number in (1, 5, 9):
        statements.insert(box.begin(), box.space(512), pack((number,)))
    for reader in (box.begin(), box.begin_interactive()):
        space = reader.space(512)
        for key, rest in ((5, 1), (4, 0), (9, 0)):
            assert len(statements.select(reader, space, 0, iterator=GT, key=pack((key,)))) == rest
            assert statements.count(reader, space, 0, iterator=GT, key=pack((key,))) == rest
