"""Sequences have the value to which inserts advanced them, whatever values were set in between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from flowstone.box.ddl import functions as ddl
from flowstone.box.engine import statements
from flowstone.box.engine.key_encoding import encode_integer
from flowstone.box.engine.sequence import INT64_MAX
from flowstone.iproto.msgpack import pack, unpack
from flowstone.outside.disk import SystemDisk
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.sequence_state import Attachment, attachments, decode_number, sequence_rows
from flowstone.spark.fold.state_frames import BEFORE_ALL
from flowstone.spark.index.log_index import ArchiveIndex
from tests.spark.box_archive import BoxArchive
from tests.spark.fold.test_state_frames import Step, step


@pytest.mark.parametrize("number", [0, 1, -1, INT64_MAX, -(2**63)])
def test_number_round_trips_through_its_key(number: int) -> None:
    assert decode_number(encode_integer(number)) == number


def test_attachments_last_until_the_next_row_of_the_space() -> None:
    before = [(512, 1, True, 0, ""), (513, 2)]
    changes = [((5, 5), 512, None), ((6, 6), 514, (514, 1, False, 2, "a.b")), ((7, 8), 513, (513, 3, False, 1, ""))]
    assert attachments(before, changes) == [
        Attachment(512, 1, 0, None, BEFORE_ALL, (5, 5)),
        Attachment(513, 2, 0, None, BEFORE_ALL, (7, 8)),
        Attachment(514, 1, 2, "a.b", (6, 6)),
        Attachment(513, 3, 1, None, (7, 8)),
    ]


def insert(space: str, *values: object) -> Step:
    return lambda txn: statements.insert(txn, txn.space(space), pack(values))


def test_sequence_values_equal_those_of_the_engine(spark: SparkSession, tmp_path: Path) -> None:
    archive = BoxArchive(tmp_path / "archive")
    values: dict[int, list[tuple[int, int]]] = {}

    def commit(*steps: Step) -> None:
        archive.commit(*steps)
        found = {each.definition.id: each.value for each in archive.box.sequences.values()}
        values[archive.lsn] = sorted((number, value) for number, value in found.items() if value is not None)

    commit(step(ddl.create_space, "up"), step(ddl.create_index, "up", "pk", sequence=True))
    commit(step(ddl.create_sequence, "down", step=-2, start=-1, min=-1000, max=-1))
    commit(
        step(ddl.create_space, "below"), step(ddl.create_index, "below", "pk", parts=[2, "integer"], sequence="down")
    )
    commit(insert("up", None), insert("up", 30), insert("below", "x", None))
    archive.checkpoint()
    commit(insert("up", None), insert("up", 5), insert("below", "y", -9))
    commit(step(ddl.set_value, "up_seq", 3))
    commit(insert("up", 4))
    commit(step(ddl.next_value, "down"))
    commit(insert("below", "z", None), insert("below", "w", -3))
    commit(step(ddl.reset_sequence, "down"))
    commit(insert("up", 100), step(ddl.alter_index, "up", "pk", sequence=False))
    commit(insert("up", 200))
    archive.save()
    index = ArchiveIndex.open(SystemDisk(), archive.directory)
    moments = sorted(values)
    for lsn in [*random.Random(2).sample(moments[4:-1], 3), moments[-1]]:
        position, held = VClock({1: lsn}), archive.held[lsn]
        sequences, logged = ([unpack(raw) for raw in held.get(number, ())] for number in (284, 285))
        snapshot = index.snapshot_at(position)
        assert sequence_rows(spark, index, snapshot, position, sequences, logged) == values[lsn], lsn
