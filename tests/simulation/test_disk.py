"""The simulated disk: the data that a crash leaves, and the contract that it shares with the real one."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flowstone.outside import AlreadyLocked, Disk, production
from tests.simulation.disk import SECTOR, Loss, SimulatedDisk, Storage
from tests.simulation.loop import Died, Life
from tests.simulation.trace import Trace


def storage(seed: int = 0) -> Storage:
    return Storage("a", Trace(lambda: 0.0), random.Random(seed))


def mount(storage: Storage, life: Life | None = None) -> SimulatedDisk:
    return SimulatedDisk(storage, life or Life("a"))


@pytest.fixture(params=["simulated", "real"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, str]:
    """Return a disk and a directory in it, of either kind: both have one contract."""
    disk: Disk = mount(storage()) if request.param == "simulated" else production().disk
    directory = "/data" if request.param == "simulated" else str(tmp_path / "data")
    disk.make_directory(directory)
    return disk, directory


def test_disk_appends_reads_and_truncates(place: tuple[Disk, str]) -> None:
    disk, directory = place
    path = f"{directory}/file"
    with disk.create(path) as file:
        file.append(b"hello ", bytearray(b"world"))
        file.sync()
        assert file.path == path
        assert (file.size(), file.read_at(6, 100), file.read_at(50, 1)) == (11, b"world", b"")
        file.truncate(5)
        file.append(b"!")
    assert disk.size(path) == 6
    with disk.append_to(path) as file:
        file.append(b"?")
    with disk.open(path) as file:
        assert file.read_at(0, 100) == b"hello!?"
        with pytest.raises(OSError):
            file.append(b"x")


def test_disk_lists_renames_and_removes_names(place: tuple[Disk, str]) -> None:
    disk, directory = place
    disk.create(f"{directory}/b").close()
    disk.create(f"{directory}/a").close()
    disk.make_directory(f"{directory}/sub/sub")
    assert disk.list_directory(directory) == ["a", "b", "sub"]
    assert [disk.kind(f"{directory}/{name}") for name in ("a", "sub", "c")] == ["file", "directory", None]
    disk.rename(f"{directory}/a", f"{directory}/b")
    assert disk.list_directory(directory) == ["b", "sub"]
    disk.unlink(f"{directory}/b")
    disk.sync_directory(directory)
    assert disk.free_space(directory) > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda disk, missing: disk.open(missing),
        lambda disk, missing: disk.append_to(missing),
        lambda disk, missing: disk.unlink(missing),
        lambda disk, missing: disk.rename(missing, missing + "2"),
        lambda disk, missing: disk.link(missing, missing + "2"),
        lambda disk, missing: disk.create(f"{missing}/file"),
        lambda disk, missing: disk.list_directory(missing),
        lambda disk, missing: disk.sync_directory(missing),
        lambda disk, missing: disk.lock(missing),
        lambda disk, missing: disk.lock_file(missing),
        lambda disk, missing: disk.overwrite(missing, b"", 0),
        lambda disk, missing: disk.size(missing),
    ],
)
def test_disk_raises_for_missing_files(place: tuple[Disk, str], call: Callable[[Disk, str], object]) -> None:
    disk, directory = place
    with pytest.raises(FileNotFoundError) as caught:
        call(disk, f"{directory}/missing")
    assert caught.value.filename


def test_disk_locks_and_creates_a_file_only_once(place: tuple[Disk, str]) -> None:
    disk, directory = place
    disk.create(f"{directory}/file").close()
    with pytest.raises(FileExistsError):
        disk.create(f"{directory}/file")
    with disk.lock(directory), pytest.raises(AlreadyLocked):
        disk.lock(directory)
    disk.lock(directory).release()
    with disk.lock_file(f"{directory}/file"), pytest.raises(AlreadyLocked):
        disk.lock_file(f"{directory}/file")
    disk.lock_file(f"{directory}/file").release()


def test_disk_lock_belongs_to_the_file_and_not_to_its_name(place: tuple[Disk, str]) -> None:
    disk, directory = place
    old, new = f"{directory}/old", f"{directory}/new"
    disk.create(old).close()
    with disk.lock_file(old) as held:
        assert held.is_at(old)
        disk.rename(old, new)
        assert held.is_at(new)
        assert not held.is_at(old)
        with pytest.raises(AlreadyLocked):
            disk.lock_file(new)
        disk.create(old).close()
        assert not held.is_at(old)
        disk.lock_file(old).release()


def test_disk_links_a_file_to_a_second_name(place: tuple[Disk, str]) -> None:
    disk, directory = place
    old, new = f"{directory}/old", f"{directory}/new"
    disk.create(old).close()
    disk.link(old, new)
    with disk.append_to(old) as file:
        file.append(b"both")
    with pytest.raises(FileExistsError):
        disk.link(old, new)
    disk.unlink(old)
    with disk.open(new) as file:
        assert file.read_at(0, 100) == b"both"


def test_disk_overwrites_within_the_file_only(place: tuple[Disk, str]) -> None:
    disk, directory = place
    path = f"{directory}/file"
    with disk.create(path) as file:
        file.append(b"hello world")
        disk.overwrite(path, b"W", 6)
        file.append(b"!")
        assert file.read_at(0, 100) == b"hello World!"
        disk.overwrite(path, b"_", 5, 0)
        assert file.read_at(0, 100) == b"_ello_World!"
    for offset in (-1, 10, 12):
        with pytest.raises(ValueError, match="ends at 12"):
            disk.overwrite(path, b"123", 0, offset)
    with disk.open(path) as file:
        assert file.read_at(0, 100) == b"_ello_World!"


def test_unsynced_overwrite_may_survive_a_power_loss() -> None:
    machine = storage()
    disk = mount(machine)
    with disk.create("/file") as file:
        file.append(b"abc")
        disk.overwrite("/file", b"B", 1)
        file.append(b"lost")
    disk.sync_directory("/")
    machine.crash(Loss.UNSYNCED)
    with mount(machine).open("/file") as file:
        assert file.read_at(0, 100) == b"aBc"


@pytest.mark.parametrize(
    ("loss", "operation", "possible"),
    [
        (Loss.NOTHING, 2, {b"Xbc"}),
        (Loss.UNSYNCED, 3, {b"abc"}),
        (Loss.ANY, 3, {b"abc", b"Xbc", b"abX", b"XbX"}),
        (Loss.ANY, 2, {b"abc", b"Xbc"}),
    ],
)
def test_each_of_several_overwritten_bytes_survives_independently(
    loss: Loss, operation: int, possible: set[bytes]
) -> None:
    found = set()
    for seed in range(40):
        machine, life = storage(seed), Life("a")
        disk = mount(machine, life)
        with disk.create("/file") as file:
            file.append(b"abc")
            file.sync()
        disk.sync_directory("/")
        machine.die_after(operation, partial(setattr, life, "is_dead", True))
        with pytest.raises(Died):
            disk.overwrite("/file", b"X", 0, 2)
        machine.crash(loss)
        with mount(machine).open("/file") as file:
            found.add(file.read_at(0, 100))
    assert found == possible


def test_power_loss_drops_unsynced_data() -> None:
    machine = storage()
    disk = mount(machine)
    disk.make_directory("/d")
    kept, unsynced = disk.create("/d/kept"), disk.create("/d/unsynced")
    kept.append(b"synced")
    kept.sync()
    kept.append(b" lost")
    unsynced.append(b"lost")
    disk.sync_directory("/d")
    disk.create("/d/nameless").sync()
    disk.rename("/d/kept", "/d/renamed")
    machine.crash(Loss.UNSYNCED)
    after = mount(machine)
    assert after.list_directory("/d") == ["kept", "unsynced"]
    assert (after.open("/d/kept").read_at(0, 99), after.size("/d/unsynced")) == (b"synced", 0)


def test_process_death_keeps_unsynced_data() -> None:
    machine = storage()
    disk = mount(machine)
    disk.create("/file").append(b"written")
    disk.lock("/")
    machine.crash(Loss.NOTHING)
    after = mount(machine)
    assert after.open("/file").read_at(0, 99) == b"written"
    after.lock("/")


def test_any_prefix_of_unsynced_data_may_survive() -> None:
    found = set()
    for seed in range(200):
        machine = storage(seed)
        disk = mount(machine)
        with disk.create("/file") as file:
            disk.sync_directory("/")
            file.append(b"ab")
            file.sync()
            file.append(b"cd")
            file.append(b"e")
        machine.crash(Loss.ANY)
        found.add(bytes(machine.names["/file"].data))
    assert found == {b"ab", b"abc", b"ab\0", b"abcd", b"abc\0", b"ab\0\0", b"abcde", b"abcd\0"}


def test_sector_may_survive_while_an_earlier_one_is_zeroed() -> None:
    found = set()
    for seed in range(200):
        machine = storage(seed)
        with mount(machine).create("/file") as file:
            mount(machine).sync_directory("/")
            file.append(b"a" * 100)
            file.sync()
            file.append(b"b" * SECTOR)
            file.append(b"c" * SECTOR)
        machine.is_ordered = False
        machine.crash(Loss.ANY)
        after = bytes(machine.names["/file"].data)
        assert after[:100] == b"a" * 100
        found.add("".join(chr(after[at]) if at < len(after) else "-" for at in (100, SECTOR, 2 * SECTOR)))
    assert {"bbc", "\0bc", "b\0c", "bb\0", "\0\0c", "bb-", "---"} <= found


def test_files_and_names_survive_independently() -> None:
    found = set()
    for seed in range(400):
        machine = storage(seed)
        disk = mount(machine)
        disk.create("/a").append(b"a")
        disk.create("/b").append(b"b")
        machine.crash(Loss.ANY)
        found.add(tuple(bytes(machine.names[path].data) for path in sorted(machine.names)))
    assert {(), (b"",), (b"a",), (b"", b""), (b"a", b""), (b"", b"b"), (b"a", b"b")} <= found


def test_data_of_a_failed_sync_is_not_written_by_a_later_one() -> None:
    machine = storage()
    disk = mount(machine)
    file = disk.create("/file")
    disk.sync_directory("/")
    file.append(b"lost")
    machine.broken.add("sync")
    with pytest.raises(OSError):
        file.sync()
    machine.broken.clear()
    file.append(b"kept")
    file.sync()
    assert file.read_at(0, 99) == b"lostkept"
    machine.crash(Loss.UNSYNCED)
    assert bytes(machine.names["/file"].data) == b"\0\0\0\0kept"
    assert machine.failure_count == 1


def test_bit_rot_is_visible_to_all_readers_and_survives_a_power_loss() -> None:
    machine = storage()
    disk = mount(machine)
    file = disk.create("/file")
    disk.sync_directory("/")
    file.append(b"abc")
    machine.names["/file"].rot(1, 0)
    assert file.read_at(0, 99) == b"acc"
    machine.crash(Loss.UNSYNCED)
    assert bytes(machine.names["/file"].data) == b"acc"


def test_renames_survive_in_order() -> None:
    for seed in range(50):
        machine = storage(seed)
        disk = mount(machine)
        for name in "abc":
            disk.create(f"/{name}")
        machine.crash(Loss.ANY)
        assert "".join(name[1:] for name in sorted(machine.names)) in ("", "a", "ab", "abc")


def test_disk_of_a_dead_process_is_unusable() -> None:
    machine, life = storage(), Life("a")
    disk = mount(machine, life)
    file = disk.create("/file")
    life.is_dead = True
    for call in (
        lambda: file.append(b"x"),
        file.size,
        lambda: disk.list_directory("/"),
        lambda: disk.kind("/"),
    ):
        with pytest.raises(Died):
            call()


def test_process_may_die_in_the_middle_of_an_operation() -> None:
    sizes = set()
    for seed in range(50):
        machine, life = storage(seed), Life("a")

        def die(machine: Storage = machine, life: Life = life) -> None:
            life.is_dead = True
            machine.crash(Loss.NOTHING)

        file = mount(machine, life).create("/file")
        machine.die_after(2, die)
        file.append(b"first")
        with pytest.raises(Died):
            file.append(b"xy")
        sizes.add(len(machine.names["/file"].data))
    assert sizes == {5, 6, 7}


def test_full_disk_writes_as_much_as_fits() -> None:
    machine = storage()
    machine.room = 3
    disk = mount(machine)
    file = disk.create("/file")
    with pytest.raises(OSError, match="No space left"):
        file.append(b"hello")
    assert (file.size(), disk.free_space("/")) == (3, 0)
    file.truncate(0)
    assert disk.free_space("/") == 3


def test_broken_call_fails() -> None:
    machine = storage()
    file = mount(machine).create("/file")
    machine.broken.add("sync")
    with pytest.raises(OSError, match=r"Input/output error.*/file"):
        file.sync()
