"""The epoch file: recorded files, replacement at every 100th write, torn and damaged ends, crashes."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import epoch_file, names
from flowstone.limestone.format.epoch_file import Epochs, EpochWriter, parse, record
from flowstone.outside import Disk, production
from tests.limestone import recorded
from tests.limestone.crashes import DIRECTORY, crashed, fresh, mounted
from tests.simulation.disk import Loss, SimulatedDisk
from tests.simulation.loop import Died, Life

DISK = production().disk


def test_durable_epoch_is_the_largest_record() -> None:
    assert parse(record(5) + record(9) + record(7)) == Epochs(9, 27)
    assert parse(b"") == Epochs(0, 0)


def test_writing_205_epochs_produces_the_files_of_the_real_program(tmp_path: Path) -> None:
    writer = EpochWriter.open(DISK, str(tmp_path))
    for epoch in range(1, 206):
        writer.write(epoch)
    written = (tmp_path / names.EPOCH).read_bytes()
    assert written == (recorded.HERE / "epochs" / "master-dir" / "epoch").read_bytes()
    assert written == (recorded.HERE / "epochs" / "replica-dir" / "epoch").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [names.EPOCH]


@given(st.lists(recorded.ids, min_size=1, max_size=4))
def test_every_truncation_yields_the_records_before_it(epochs: list[int]) -> None:
    data = b"".join(map(record, epochs))
    for size in range(len(data) + 1):
        found = parse(data[:size])
        assert (found.durable, found.sound_size) == (max(epochs[: size // 9], default=0), size // 9 * 9)
        assert (found.is_torn, found.is_damaged) == (size % 9 > 0, False)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_parsed_or_reported_as_torn_or_damaged(data: bytes) -> None:
    found = parse(data)
    assert found.sound_size <= len(data)
    assert (found.is_torn or found.is_damaged) == (found.sound_size < len(data))


def test_trailing_zeros_are_a_torn_write_and_other_bytes_are_damage() -> None:
    assert parse(record(5) + bytes(9)) == Epochs(5, 9, is_torn=True, salvaged=5)
    assert parse(record(5) + b"\x05" + bytes(8) + record(8)) == Epochs(5, 9, is_damaged=True, salvaged=8)


def test_damaged_file_is_rejected_with_the_readable_part(tmp_path: Path) -> None:
    (tmp_path / names.EPOCH).write_bytes(record(5) + b"\x55" * 9 + record(8))
    for use in (epoch_file.read, EpochWriter.open):
        with pytest.raises(DamagedFile, match="intact records is 5; including damaged records it is 8"):
            use(DISK, str(tmp_path))


def test_torn_file_is_read_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / names.EPOCH
    path.write_bytes(record(5) + record(6)[:4])
    (tmp_path / names.EPOCH_TEMPORARY).write_bytes(b"\x04")
    assert epoch_file.read(DISK, str(tmp_path)).durable == 5
    EpochWriter.open(DISK, str(tmp_path)).write(7)
    assert path.read_bytes() == record(5) + record(7)
    assert not (tmp_path / names.EPOCH_TEMPORARY).exists()


def test_rotated_epoch_files_are_read_when_the_current_one_is_empty(tmp_path: Path) -> None:
    assert epoch_file.read(DISK, str(tmp_path)) == Epochs(0, 0)
    (tmp_path / "epoch.01794772615522.7").write_bytes(record(7))
    (tmp_path / "epoch.01794772615523.9").write_bytes(record(8) + record(9))
    (tmp_path / names.EPOCH).touch()
    assert epoch_file.read(DISK, str(tmp_path)).durable == 9
    EpochWriter.open(DISK, str(tmp_path)).write(10)
    assert epoch_file.read(DISK, str(tmp_path)).durable == 10


@pytest.mark.parametrize("first", [1, 97, 0x1FE])
def test_written_epochs_survive_a_crash_at_any_moment(first: int) -> None:
    """Run crashes around a replacement of the file, too: the process has already written `first` records."""
    returned: list[int] = []

    def prepare(disk: Disk) -> None:
        returned.clear()
        EpochWriter.open(disk, DIRECTORY).write(first)

    def work(disk: Disk) -> None:
        writer = EpochWriter.open(disk, DIRECTORY)
        writer._writes = 97
        for epoch in range(first + 1, first + 5):
            writer.write(epoch)
            returned.append(epoch)

    for disk, _ in crashed(prepare, work):
        durable = epoch_file.read(disk, DIRECTORY).durable
        last = returned[-1] if returned else first
        assert last <= durable <= last + 1
        EpochWriter.open(disk, DIRECTORY).write(durable + 1)
        assert epoch_file.read(disk, DIRECTORY).durable == durable + 1


@pytest.mark.parametrize("writes", [0, 99])
def test_epoch_of_a_killed_process_survives_a_power_loss_once_read(writes: int) -> None:
    """The record was appended or renamed, but not synced; the process that opens the file relies on it."""
    for operations in range(1, 20):
        machine, disk = fresh()
        EpochWriter.open(disk, DIRECTORY).write(1)
        life = Life("killed")
        writer = EpochWriter(SimulatedDisk(machine, life), DIRECTORY)
        writer._writes = writes
        machine.die_after(operations, partial(setattr, life, "is_dead", True))
        with suppress(Died):
            writer.write(2)
        machine.crash(Loss.NOTHING)
        disk = mounted(machine)
        EpochWriter.open(disk, DIRECTORY)
        durable = epoch_file.read(disk, DIRECTORY).durable
        machine.crash(Loss.UNSYNCED)
        assert epoch_file.read(mounted(machine), DIRECTORY).durable == durable
