"""A past state equals the engine's state at that time, including system spaces, and truncated, recreated and rekeyed
spaces.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from flowstone.box.ddl import functions as ddl
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.box.schema import SchemaTracker
from flowstone.box.update.update import UpdateRules
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.msgpack import pack
from flowstone.outside.disk import SystemDisk
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.key_fold import FoldDefinitions
from flowstone.spark.fold.state_frames import CHANGES, DEFINING, STATE, SpacePlan, fold_sorted, plan_spaces, state_frame
from flowstone.spark.index.log_index import ArchiveIndex, DataLoss, NotSettled
from tests.box.spaces import definition, on
from tests.conftest import FULL
from tests.spark.box_archive import BoxArchive, Held
from tests.spark.fold_rows import change, table

Step = Callable[[BoxTransaction], object]


def step(function: Callable[..., object], *arguments: Any, **options: Any) -> Step:
    return lambda transaction: function(transaction, *arguments, **options)


def put(space: str, *values: Any) -> Step:
    return lambda txn: statements.replace(txn, txn.space(space), pack(values))


def remove(space: str, *key: Any) -> Step:
    return lambda txn: statements.delete(txn, txn.space(space), 0, pack(key))


def change_(space: str, key: tuple[Any, ...], *operations: Any) -> Step:
    return lambda txn: statements.update(txn, txn.space(space), 0, pack(key), pack(operations))


def upsert(space: str, values: tuple[Any, ...], *operations: Any) -> Step:
    return lambda txn: statements.upsert(txn, txn.space(space), pack(values), pack(operations))


def held_in(frame: DataFrame) -> Held:
    """Return the tuples of each space in key order; no key occurs twice."""
    rows = frame.toArrow()
    assert rows.schema.names == STATE.names
    found: dict[int, dict[bytes, bytes]] = {}
    for row in rows.sort_by([("space_id", "ascending"), ("sort_key", "ascending")]).to_pylist():
        assert row["sort_key"] not in found.setdefault(row["space_id"], {})
        found[row["space_id"]][row["sort_key"]] = row["tuple"]
    return {space_id: list(tuples.values()) for space_id, tuples in found.items()}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> BoxArchive:
    """Return an archive of everything that can happen to a space, with a snapshot in the middle."""
    made = BoxArchive(tmp_path_factory.mktemp("state") / "archive")
    made.commit(step(ddl.create_space, "plain", format=[("id", "unsigned"), ("name", "string"), ("n", "integer")]))
    made.commit(step(ddl.create_index, "plain", "pk", parts=[1, "unsigned"]))
    made.commit(step(ddl.create_space, "words"), step(ddl.create_index, "words", "pk", parts=[2, "string"]))
    made.commit(*(put("plain", number, f"n{number}", 0) for number in range(20)))
    made.commit(*(put("words", number, f"w{number}") for number in range(10)))
    made.commit(change_("plain", (3,), ("=", 1, "changed"), ("+", 2, 5)), remove("plain", 4))
    made.commit(step(ddl.truncate, "words"), put("words", 77, "kept"))
    made.checkpoint()
    made.commit(upsert("plain", (3, "x", 1), ("+", 2, 1)), upsert("plain", (100, "new", 1), ("+", 2, 1)))
    # Names in operations are the field names of that time.
    made.commit(change_("plain", (5,), ("=", "name", "by name")))
    made.commit(step(ddl.format_space, "plain", [("id", "unsigned"), ("title", "string"), ("name", "integer")]))
    made.commit(change_("plain", (5,), ("=", "name", 55)))
    # The primary key is altered twice; keys in between belong to the current definition.
    made.commit(step(ddl.alter_index, "plain", "pk", parts=[2, "string"]))
    made.commit(change_("plain", ("by name",), ("+", 2, 1)), remove("plain", "n6"), put("plain", 500, "fresh", 9))
    made.commit(step(ddl.alter_index, "plain", "pk", parts=[1, "number", 2, "string"]))
    made.commit(remove("plain", 7, "n7"), change_("plain", (500, "fresh"), ("=", 2, 10)), put("plain", 501, "last", 0))
    made.commit(step(ddl.truncate, "words"))
    made.commit(put("words", 1, "again"), upsert("words", (2, "more"), ("=", 0, 3)))
    # The space is dropped and created again with the same id and another key.
    number = made.box.space("words").id
    made.commit(step(ddl.drop_space, "words"))
    made.commit(
        step(ddl.create_space, "other", id=number), step(ddl.create_index, "other", "pk", parts=[1, "unsigned"])
    )
    made.commit(put("other", 1, 2), put("other", 2, 2))
    made.commit(step(ddl.create_user, "someone", password="secret"))
    made.commit(step(ddl.drop_index, "other", "pk"), step(ddl.create_index, "other", "pk", parts=[2, "unsigned"]))
    made.commit(put("other", 9, 9))
    made.commit(step(ddl.drop_space, "other"))
    made.save()
    return made


def test_state_at_every_transaction_equals_the_engines(spark: SparkSession, archive: BoxArchive) -> None:
    index = ArchiveIndex.open(SystemDisk(), archive.directory)
    moments = sorted(archive.held.items())
    if not FULL:
        moments = [*random.Random(3).sample(moments[:-1], 3), moments[-6], moments[-1]]
    for lsn, held in moments:
        assert held_in(state_frame(spark, index, VClock({1: lsn}))) == held, lsn


def test_state_can_be_limited_to_some_spaces(spark: SparkSession, archive: BoxArchive) -> None:
    index = ArchiveIndex.open(SystemDisk(), archive.directory)
    lsn, held = next((lsn, held) for lsn, held in reversed(archive.held.items()) if 513 in held and len(held[513]) > 1)
    found = held_in(state_frame(spark, index, VClock({1: lsn}), spaces=(280, 513)))
    assert found == {280: held[280], 513: held[513]}
    assert held_in(state_frame(spark, index, VClock({1: lsn}), spaces=(9999,))) == {}


def test_state_without_a_snapshot_or_after_the_end_is_refused(spark: SparkSession, archive: BoxArchive) -> None:
    index = ArchiveIndex.open(SystemDisk(), archive.directory)
    with pytest.raises(NotSettled):
        state_frame(spark, index, VClock({1: archive.lsn + 1}))
    with pytest.raises((DataLoss, NotSettled)):
        state_frame(spark, index, VClock({2: 1}))


# --- without Spark --------------------------------------------------------------------------------------------------

PAIRS = definition(512, on("0:unsigned"), fields="id:unsigned name:string")


def test_keys_are_folded_completely_for_any_batch_boundaries() -> None:
    rows = [change(PAIRS, 1, 1, 2, pack({0x10: 512, 0x21: (1, "a")}))]
    rows += [
        change(PAIRS, lsn, lsn, 4, pack({0x10: 512, 0x20: (1,), 0x21: ((":", 1, 9, 0, "b"),)})) for lsn in range(2, 6)
    ]
    rows += [change(PAIRS, 9, number, 2, pack({0x10: 512, 0x21: (number, "x")})) for number in (2, 3)]
    changes = table(rows).select(list(CHANGES))
    plans = {512: SpacePlan(FoldDefinitions((PAIRS,)))}
    for size in range(1, len(rows) + 1):
        batches = [batch for start in range(0, len(rows), size) for batch in changes.slice(start, size).to_batches()]
        folded = pa.Table.from_batches(fold_sorted(plans, UpdateRules(), batches, at_once=2))
        assert folded["tuple"].to_pylist() == [pack((1, "abbbb")), pack((2, "x")), pack((3, "x"))]


def defining(place: tuple[int, int], operation: str, space_id: int, values: Any = None) -> dict[str, Any]:
    empty = dict.fromkeys(DEFINING)
    version, lsn = place
    whole = {"_commit_version": version, "_lsn": lsn, "_operation": operation, "_space_id": space_id, "_index_id": 0}
    return empty | whole | {"_index_base": 0, "_tuple_msgpack": None if values is None else pack(values)}


def space_row(number: int) -> tuple[Any, ...]:
    return (number, 1, f"s{number}", "memtx", 0, {}, [])


def key_row(number: int, *parts: tuple[int, str]) -> tuple[Any, ...]:
    return (number, 0, "pk", "tree", {"unique": True}, parts)


def test_space_plans_have_the_last_truncation_and_later_key_changes() -> None:
    rows = [
        defining((5, 4), "replace", 280, space_row(512)),
        defining((5, 5), "replace", 288, key_row(512, (0, "unsigned"))),
        defining((6, 6), "replace", 280, space_row(513)),
        defining((8, 8), "replace", 288, key_row(512, (1, "string"))),
        defining((7, 7), "truncate", 512),
        defining((9, 9), "truncate", 514),
    ]
    plans = plan_spaces(SchemaTracker(), pa.Table.from_pylist(rows))
    assert plans[512].void == (7, 7)
    assert plans[512].rekeyed == ((8, 8),)
    assert [plans[512].space_behind(stage).primary_key.parts[0].type for stage in (0, 1)] == ["unsigned", "string"]  # type: ignore[union-attr]
    # 513 cannot have tuples yet, 514 is unknown; system spaces are present.
    assert {513, 514}.isdisjoint(plans)
    assert 280 in plans
    assert set(plan_spaces(SchemaTracker(), None, (280, 600))) == {280}


def test_key_change_before_a_truncation_is_ignored() -> None:
    tracker = SchemaTracker()
    rows = [
        defining((1, 1), "replace", 280, space_row(512)),
        defining((2, 2), "replace", 288, key_row(512, (0, "unsigned"))),
        defining((3, 3), "replace", 288, key_row(512, (1, "string"))),
        defining((4, 4), "truncate", 512),
    ]
    plan = plan_spaces(tracker, pa.Table.from_pylist(rows))[512]
    assert (plan.void, plan.rekeyed) == ((4, 4), ())
    values = pa.array([pack((1, "a"))], pa.binary())
    assert sort_keys(plan.space, values) == sort_keys(plan.space_behind(0), values)
