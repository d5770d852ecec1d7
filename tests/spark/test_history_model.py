"""The model of a history detects errors that a mirror could make."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from flowstone.box.ddl import functions as ddl
from flowstone.iproto.msgpack import pack
from tests.spark.box_archive import BoxArchive
from tests.spark.fold.test_state_frames import change_, put, remove, step, upsert
from tests.spark.history_model import State, differences, expected, found_in

SPACE = 512
States = Counter[State]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> BoxArchive:
    made = BoxArchive(tmp_path_factory.mktemp("history") / "archive")
    made.commit(
        step(ddl.create_space, "orders", format=[("id", "unsigned"), ("name", "string"), ("n", "integer")]),
        step(ddl.create_index, "orders", "pk", parts=[1, "unsigned"]),
    )
    made.commit(put("orders", 1, "before", 0), put("orders", 2, "before", 0))
    return made


@pytest.fixture(scope="module")
def begun(archive: BoxArchive) -> int:
    """Return the version of the snapshot; every kind of change of a row follows it."""
    begun = archive.lsn
    archive.commit(put("orders", 3, "new", 0))
    archive.commit(change_("orders", (1,), ("+", "n", 5)), upsert("orders", (3, "x", 9), ("+", 2, 1)))
    archive.commit(remove("orders", 2), put("orders", 2, "again", 0), change_("orders", (2,), ("=", 1, "twice")))
    archive.commit(remove("orders", 3))
    archive.commit(upsert("orders", (4, "fresh", 0), ("+", 2, 1)))
    archive.commit(step(ddl.truncate, "orders"))
    archive.commit(put("orders", 1, "last", 0))
    archive.commit(remove("orders", 77), change_("orders", (78,), ("=", 1, "nothing")))
    archive.save()
    return begun


@pytest.fixture
def states(archive: BoxArchive, begun: int) -> States:
    return expected(Path(archive.directory), begun, [SPACE])[SPACE].states


def test_every_change_creates_or_ends_a_state(states: States, begun: int) -> None:
    at = [begun + behind for behind in range(12)]
    assert states == Counter(
        [
            State(pack((1, "before", 0)), "insert", None, at[0], at[3]),
            State(pack((2, "before", 0)), "insert", None, at[0], at[6]),
            State(pack((3, "new", 0)), "replace", (1, at[1]), at[1], at[3]),
            State(pack((1, "before", 5)), "update", (1, at[2]), at[3], at[9]),
            State(pack((3, "new", 1)), "upsert", (1, at[3]), at[3], at[7]),
            State(pack((2, "again", 0)), "replace", (1, at[5]), at[6], at[6]),
            State(pack((2, "twice", 0)), "update", (1, at[6]), at[6], at[9]),
            State(pack((4, "fresh", 0)), "upsert", (1, at[8]), at[8], at[9]),
            State(pack((1, "last", 0)), "replace", (1, at[10]), at[10], None),
        ]
    )


def rows_of(states: States) -> list[dict[str, object]]:
    """Return the rows as a table has them."""
    return [
        {
            "_tuple": state.raw,
            "_operation": state.operation,
            "_replica_id": state.place[0] if state.place else None,
            "_lsn": state.place[1] if state.place else None,
            "_from_version": state.since,
            "_to_version": state.until,
            "_is_current": state.until is None,
        }
        for state in states.elements()
    ]


def test_table_with_each_state_once_has_no_differences(states: States) -> None:
    assert differences(states, found_in(rows_of(states))) == []


@pytest.mark.parametrize("operation", ["insert", "replace", "update", "upsert"])
def test_duplicate_or_missing_state_is_detected(states: States, operation: str) -> None:
    for state in [state for state in states if state.operation == operation]:
        twice = states + Counter([state])
        assert [line.partition(":")[0] for line in differences(states, found_in(rows_of(twice)))] == ["too often"]
        lost = states - Counter([state])
        assert [line.partition(":")[0] for line in differences(states, found_in(rows_of(lost)))] == ["missing"]


@pytest.mark.parametrize("name", ["delete", "truncate"])
def test_lost_or_late_end_of_a_state_is_detected(states: States, begun: int, name: str) -> None:
    version = begun + {"delete": 7, "truncate": 9}[name]
    ended = Counter(state for state in states if state.until == version)
    assert ended
    for until in (None, version + 1):
        planted = states - ended + Counter(state._replace(until=until) for state in ended)
        said = differences(states, found_in(rows_of(planted)))
        assert {line.partition(":")[0] for line in said} == {"too often", "missing"}


def test_operation_folded_twice_is_detected(states: States) -> None:
    (once,) = (state for state in states if state.raw == pack((3, "new", 1)))
    planted = states - Counter([once]) + Counter([once._replace(raw=pack((3, "new", 2)))])
    assert len(differences(states, found_in(rows_of(planted)))) == 2
