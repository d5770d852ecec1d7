"""Transactions are atomic, roll back from the newest statement, and conflict with the first committer."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import pytest

from flowstone.box.access import GUEST
from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.box.engine import statements
from flowstone.box.engine.index import WHOLE
from flowstone.box.engine.transaction import ADMIN, BoxTransaction, InteractiveTransaction, Isolation
from flowstone.box.system import TRUNCATE_ID
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from tests.box.spaces import box_with, definition, on

SPACE = 512
PLAIN = 513
TEMPORARY = 514
SYNC = 515
LOCAL = 516


@pytest.fixture
def box() -> Box:
    """Return a box whose spaces have (1, "a"), (3, "c") and (5, "e"): one with a unique index on names, one without."""
    made = box_with(
        definition(SPACE, on("0:unsigned"), on("1:string"), fields="id:unsigned name:string"),
        definition(PLAIN, on("0:unsigned")),
        definition(TEMPORARY, on("0:unsigned"), flags={"temporary": True}),
        definition(SYNC, on("0:unsigned"), flags={"is_sync": True}),
        definition(LOCAL, on("0:unsigned"), flags={"group_id": 1}),
    )
    for space_id in (SPACE, PLAIN):
        for row in ((1, "a"), (3, "c"), (5, "e")):
            statements.insert(made.begin(), made.space(space_id), pack(row))
    return made


def insert(transaction: BoxTransaction, *row: Any, space: int = SPACE) -> None:
    statements.insert(transaction, transaction.space(space), pack(row))


def replace(transaction: BoxTransaction, *row: Any, space: int = SPACE) -> None:
    statements.replace(transaction, transaction.space(space), pack(row))


def delete(transaction: BoxTransaction, key: Any, *, index: int = 0, space: int = SPACE) -> None:
    statements.delete(transaction, transaction.space(space), index, pack((key,)))


def get(transaction: BoxTransaction, key: Any, *, index: int = 0, space: int = SPACE) -> Any:
    found = statements.get(transaction, transaction.space(space), index, pack((key,)))
    return None if found is None else unpack(found)


def select(
    transaction: BoxTransaction, *key: Any, iterator: int = statements.GE, limit: int = 100, index: int = 0
) -> Any:
    space = transaction.space(SPACE)
    found = statements.select(transaction, space, index, iterator=iterator, limit=limit, key=pack(key))
    return [unpack(raw)[0] for raw in found]


def names(box: Box, space_id: int = SPACE) -> str:
    return "".join(unpack(raw)[1] for raw in box.space(space_id).tuples())


# --- immediate ------------------------------------------------------------------------------------


def test_writes_are_visible_at_once_and_gone_after_a_rollback(box: Box) -> None:
    transaction = box.begin()
    replace(transaction, 1, "z")
    delete(transaction, 3)
    insert(transaction, 4, "a")
    assert names(box) == "zae"
    transaction.rollback()
    assert names(box) == "ace"
    assert select(box.begin(), index=1) == [1, 3, 5]
    assert transaction.statements == []


def test_rollback_to_a_savepoint_undoes_later_statements(box: Box) -> None:
    transaction = box.begin()
    insert(transaction, 7, "g")
    savepoint = transaction.savepoint()
    for _ in range(2):
        insert(transaction, 9, "i")
        delete(transaction, 7)
        transaction.rollback_to(savepoint)
        assert names(box) == "aceg"
    assert [statement.type for statement in transaction.statements] == [RequestType.INSERT]


def test_duplicate_unique_key_changes_nothing(box: Box) -> None:
    transaction = box.begin()
    with pytest.raises(errors.TupleFound, match="unique index 'i1' in space 's512'"):
        replace(transaction, 1, "c")
    assert names(box) == "ace"
    assert transaction.statements == []
    replace(transaction, 3, "c")


def test_truncation_and_earlier_writes_are_rolled_back_in_order(box: Box) -> None:
    transaction = box.begin()
    insert(transaction, 7, "g")
    statements.replace(transaction, box.space(TRUNCATE_ID), pack((SPACE, 1)))
    insert(transaction, 8, "h")
    assert names(box) == "h"
    transaction.rollback()
    assert names(box) == "ace"


def test_rejected_change_of_a_system_space_leaves_no_row(box: Box) -> None:
    transaction = box.begin()
    with pytest.raises(errors.TruncateSystemSpace):
        statements.replace(transaction, box.space(TRUNCATE_ID), pack((280, 1)))
    assert len(box.space(TRUNCATE_ID)) == 0
    assert transaction.statements == []


def test_temporary_spaces_are_not_logged_and_synchronous_spaces_set_the_flag(box: Box) -> None:
    transaction = box.begin()
    insert(transaction, 1, space=TEMPORARY)
    assert (transaction.statements, transaction.is_sync) == ([], False)
    insert(transaction, 1, space=SYNC)
    assert (len(transaction.statements), transaction.is_sync) == (1, True)
    transaction.rollback_to((1, 0))
    assert not transaction.is_sync
    transaction.rollback()
    assert len(box.space(TEMPORARY)) == 0


def test_transaction_made_synchronous_stays_synchronous_when_prepared(box: Box) -> None:
    transaction = box.begin_interactive()
    insert(transaction, 7, "g")
    assert not transaction.is_sync
    transaction.make_sync()
    assert transaction.is_sync
    assert transaction.prepare().is_sync


def test_fully_local_transaction_cannot_be_synchronous(box: Box) -> None:
    transaction = box.begin_interactive()
    transaction.make_sync()
    insert(transaction, 1, space=LOCAL)
    with pytest.raises(errors.IllegalParams, match="An attempt to commit a fully local transaction synchronously"):
        transaction.prepare()
    assert len(box.space(LOCAL)) == 0
    mixed = box.begin_interactive()
    mixed.make_sync()
    insert(mixed, 1, space=LOCAL)
    insert(mixed, 7, "g")
    assert mixed.prepare().is_sync


def test_linearizable_transaction_rejects_spaces_written_without_a_quorum(box: Box) -> None:
    transaction = box.begin_interactive(isolation=Isolation.LINEARIZABLE)
    with pytest.raises(errors.Unsupported, match='space "s512" does not support linearizable operations'):
        get(transaction, 1)
    for space in (SYNC, TEMPORARY, LOCAL):
        insert(transaction, 1, space=space)
        assert get(transaction, 1, space=space) == (1,)


def test_linearizable_transaction_does_not_see_pending_writes(box: Box) -> None:
    pending = box.begin()
    insert(pending, 1, space=SYNC)
    box.in_flight.append(pending)
    assert get(box.begin_interactive(isolation=Isolation.LINEARIZABLE), 1, space=SYNC) is None
    assert get(box.begin_interactive(), 1, space=SYNC) == (1,)


def test_rollback_actions_run_in_reverse_order_with_the_statements(box: Box) -> None:
    transaction, seen = box.begin(), []
    insert(transaction, 7, "g")
    transaction.on_rollback(lambda: seen.append(names(box)))
    insert(transaction, 8, "h")
    transaction.rollback()
    assert seen == ["aceg"]


# --- interactive ----------------------------------------------------------------------------------


@pytest.fixture
def one(box: Box) -> InteractiveTransaction:
    return box.begin_interactive()


@pytest.fixture
def other(box: Box) -> InteractiveTransaction:
    return box.begin_interactive()


def test_interactive_transaction_alone_sees_its_own_writes(box: Box, one: InteractiveTransaction) -> None:
    replace(one, 1, "z")
    delete(one, 3)
    insert(one, 4, "d")
    assert select(one) == [1, 4, 5]
    assert select(one, index=1) == [4, 5, 1]
    assert get(one, "z", index=1) == (1, "z")
    assert names(box) == "ace"
    one.prepare()
    assert names(box) == "zde"


def test_transaction_reads_the_state_at_its_first_statement(box: Box, one: InteractiveTransaction) -> None:
    replace(box.begin(), 5, "y")
    assert get(one, 5) == (5, "y")
    replace(box.begin(), 1, "z")
    delete(box.begin(), 3)
    assert get(one, 1) == (1, "a")
    assert select(one) == [1, 3, 5]
    assert not one.prepare().statements


def test_rollback_leaves_no_trace(box: Box, one: InteractiveTransaction) -> None:
    delete(one, 1)
    one.rollback()
    assert names(box) == "ace"
    assert box.views == []
    delete(box.begin(), 1)
    assert get(one, 1) is None
    insert(one, 2, "b")
    one.prepare()
    assert names(box) == "bce"


def test_transaction_opens_a_view_with_its_first_permitted_statement(box: Box, one: InteractiveTransaction) -> None:
    one.space(SPACE)
    one.user = GUEST
    with pytest.raises(errors.AccessDenied):
        get(one, 1)
    with pytest.raises(errors.AccessDenied):
        replace(one, 1, "x")
    assert box.views == []
    truncate(box.begin())
    one.user = ADMIN
    insert(one, 1, "x")
    assert len(box.views) == 1
    one.prepare()
    assert names(box) == "x"


def test_prepared_transaction_can_be_rolled_back(box: Box, one: InteractiveTransaction) -> None:
    delete(one, 1)
    replace(one, 3, "x")
    prepared = one.prepare()
    assert [statement.type for statement in prepared.statements] == [RequestType.DELETE, RequestType.REPLACE]
    prepared.rollback()
    assert names(box) == "ace"
    assert select(box.begin(), index=1) == [1, 3, 5]


def test_savepoint_restores_earlier_writes(box: Box, one: InteractiveTransaction) -> None:
    replace(one, 1, "x")
    savepoint = one.savepoint()
    replace(one, 1, "y")
    insert(one, 2, "b")
    one.rollback_to(savepoint)
    assert get(one, 1) == (1, "x")
    assert select(one, index=1) == [3, 5, 1]
    one.prepare()
    assert names(box) == "xce"


def taken(transaction: BoxTransaction, *row: Any) -> None:
    with pytest.raises(errors.TupleFound):
        insert(transaction, *row)


def update(transaction: BoxTransaction, key: int) -> None:
    statements.update(transaction, transaction.space(SPACE), 0, pack((key,)), pack((("=", 2, "new"),)))


def truncate(transaction: BoxTransaction) -> None:
    statements.replace(transaction, transaction.space(TRUNCATE_ID), pack((SPACE, 1)))


def there_and_back(transaction: BoxTransaction) -> None:
    delete(transaction, 3)
    insert(transaction, 3, "c")


Change = Callable[[BoxTransaction], Any]

CONFLICTS: dict[str, tuple[Change, Change]] = {
    "a key it read": (lambda txn: get(txn, 3), lambda txn: delete(txn, 3)),
    "a key it did not find": (lambda txn: get(txn, 4), lambda txn: insert(txn, 4, "d")),
    "a key it inserted": (lambda txn: insert(txn, 4, "d"), lambda txn: insert(txn, 4, "x")),
    "a key that it found taken": (lambda txn: taken(txn, 4, "c"), lambda txn: delete(txn, 3)),
    "a unique key of another index": (lambda txn: insert(txn, 4, "d"), lambda txn: insert(txn, 6, "d")),
    "a tuple it replaced, by another index": (lambda txn: replace(txn, 3, "x"), lambda txn: replace(txn, 3, "y")),
    "a tuple it updated": (lambda txn: update(txn, 3), lambda txn: replace(txn, 3, "y")),
    "a range it read": (lambda txn: select(txn, 2), lambda txn: insert(txn, 9, "i")),
    "a range, in the part that it read": (lambda txn: select(txn, 2, limit=1), lambda txn: insert(txn, 2, "b")),
    "a range read backwards": (
        lambda txn: select(txn, 4, iterator=statements.LT, limit=1),
        lambda txn: replace(txn, 3, "x"),
    ),
    "a range of another index": (lambda txn: select(txn, "d", index=1), lambda txn: insert(txn, 2, "x")),
    "a count": (
        lambda txn: statements.count(txn, txn.space(SPACE), 0, iterator=statements.ALL),
        lambda txn: delete(txn, 1),
    ),
    "a truncated space": (lambda txn: get(txn, 99), truncate),
}

PEACE: dict[str, tuple[Change, Change]] = {
    "another key": (lambda txn: get(txn, 3), lambda txn: replace(txn, 1, "x")),
    "behind what it read of a range": (lambda txn: select(txn, 2, limit=1), lambda txn: insert(txn, 4, "d")),
    "before what it read of a range": (lambda txn: select(txn, 2), lambda txn: replace(txn, 1, "x")),
    "below what it read backwards": (
        lambda txn: select(txn, 4, iterator=statements.LT, limit=1),
        lambda txn: insert(txn, 2, "x"),
    ),
    "a range that ends before": (
        lambda txn: select(txn, 4, iterator=statements.LT),
        lambda txn: insert(txn, 9, "x"),
    ),
    "a tuple overwritten unread": (
        lambda txn: replace(txn, 3, "x", space=PLAIN),
        lambda txn: replace(txn, 3, "y", space=PLAIN),
    ),
    "the same index of another space": (lambda txn: get(txn, 3), lambda txn: delete(txn, 3, space=PLAIN)),
    "a tuple put back as it was": (lambda txn: get(txn, 3), there_and_back),
    "nothing that it read, as it asked for none": (
        lambda txn: select(txn, limit=0),
        lambda txn: insert(txn, 9, "x"),
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_transaction_with_stale_reads_cannot_commit(box: Box, one: InteractiveTransaction, name: str) -> None:
    mine, theirs = CONFLICTS[name]
    mine(one)
    replace(one, 77, "mine", space=PLAIN)
    theirs(box.begin())
    with pytest.raises(errors.TransactionConflict, match="Transaction has been aborted by conflict"):
        one.prepare()
    assert get(box.begin(), 77, space=PLAIN) is None
    assert box.views == []


@pytest.mark.parametrize("name", PEACE)
def test_transaction_with_unrelated_reads_can_commit(box: Box, one: InteractiveTransaction, name: str) -> None:
    mine, theirs = PEACE[name]
    mine(one)
    replace(one, 77, "mine", space=PLAIN)
    theirs(box.begin())
    one.prepare()
    assert get(box.begin(), 77, space=PLAIN) == (77, "mine")


def test_first_committer_wins_a_conflict(box: Box, one: InteractiveTransaction, other: InteractiveTransaction) -> None:
    for transaction, name in ((one, "one"), (other, "other")):
        get(transaction, 1)
        replace(transaction, 1, name)
    other.prepare()
    with pytest.raises(errors.TransactionConflict):
        one.prepare()
    assert get(box.begin(), 1) == (1, "other")


def test_write_skew_is_a_conflict(box: Box, one: InteractiveTransaction, other: InteractiveTransaction) -> None:
    """Each reads a key that the other writes: no serial order gives both results."""
    get(one, 1)
    replace(one, 3, "x")
    get(other, 3)
    replace(other, 1, "y")
    one.prepare()
    with pytest.raises(errors.TransactionConflict):
        other.prepare()


def test_rolled_back_write_is_not_a_conflict(box: Box, one: InteractiveTransaction) -> None:
    failing = box.begin()
    get(one, 1)
    replace(failing, 3, "x")
    assert get(one, 3) == (3, "c")
    replace(one, 5, "mine")
    failing.rollback()
    one.prepare()
    assert names(box) == "acmine"


def test_transaction_that_read_a_rolled_back_write_cannot_commit(box: Box) -> None:
    failing = box.begin()
    replace(failing, 3, "x")
    one = box.begin_interactive()
    assert get(one, 3) == (3, "x")
    replace(one, 5, "mine")
    failing.rollback()
    with pytest.raises(errors.TransactionConflict):
        one.prepare()


def test_confirmed_reads_do_not_see_pending_writes(box: Box) -> None:
    in_flight = box.begin()
    replace(in_flight, 3, "x")
    box.in_flight.append(in_flight)
    confirmed = box.begin_interactive(isolation=Isolation.READ_CONFIRMED)
    assert get(confirmed, 3) == (3, "c")
    assert get(box.begin_interactive(), 3) == (3, "x")


def test_altered_space_aborts_the_transaction(box: Box, one: InteractiveTransaction) -> None:
    get(one, 1, space=PLAIN)
    truncate(box.begin())
    with pytest.raises(errors.TransactionConflict):
        get(one, 1)
    assert box.views == []
    one.rollback()
    assert get(one, 1) is None


def test_confirmed_read_of_a_space_with_a_pending_definition_is_a_conflict(box: Box) -> None:
    in_flight = box.begin()
    truncate(in_flight)
    box.in_flight.append(in_flight)
    confirmed = box.begin_interactive(isolation=Isolation.READ_CONFIRMED)
    with pytest.raises(errors.TransactionConflict):
        get(confirmed, 1)
    assert box.views == []


def test_failed_transaction_returns_only_its_error(box: Box, one: InteractiveTransaction) -> None:
    insert(one, 7, "lost", space=PLAIN)
    get(one, 1)
    truncate(box.begin())
    for step in (
        lambda: get(one, 1),
        lambda: insert(one, 8, "x", space=PLAIN),
        lambda: one.find(box.space(PLAIN).index(0), 1),
        lambda: next(one.scan(box.space(PLAIN).index(0), WHOLE)),
        one.prepare,
    ):
        with pytest.raises(errors.TransactionConflict):
            step()
    assert names(box, PLAIN) == "ace"
    assert box.views == []


def test_error_of_a_failed_transaction_does_not_grow_when_repeated(one: InteractiveTransaction) -> None:
    def told() -> errors.TarantoolError:
        with pytest.raises(errors.NoTransaction) as found:
            one.check()
        return found.value

    one.end()
    frames = [sum(1 for _ in walk_tb(told().__traceback__)) for _ in range(3)]
    assert frames == frames[:1] * 3


def test_finished_transaction_rejects_statements(
    box: Box, one: InteractiveTransaction, other: InteractiveTransaction
) -> None:
    insert(one, 7, "g", space=PLAIN)
    one.prepare()
    other.end()
    for transaction in (one, other):
        with pytest.raises(errors.NoTransaction):
            insert(transaction, 8, "h", space=PLAIN)
    assert names(box, PLAIN) == "aceg"


def test_failed_statement_is_rolled_back_alone(box: Box) -> None:
    def insert_and_fail() -> None:
        insert(transaction, 9, "i")
        raise KeyboardInterrupt

    for transaction in (box.begin(), box.begin_interactive()):
        insert(transaction, 7, "g")
        with pytest.raises(KeyboardInterrupt):
            transaction.attempt(insert_and_fail)
        assert select(transaction) == [1, 3, 5, 7]
        transaction.rollback()


def test_rows_of_system_spaces_take_effect_with_the_commit(box: Box, one: InteractiveTransaction) -> None:
    truncate(one)
    insert(one, 2, "b")
    assert names(box) == "ace"
    one.prepare()
    assert names(box) == "b"


def test_invalid_rows_of_system_spaces_are_rejected_by_the_commit(box: Box, one: InteractiveTransaction) -> None:
    insert(one, 2, "b")
    statements.insert(one, one.space("_index"), pack((PLAIN, 7, "odd", "nonsense", {}, ((0, "unsigned"),))))
    with pytest.raises(errors.IndexType):
        one.prepare()
    assert names(box) == "ace"
    assert not [row for row in box.space("_index").tuples() if b"nonsense" in row]


def test_functions_that_change_definitions_are_rejected_with_an_explanation(one: InteractiveTransaction) -> None:
    with pytest.raises(errors.Unsupported, match="does not support functions that change definitions"):
        ddl.create_space(one, "another")
