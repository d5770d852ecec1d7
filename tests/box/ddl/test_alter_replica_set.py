"""The UUID of the replica set is fixed; members are registered and removed; rows of newer servers are trusted."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from flowstone.box.box import Box
from flowstone.box.ddl.alter_replica_set import FORMER_MEMBER
from flowstone.box.engine import statements
from flowstone.box.system import SCHEMA_ID
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack
from tests.box.bootstrapped import bootstrapped, delete, insert, recover, replace, rows, run

A, B, C = (f"aaaaaaaa-0000-4000-8000-00000000000{number}" for number in (1, 2, 3))


@pytest.fixture
def box() -> Box:
    return bootstrapped()


def test_replica_set_uuid_cannot_change(box: Box) -> None:
    for change, row in ((replace, ("cluster", A)), (delete, ("cluster",))):
        with pytest.raises(errors.ReplicasetUuidIsRo, match="Can't reset replica set UUID"):
            run(box, change, "_schema", *row)
    run(box, insert, "_schema", "once something")
    assert len(rows(box, "_schema")) == 4


def test_members_are_added_and_removed(box: Box) -> None:
    run(box, insert, "_cluster", 2, A)
    run(box, replace, "_cluster", 2, A.upper())
    run(box, delete, "_cluster", 2)
    assert [row[0] for row in rows(box, "_cluster")] == [1]


def test_former_members_are_kept_unless_their_deletion_is_rolled_back(box: Box) -> None:
    run(box, insert, "_cluster", 2, A)
    run(box, insert, "_cluster", 3, B)
    run(box, delete, "_cluster", 2)
    transaction = box.begin()
    statements.delete(transaction, box.space("_cluster"), 0, pack((3,)))
    assert box.former_members == {(2, UUID(A)), (3, UUID(B))}
    transaction.rollback()
    assert box.former_members == {(2, UUID(A))}


def records(box: Box) -> list[tuple[Any, ...]]:
    return [row for row in rows(box, "_schema") if row[0].startswith(FORMER_MEMBER)]


def test_former_members_are_recorded_with_their_deletion_and_recovered_from_a_snapshot(box: Box) -> None:
    run(box, insert, "_cluster", 2, A)
    run(box, insert, "_cluster", 3, B)
    for number in (2, 3):
        run(box, delete, "_cluster", number)
    assert records(box) == [("flowstone_former_member_2", A), ("flowstone_former_member_3", B)]
    other = bootstrapped()
    recover(other, [(SCHEMA_ID, pack(record)) for record in records(box)])
    assert other.former_members == {(2, UUID(A)), (3, UUID(B))}
    assert other.deleted_members == set()


def test_former_members_are_recorded_by_interactive_transactions_too(box: Box) -> None:
    run(box, insert, "_cluster", 2, A)
    transaction = box.begin_interactive()
    statements.delete(transaction, transaction.space("_cluster"), 0, pack((2,)))
    prepared = transaction.prepare()
    assert [statement.space.name for statement in prepared.statements if statement.space] == ["_cluster", "_schema"]
    assert box.former_members == {(2, UUID(A))}
    prepared.rollback()
    assert box.former_members == set()
    assert records(box) == []


def test_newest_uuid_of_an_id_is_recorded_until_its_row_is_deleted(box: Box) -> None:
    for uuid in (B, A):
        run(box, insert, "_cluster", 2, uuid)
        run(box, delete, "_cluster", 2)
    assert box.recorded_members == {2: UUID(A)}
    run(box, delete, "_schema", "flowstone_former_member_2")
    assert box.recorded_members == {}


@pytest.mark.parametrize(
    "row", [("2",), ("2", None), ("2", "no uuid"), ("2", {}), ("0", A), ("32", A), ("02", A), ("", A)]
)
def test_malformed_record_of_a_former_member_is_ignored(box: Box, row: tuple[Any, ...]) -> None:
    recover(box, [(SCHEMA_ID, pack((f"{FORMER_MEMBER}{row[0]}", *row[1:])))])
    assert box.former_members == set()


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ((0, A), errors.ReplicaIdIsReserved, "Can't initialize replica id with a reserved value 0"),
        ((32, A), errors.ReplicaMax, "Replica count limit reached: 32"),
        ((2, "no uuid"), errors.InvalidUuid, "Invalid UUID: no uuid"),
        ((2, "00000000-0000-0000-0000-000000000000"), errors.InvalidUuid, "Invalid UUID"),
    ],
)
def test_member_needs_an_id_and_a_uuid(box: Box, row: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        run(box, insert, "_cluster", *row)


def test_uuid_of_a_member_cannot_change(box: Box) -> None:
    run(box, insert, "_cluster", 2, A)
    with pytest.raises(errors.Unsupported, match="Space _cluster does not support updates of instance uuid"):
        run(box, replace, "_cluster", 2, B)


def test_named_member_may_return_with_another_uuid(box: Box) -> None:
    recover(box, [(320, pack((2, A, "replica"))), (320, pack((3, B)))])
    box.is_recovering = True
    run(box, replace, "_cluster", 2, C, "replica")
    with pytest.raises(errors.Unsupported, match="updates of instance uuid"):
        run(box, replace, "_cluster", 3, A)
    assert rows(box, "_cluster", 2) == [(2, C, "replica")]


def test_recovery_accepts_unknown_keys_and_ids(box: Box) -> None:
    recover(box, [(272, pack(("replicaset_uuid", A))), (320, pack((2, B)))])
    with pytest.raises(errors.ReplicasetUuidIsRo):
        run(box, replace, "_schema", "replicaset_uuid", B)


def test_schema_version_determines_whether_an_upsert_may_change_a_field_twice(box: Box) -> None:
    assert not box.repeats_updates
    for version, repeats in (((2, 11, 5), False), ((3, 8, 0), True), (("two",), False), ((3,), True)):
        run(box, replace, "_schema", "version", *version)
        assert box.repeats_updates is repeats
    transaction = box.begin()
    delete(transaction, "_schema", "version")
    assert not box.repeats_updates
    transaction.rollback()
    assert box.repeats_updates
