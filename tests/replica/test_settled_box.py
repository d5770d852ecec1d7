"""The contents of a settled box: whole transactions, of selected spaces, never rolled back."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.node.changes import SettledChange
from flowstone.node.spaces import Space
from flowstone.replica.settled_box import CannotApply, FollowedSpaces, RowsNeeded, SettledBox, SnapshotBox
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import make_transaction

SYNC = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
QUEUED = Flag.WAIT_SYNC.value
ORDERS, OTHER, LATER = 512, 513, 514

Operation = tuple[RequestType, dict[int, Any]]


def insert(space_id: int, *values: Any) -> Operation:
    return RequestType.INSERT, {0x10: space_id, 0x21: values}


def replace(space_id: int, *values: Any) -> Operation:
    return RequestType.REPLACE, {0x10: space_id, 0x21: values}


def delete(space_id: int, *key: Any) -> Operation:
    return RequestType.DELETE, {0x10: space_id, 0x20: key}


def update(space_id: int, key: int, *operations: Any) -> Operation:
    return RequestType.UPDATE, {0x10: space_id, 0x20: (key,), 0x21: operations}


def upsert(space_id: int, values: tuple[Any, ...], *operations: Any) -> Operation:
    return RequestType.UPSERT, {0x10: space_id, 0x21: values, 0x28: operations}


def definition(space_id: int, name: str, **options: Any) -> tuple[Any, ...]:
    return space_id, 1, name, "memtx", 0, options, ({"name": "id", "type": "unsigned"},)


def index(space_id: int) -> tuple[Any, ...]:
    return space_id, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),)


class Upstream:
    """Builds a log of one replica; each call is a slab of one transaction."""

    def __init__(self, replica_id: int = 1) -> None:
        self.replica_id = replica_id
        self.lsn = 0

    def transaction(self, *operations: Operation, flags: int = 0) -> bytes:
        rows = []
        for kind, body in operations:
            self.lsn += 1
            rows.append(Row(kind, self.replica_id, lsn=self.lsn, timestamp=1000.0 + self.lsn, body=pack(body)))
        return b"".join(row.encode() for row in make_transaction(rows, flags).rows)

    def slab(self, *operations: Operation, flags: int = 0) -> Slab:
        return slab_of_rows(self.transaction(*operations, flags=flags), "upstream")

    def verdict(self, kind: RequestType, lsn: int) -> Slab:
        return self.slab((kind, {0x02: self.replica_id, 0x03: lsn}))

    def confirm(self, lsn: int) -> Slab:
        return self.verdict(RequestType.RAFT_CONFIRM, lsn)

    def rollback(self, lsn: int) -> Slab:
        return self.verdict(RequestType.RAFT_ROLLBACK, lsn)


def snapshot_of(
    *tuples: tuple[int, tuple[Any, ...]], spaces: Collection[str | int] | None = None, vclock: VClock | None = None
) -> SnapshotBox:
    """Return a snapshot of the spaces `orders` and `other` with these tuples."""
    rows = [
        (280, definition(ORDERS, "orders")),
        (280, definition(OTHER, "other")),
        (288, index(ORDERS)),
        (288, index(OTHER)),
        *tuples,
    ]
    made = SnapshotBox(Dialect.V2_6, vclock or VClock(), FollowedSpaces(spaces))
    body = [pack({0x10: space_id, 0x21: values}) for space_id, values in rows]
    data = b"".join(
        Row(RequestType.INSERT, lsn=number, timestamp=1.0, body=each).encode() for number, each in enumerate(body, 1)
    )
    made.push(slab_of_rows(data, "snapshot"))
    made.complete()
    return made


def settled_box(
    *tuples: tuple[int, tuple[Any, ...]], spaces: Collection[str | int] | None = None, has_flags: bool = True
) -> SettledBox:
    box = SettledBox(snapshot_of(*tuples, spaces=spaces), FollowedSpaces(spaces))
    box.resume(has_flags=has_flags)
    return box


def content(box: SettledBox, space_id: int = ORDERS) -> list[tuple[Any, ...]]:
    return [unpack(raw) for raw in box.box.space(space_id).tuples()]


def told_by(box: SettledBox) -> list[list[tuple[str, str | None, Any, Any]]]:
    told: list[list[tuple[str, str | None, Any, Any]]] = []

    def tell(changes: list[SettledChange]) -> None:
        told.append([(change.type, change.space, _values(change.old), _values(change.new)) for change in changes])

    box.on_transaction.append(tell)
    return told


def _values(found: Any) -> Any:
    return found.values if found is not None else None


def test_each_change_is_delivered_with_the_tuple_before_and_after() -> None:
    box, log = settled_box((ORDERS, (1, "tea"))), Upstream()
    told = told_by(box)
    box.push(log.slab(insert(ORDERS, 2, 5)))
    box.push(log.slab(replace(ORDERS, 1, "cup")))
    box.push(log.slab(update(ORDERS, 2, ("+", 1, 1)), upsert(ORDERS, (2, 0), ("+", 1, 1)), upsert(ORDERS, (3, 9))))
    box.push(log.slab(delete(ORDERS, 1)))
    box.push(log.slab(delete(ORDERS, 1)))  # a row without effect is not delivered
    assert told == [
        [("INSERT", "orders", None, (2, 5))],
        [("REPLACE", "orders", (1, "tea"), (1, "cup"))],
        [
            ("UPDATE", "orders", (2, 5), (2, 6)),
            ("UPSERT", "orders", (2, 6), (2, 7)),
            ("UPSERT", "orders", None, (3, 9)),
        ],
        [("DELETE", "orders", (1, "cup"), None)],
    ]
    assert content(box) == [(2, 7), (3, 9)]
    assert box.vclock == VClock({1: 7})


def test_synchronous_transaction_is_neither_visible_nor_delivered_before_its_confirm() -> None:
    box, log = settled_box(), Upstream()
    told = told_by(box)
    box.push(log.slab(insert(ORDERS, 1), flags=SYNC))
    box.push(log.slab(insert(ORDERS, 2), flags=Flag.WAIT_SYNC.value))
    assert (content(box), told, box.vclock, box.held_count) == ([], [], VClock(), 2)
    box.push(log.confirm(1))
    assert content(box) == [(1,), (2,)]
    assert told == [[("INSERT", "orders", None, (1,))], [("INSERT", "orders", None, (2,))]]
    assert (box.vclock, box.held_count) == (VClock({1: 3}), 0)


def test_rolled_back_transaction_has_no_effect_and_advances_the_position() -> None:
    box, log = settled_box(), Upstream()
    told = told_by(box)
    box.push(log.slab(insert(ORDERS, 1), flags=SYNC))
    box.push(log.slab(insert(ORDERS, 2), flags=Flag.WAIT_SYNC.value))
    box.push(log.rollback(1))
    box.push(log.slab(insert(ORDERS, 3)))
    assert content(box) == [(3,)]
    assert told == [[("INSERT", "orders", None, (3,))]]
    assert box.vclock == VClock({1: 4})


def test_rows_without_flags_are_synchronous_by_the_definition_of_their_space() -> None:
    box, log = settled_box(has_flags=False), Upstream()
    box.push(log.slab(replace(280, *definition(ORDERS, "orders", is_sync=True))))
    box.push(log.slab(insert(ORDERS, 1)))
    box.push(log.slab(insert(OTHER, 1)))
    assert (content(box), content(box, OTHER)) == ([], [])
    box.push(log.confirm(2))
    assert (content(box), content(box, OTHER)) == ([(1,)], [(1,)])


def test_pending_definition_decides_which_later_transactions_are_synchronous() -> None:
    box, log = settled_box(has_flags=False), Upstream()
    box.push(log.slab(replace(280, *definition(ORDERS, "orders", is_sync=True))))
    box.push(log.slab(insert(ORDERS, 1)))
    box.push(log.slab(replace(280, *definition(OTHER, "other", is_sync=True))))
    box.push(log.slab(insert(OTHER, 1)))
    box.push(log.confirm(2))
    assert (content(box), content(box, OTHER)) == ([(1,)], [])
    box.push(log.confirm(4))
    assert content(box, OTHER) == [(1,)]


def test_pending_transactions_are_dropped_when_rows_restart() -> None:
    box, log = settled_box(), Upstream()
    box.push(log.slab(insert(ORDERS, 1)))
    lost = log.slab(insert(ORDERS, 2), flags=SYNC)
    box.push(lost)
    box.resume(has_flags=True)
    assert (box.held_count, box.vclock) == (0, VClock({1: 1}))
    log.lsn = 1
    box.push(log.slab(insert(ORDERS, 7), flags=SYNC))
    box.push(log.confirm(2))
    assert content(box) == [(1,), (7,)]


def test_rows_of_a_former_owner_from_a_lagging_member_change_nothing() -> None:
    """The address now leads to another member, which sends rows from before the known PROMOTE."""
    box, old, new = settled_box(), Upstream(), Upstream(2)
    box.push(old.slab((RequestType.RAFT_PROMOTE, {0x02: 0, 0x03: 0, 0x53: 2})))
    box.push(old.slab(insert(ORDERS, 1), flags=SYNC))
    box.push(new.slab((RequestType.RAFT_PROMOTE, {0x02: 1, 0x03: 2, 0x53: 3})))
    box.resume(has_flags=True)
    box.push(old.slab(insert(ORDERS, 2), flags=SYNC))
    box.push(old.slab(insert(ORDERS, 3), flags=QUEUED))
    box.push(new.slab(insert(ORDERS, 4), flags=SYNC))
    assert (content(box), box.held_count) == ([(1,)], 1)
    box.push(new.confirm(2))
    assert (content(box), box.held_count) == ([(1,), (4,)], 0)
    assert box.vclock == VClock({1: 4, 2: 3})


def test_known_rows_are_skipped() -> None:
    box, log = settled_box(), Upstream()
    first, second = log.transaction(insert(ORDERS, 1)), log.transaction(insert(ORDERS, 2), insert(ORDERS, 3))
    told = told_by(box)
    box.push(slab_of_rows(first, "a"))
    box.push(slab_of_rows(first + second, "b"))
    box.push(slab_of_rows(second, "c"))
    assert len(told) == 2
    assert box.vclock == VClock({1: 3})


@pytest.mark.parametrize("is_told", [False, True])
def test_long_runs_of_plain_rows_equal_single_rows(is_told: bool) -> None:
    box, log = settled_box((ORDERS, (5, "old"))), Upstream()
    told = told_by(box) if is_told else None
    box.push(slab_of_rows(b"".join(log.transaction(replace(ORDERS, n % 50, n)) for n in range(100)), "upstream"))
    box.push(slab_of_rows(b"".join(log.transaction(insert(ORDERS, 100 + n, n)) for n in range(100)), "upstream"))
    assert content(box) == [*((n, n + 50) for n in range(50)), *((100 + n, n) for n in range(100))]
    box.push(slab_of_rows(b"".join(log.transaction(delete(ORDERS, 40 + n)) for n in range(70)), "upstream"))
    assert content(box) == [*((n, n + 50) for n in range(40)), *((100 + n, n) for n in range(10, 100))]
    if told is not None:
        assert len(told) == 220
        assert told[5] == [("REPLACE", "orders", (5, "old"), (5, 5))]
        assert told[55] == [("REPLACE", "orders", (5, 5), (5, 55))]
        assert told[-1] == [("DELETE", "orders", (109, 9), None)]
    assert box.vclock == VClock({1: 270})


def test_run_of_plain_rows_ends_before_a_row_that_does_not_fit() -> None:
    box, log = settled_box((ORDERS, (15,))), Upstream()
    with pytest.raises(CannotApply, match="LSN 16 of replica 1: Duplicate key"):
        box.push(slab_of_rows(b"".join(log.transaction(insert(ORDERS, n)) for n in range(20)), "upstream"))
    assert (len(content(box)), box.vclock) == (16, VClock({1: 15}))


def test_plain_rows_after_a_pending_transaction_are_pending() -> None:
    box, log = settled_box(), Upstream()
    box.push(log.slab(insert(ORDERS, 1), flags=SYNC))
    box.push(slab_of_rows(b"".join(log.transaction(insert(ORDERS, 10 + n)) for n in range(20)), "upstream"))
    assert content(box) == []
    box.push(log.confirm(1))
    assert len(content(box)) == 21


# --- selected spaces ---


def test_only_selected_spaces_are_kept_and_delivered() -> None:
    box, log = settled_box((ORDERS, (1,)), (OTHER, (1,)), spaces=["orders"]), Upstream()
    told = told_by(box)
    assert (content(box), content(box, OTHER)) == ([(1,)], [])
    box.push(log.slab(insert(OTHER, 2), insert(ORDERS, 2), insert(OTHER, 3)))
    box.push(slab_of_rows(b"".join(log.transaction(insert(OTHER, n)) for n in range(10, 30)), "upstream"))
    assert (content(box), content(box, OTHER)) == ([(1,), (2,)], [])
    assert told == [[("INSERT", "orders", None, (2,))]]
    assert box.vclock == VClock({1: 23})
    assert box.follows(box.box.space(ORDERS))
    assert not box.follows(box.box.space(OTHER))


def test_space_may_be_selected_by_id() -> None:
    box = settled_box((ORDERS, (1,)), (OTHER, (1,)), spaces=[OTHER])
    assert (content(box), content(box, OTHER)) == ([], [(1,)])


def test_space_created_under_a_selected_name_is_replicated() -> None:
    box, log = settled_box(spaces=["later"]), Upstream()
    told = told_by(box)
    box.push(log.slab(insert(280, *definition(LATER, "later"))))
    box.push(log.slab(insert(288, *index(LATER))))
    box.push(log.slab(insert(LATER, 1)))
    assert content(box, LATER) == [(1,)]
    assert told == [[("INSERT", "later", None, (1,))]]


def test_space_renamed_from_a_selected_name_is_dropped() -> None:
    box, log = settled_box((ORDERS, (1,)), spaces=["orders"]), Upstream()
    box.push(log.slab(update(280, ORDERS, ("=", 2, "bygone"))))
    box.push(log.slab(insert(ORDERS, 2)))
    assert content(box) == []


def test_snapshot_is_needed_if_a_space_with_skipped_tuples_gets_a_selected_name() -> None:
    box, log = settled_box((OTHER, (1,)), spaces=["later"]), Upstream()
    box.push(log.slab(insert(OTHER, 2)))
    with pytest.raises(RowsNeeded, match="'later' was not followed under its former name"):
        box.push(log.slab(update(280, OTHER, ("=", 2, "later"))))
    assert (box.box.space(OTHER).name, box.vclock) == ("other", VClock({1: 1}))
    box.resume(has_flags=True)


def test_truncation_and_drop_are_delivered_for_their_space() -> None:
    box, log = settled_box((ORDERS, (1,)), spaces=["orders"]), Upstream()
    told = told_by(box)
    box.push(log.slab(replace(330, ORDERS, 1)))
    assert content(box) == []
    box.push(log.slab(insert(ORDERS, 2)))
    box.push(log.slab(delete(330, ORDERS)))
    box.push(log.slab(delete(288, ORDERS, 0)))
    box.push(log.slab(delete(280, ORDERS)))
    assert told == [
        [("TRUNCATE", "orders", None, None)],
        [("INSERT", "orders", None, (2,))],
        [("DROP", "orders", None, None)],
    ]
    assert ORDERS not in box.box.spaces


def test_changes_of_system_spaces_are_delivered_without_a_selection() -> None:
    box, log = settled_box(), Upstream()
    told = told_by(box)
    box.push(log.slab(insert(280, *definition(LATER, "later"))))
    assert [(change[0], change[1]) for change in told[0]] == [("INSERT", "_space")]


# --- errors, and another snapshot ---


def test_row_that_cannot_be_applied_is_reported_and_its_transaction_undone() -> None:
    box, log = settled_box((ORDERS, (1,))), Upstream()
    with pytest.raises(CannotApply, match="cannot apply transaction with LSN 2 of replica 1: Duplicate key"):
        box.push(log.slab(insert(ORDERS, 2), insert(ORDERS, 1)))
    assert (content(box), box.vclock) == ([(1,)], VClock())


def test_invalid_replica_id_is_rejected() -> None:
    row = Row(RequestType.INSERT, 77, lsn=1, timestamp=1.0, body=pack({0x10: ORDERS, 0x21: (1,)}))
    with pytest.raises(Exception, match="Replica 77 is not registered"):
        settled_box().push(slab_of_rows(row.encode(), "upstream"))


class _Reader:
    """The interface that a space handle needs from its creator."""

    def __init__(self, box: SettledBox) -> None:
        self.box = box.box

    async def write(self, statement: Any) -> Any:
        raise AssertionError


def test_new_snapshot_replaces_the_data_and_handles_stay_valid() -> None:
    box, log = settled_box((ORDERS, (1, "tea"))), Upstream()
    orders, other = Space(_Reader(box), ORDERS), Space(_Reader(box), OTHER)
    assert orders.get(1) == (1, "tea")
    view = box.box.open_view()
    box.replace(snapshot_of((ORDERS, (1, "cup")), (ORDERS, (2, "pot")), (OTHER, (9,)), vclock=VClock({1: 50})))
    assert orders.get(1) == (1, "cup")
    assert [each.values for each in orders] == [(1, "cup"), (2, "pot")]
    assert [each.values for each in other] == [(9,)]
    assert [unpack(raw) for raw in view.spaces[ORDERS].tuples()] == [(1, "tea")]
    view.close()
    box.resume(has_flags=True)
    log.lsn = 50
    box.push(log.slab(insert(ORDERS, 3)))
    assert (len(orders), box.vclock) == (3, VClock({1: 51}))


def test_guard_is_held_while_a_transaction_is_applied_and_not_during_delivery() -> None:
    steps: list[str] = []

    class Guard(AbstractContextManager[None]):
        def __enter__(self) -> None:
            steps.append("in")

        def __exit__(self, *error: object) -> None:
            steps.append("out")

    box, log = SettledBox(snapshot_of(), FollowedSpaces(None), guard=Guard()), Upstream()
    box.on_transaction.append(lambda changes: steps.append("told"))
    box.push(log.slab(insert(ORDERS, 1)))
    assert steps == ["in", "out", "told"]
