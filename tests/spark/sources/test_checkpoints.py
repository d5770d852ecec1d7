"""The position from which a query resumes, according to its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowstone.replication.vclock import VClock
from flowstone.spark.sources.checkpoints import UnreadableCheckpoint, position_of
from flowstone.spark.sources.offsets import INITIAL, Offset, Position
from tests.spark.change_rows import UUID


def write(directory: Path, *, planned: dict[int, int], committed: list[int]) -> None:
    (directory / "offsets").mkdir(parents=True)
    (directory / "commits").mkdir()
    for number, lsn in planned.items():
        offset = json.dumps(Offset({UUID: Position(VClock({1: lsn}))}).to_json())
        (directory / "offsets" / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{offset}')
        (directory / "offsets" / f".{number}.crc").write_text("crc")
    for number in committed:
        (directory / "commits" / str(number)).write_text("v1\n{}")


def lsn_of(offset: Offset) -> int:
    position = offset.get(UUID)
    assert position is not None
    return position.vclock.get(1)


def test_unstarted_query_is_at_the_initial_position(tmp_path: Path) -> None:
    assert position_of(str(tmp_path / "nothing")) == INITIAL
    write(tmp_path, planned={0: 5}, committed=[])
    assert position_of(str(tmp_path)) == INITIAL


def test_position_is_after_a_committed_batch(tmp_path: Path) -> None:
    write(tmp_path, planned={8: 5, 9: 7, 10: 12}, committed=[8, 9, 10])
    assert lsn_of(position_of(str(tmp_path))) == 12
    assert lsn_of(position_of(tmp_path.as_uri())) == 12


def test_position_is_before_an_uncommitted_batch(tmp_path: Path) -> None:
    write(tmp_path, planned={8: 5, 9: 7, 10: 12}, committed=[8, 9])
    assert lsn_of(position_of(str(tmp_path))) == 7


def test_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    write(tmp_path, planned={0: 5}, committed=[0])
    (tmp_path / "offsets" / "0").write_text('v1\n{}\n{"topic":{"0":5}}')
    with pytest.raises(UnreadableCheckpoint, match="is not an offset of this source"):
        position_of(str(tmp_path))
    (tmp_path / "offsets" / "0").write_text("v1\n{}\n{}\n{}")
    with pytest.raises(UnreadableCheckpoint, match="expected version v1 and exactly one source"):
        position_of(str(tmp_path))
    with pytest.raises(
        UnreadableCheckpoint, match="s3a://bucket/x is not on a local file system; set schemaAt to the last offset"
    ):
        position_of("s3a://bucket/x")
