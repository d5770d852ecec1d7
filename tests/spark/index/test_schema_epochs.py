"""Definitions by position: epochs begin after the transactions that change them, and only after committed ones."""

from __future__ import annotations

import numpy as np
import pytest

from flowstone.archive.definitions_file import DefinitionsFile, rows_of, write_definitions
from flowstone.replication.vclock import VClock
from flowstone.spark.index.schema_epochs import SchemaEpochs, defining, newest
from flowstone.xlog.reader import LogFile
from tests.node.archived_rows import INSTANCE, slab
from tests.spark.archives import DIRECTORY, WrittenArchive
from tests.spark.change_rows import define, define_key, insert, truncate, whole


@pytest.fixture
def epochs() -> SchemaEpochs:
    """Return the epochs of a log with definitions in LSN 1 and 2, 4, 6, and a truncation in 8."""
    archive = WrittenArchive()
    archive.write(
        whole(define(1, 512, "orders", ("id", "unsigned")), define_key(2, 512)),
        whole(insert(3, 3), define(4, 512, "renamed", ("id", "unsigned"))),
        whole(insert(5, 5)),
        whole(define(6, 513, "late")),
        whole(insert(7, 7)),
        whole(truncate(8)),
    )
    path = f"{DIRECTORY}/{0:020d}.xlog"
    epochs = SchemaEpochs(archive.disk)
    epochs.begin(VClock(), f"{DIRECTORY}/{0:020d}.snap")
    with LogFile.open(archive.disk, path) as log:
        start, size = log.first_block, log.file.size()
    epochs.add(path, start, size, VClock())
    return epochs


def test_each_definition_begins_an_epoch(epochs: SchemaEpochs) -> None:
    epochs.settle(VClock({1: 8}), [])
    assert [(epoch.before.get(1), epoch.start.get(1)) for epoch in epochs.epochs] == [
        (0, 0),
        (0, 2),
        (2, 4),
        (5, 6),
        (7, 8),
    ]
    names = [[space.name for space in epochs.at(VClock({1: lsn})).schema if space.id >= 512] for lsn in range(9)]
    assert names == [[], [], ["orders"], ["orders"], *[["renamed"]] * 2, *[["renamed", "late"]] * 3]
    assert [epoch.start.get(1) for epoch in epochs.after(VClock({1: 4}))] == [6, 8]
    assert epochs.at(VClock({1: 8})) is epochs.at(VClock({1: 7}))  # a truncation defines nothing


def test_epochs_before_a_position_can_be_forgotten(epochs: SchemaEpochs) -> None:
    epochs.settle(VClock({1: 8}), [])
    epochs.forget(VClock({1: 5}))
    assert [epoch.start.get(1) for epoch in epochs.epochs] == [4, 6, 8]
    assert epochs.at(VClock({1: 5})).schema.get("renamed") is not None


def test_only_settled_definitions_count(epochs: SchemaEpochs) -> None:
    epochs.settle(VClock({1: 3}), [])
    assert epochs.epochs[-1].start == VClock({1: 2})
    epochs.settle(VClock({1: 5}), [(1, 3, 4)])
    assert epochs.at(VClock({1: 5})).schema.get("orders") is not None
    epochs.settle(VClock({1: 8}), [(1, 3, 4)])
    assert epochs.at(VClock({1: 8})).schema.get("renamed") is None


def test_epochs_can_begin_from_a_definitions_file(epochs: SchemaEpochs) -> None:
    epochs.settle(VClock({1: 8}), [])
    rows = rows_of(epochs.at(VClock({1: 8})))
    path = write_definitions(epochs.disk, DIRECTORY, DefinitionsFile({1: 8}, INSTANCE, "2.11.9", rows))
    other = SchemaEpochs(epochs.disk)
    other.begin(VClock({1: 8}), path)
    other.settle(VClock({1: 8}), [])
    assert other.at(VClock({1: 8})).schema == epochs.at(VClock({1: 8})).schema


def test_initial_definitions_have_the_system_spaces() -> None:
    epochs = SchemaEpochs(WrittenArchive().disk)
    assert epochs.at(VClock()).schema.get("_space") is not None
    epochs.begin(VClock({1: 5}), None)
    epochs.settle(VClock({1: 5}), [])
    assert epochs.at(VClock()).schema.get("_space") is not None


def test_rows_with_definitions_are_recognized() -> None:
    rows = slab(whole(insert(1, 1), define(2, 512, "x"), define_key(3, 512)), whole(insert(7, 1, origin=2)))
    assert defining(rows, np.arange(4)).tolist() == [1, 2]
    assert newest(rows, 4) == VClock({1: 3, 2: 7})
    assert newest(rows, 0) == VClock()
