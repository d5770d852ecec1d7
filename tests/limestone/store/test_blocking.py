"""The datastore with threads: one per channel, epochs from another, and everything durable at the end."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowstone import limestone
from flowstone.errors import LocalProtocolError
from flowstone.limestone import (
    BlobError,
    Datastore,
    DatastoreFailed,
    LimestoneError,
    LogChannel,
    Settings,
    WriteVersion,
    WrongTime,
)
from flowstone.limestone.format import names
from flowstone.outside import File, production
from flowstone.outside.disk import SystemDisk
from tests.places import ROOT

DEADLINE_SECONDS = 60


def test_program_without_an_event_loop_writes_and_waits_for_an_epoch(tmp_path: Path) -> None:
    durable = threading.Event()
    with Datastore(str(tmp_path)) as store:
        channel = store.create_channel()
        store.add_persistent_callback(lambda epoch: durable.set())
        store.ready()
        store.switch_epoch(store.last_epoch + 1)
        channel.begin_session()
        channel.add_entry(1, b"k", b"v", (1, 1))
        channel.end_session()
        store.switch_epoch(2)
        assert durable.wait(DEADLINE_SECONDS)
        assert (store.durable_epoch, store.status().informed_epoch) == (1, 1)
    store.shutdown()
    for call in (channel.begin_session, store.snapshot, store.ready, store.compact, store.create_channel):
        with pytest.raises(WrongTime, match=f"datastore {tmp_path} is shut down"):
            call()


def test_package_exports_every_name() -> None:
    assert all(getattr(limestone, name).__name__ == name for name in limestone.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = limestone.nothing
    assert {*limestone.__all__} <= {*dir(limestone)}


def test_settings_are_one_object_or_a_path_with_fields(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Datastore(Settings(str(tmp_path)), spill=3)
    with Datastore.from_environment(str(tmp_path), {}, spill=7) as store:
        store.ready()
        assert store.last_epoch == 0


def test_error_names_a_path_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = f"cannot open the data directory {tmp_path}/file/below: Not a directory"
    with Datastore(str(tmp_path / "file" / "below")) as store, pytest.raises(LimestoneError, match=message):
        store.create_channel()
    with pytest.raises(LocalProtocolError, match="path of a datastore cannot be of type PosixPath; pass a string"):
        Datastore(tmp_path)  # type: ignore[arg-type]


def test_each_thread_writes_to_its_channel_while_another_switches_epochs(tmp_path: Path) -> None:
    told: list[int] = []
    sessions, channels = 30, 4
    errors: list[BaseException] = []

    def write(channel: LogChannel) -> None:
        try:
            for number in range(sessions):
                channel.begin_session()
                for minor in range(20):
                    channel.add_entry(channel.id, b"%d/%d" % (number, minor), b"v" * 50, (number, minor))
                if number % 7 == 3:
                    channel.abort_session()
                else:
                    channel.end_session()
        except BaseException as error:
            errors.append(error)

    with Datastore(str(tmp_path), spill=400) as store:
        store.add_persistent_callback(told.append)
        made = [store.create_channel() for _ in range(channels)]
        store.ready()
        store.switch_epoch(1)
        threads = [threading.Thread(target=write, args=(channel,)) for channel in made]
        for thread in threads:
            thread.start()
        epoch = 1
        while any(thread.is_alive() for thread in threads):
            epoch += 1
            store.switch_epoch(epoch)
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        done = threading.Event()
        store.add_persistent_callback(lambda told: done.set() if told == epoch else None)
        store.switch_epoch(epoch + 1)
        assert done.wait(DEADLINE_SECONDS)
        assert store.status().informed_epoch == told[-1] == epoch
    assert errors == []
    assert told == sorted(set(told))
    with Datastore(str(tmp_path)) as again:
        again.ready()
        with pytest.raises(WrongTime):
            again.create_channel()


def test_every_operation_is_available_without_an_event_loop(tmp_path: Path) -> None:
    with Datastore(str(tmp_path / "a")) as store:
        channel = store.create_channel()
        store.ready()
        store.switch_epoch(1)
        pool = store.blob_pool()
        first = pool.register_data(b"content")
        second = pool.duplicate_data(first)
        (tmp_path / "file").write_bytes(b"from a file")
        third = pool.register_file(str(tmp_path / "file"), is_temporary=True)
        channel.begin_session()
        channel.add_entry(1, b"k", b"v", (1, 1), [first])
        channel.end_session()
        pool.release()
        assert Path(store.blob_path(first)).read_bytes() == b"content"
        tags = [store.generate_reference_tag(*each) for each in ((first, 1), (first, 2), (second, 1), (first, 1))]
        assert (len({*tags}), tags[0]) == (3, tags[3])
        for blob_id in (second, third):
            with pytest.raises(BlobError):
                store.blob_path(blob_id)
        store.switch_available_boundary_version(WriteVersion(1, 0))
        with later_epochs(store):
            assert store.compact().rows == 1
        with later_epochs(store), store.begin_backup() as backup:
            (tmp_path / "backup").mkdir()
            for entry in backup.entries:
                shutil.copy(entry.source, tmp_path / "backup" / entry.destination)
            with pytest.raises(WrongTime, match="backup of"):
                store.compact()
        assert [row.key for row in store.snapshot().cursor()] == [b"k"]
    with Datastore(str(tmp_path / "b")) as other:
        other.create_channel()
        other.restore(str(tmp_path / "backup"))
        other.ready()
        assert [(row.key, row.blob_ids) for row in other.snapshot().cursor()] == [(b"k", (first,))]
        assert Path(other.blob_path(first)).read_bytes() == b"content"
        with pytest.raises(WrongTime, match="is already ready"):
            other.restore(str(tmp_path / "backup"))


@contextmanager
def later_epochs(store: Datastore) -> Iterator[None]:
    """Switch epochs in another thread, for callers that wait for an epoch."""
    done = threading.Event()

    def switch() -> None:
        while not done.wait(0.005):
            store.switch_epoch(store.status().current_epoch + 1)

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(DEADLINE_SECONDS)


def test_disk_failure_in_the_callers_thread_stops_the_store(tmp_path: Path) -> None:
    is_broken = threading.Event()

    class Failing(SystemDisk):
        def append_to(self, path: str) -> File:
            if is_broken.is_set():
                raise OSError(5, "Input/output error", path)
            return super().append_to(path)

    with Datastore(str(tmp_path)) as store:
        store.create_channel()
        store.ready()
    (tmp_path / "pwal_0000").touch()
    with Datastore(str(tmp_path), outside=replace(production(), disk=Failing())) as store:
        channel = store.create_channel()
        store.ready()
        store.switch_epoch(1)

        def wait() -> None:
            with pytest.raises(DatastoreFailed):
                store.until_durable(1)

        waiting = threading.Thread(target=wait)
        waiting.start()
        is_broken.set()
        with pytest.raises(OSError, match="Input/output"):
            channel.begin_session()
        waiting.join(DEADLINE_SECONDS)
        assert not waiting.is_alive()
        with pytest.raises(DatastoreFailed):
            store.switch_epoch(2)


def assert_whole(store: Datastore, epoch: int) -> None:
    """Check that a snapshot has, for each channel, every row up to the last one that it contains."""
    rows = list(store.snapshot().cursor())
    assert store.durable_epoch >= epoch
    for storage_id in (0, 1):
        assert sorted(int(row.key) for row in rows if row.storage_id == storage_id) == list(
            range(sum(row.storage_id == storage_id for row in rows))
        )


def test_files_are_rotated_while_threads_write(tmp_path: Path) -> None:
    stop = threading.Event()
    written = [0, 0]

    def write(channel: LogChannel) -> None:
        while not stop.is_set():
            channel.begin_session()
            channel.add_entry(channel.id, b"%d" % written[channel.id], b"v", (1, written[channel.id]))
            channel.end_session()
            written[channel.id] += 1

    with Datastore(str(tmp_path)) as store:
        channels = [store.create_channel() for _ in range(2)]
        store.ready()
        store.switch_epoch(1)
        writers = [threading.Thread(target=write, args=(channel,)) for channel in channels]
        for writer in writers:
            writer.start()
        with later_epochs(store):
            for _ in range(5):
                before = store.durable_epoch
                compacting = threading.Thread(target=store.compact)
                compacting.start()
                while compacting.is_alive():
                    assert_whole(store, before)
                compacting.join(DEADLINE_SECONDS)
        stop.set()
        for writer in writers:
            writer.join(DEADLINE_SECONDS)
        last = store.status().current_epoch
        store.switch_epoch(last + 1)
        store.until_durable(last)
        assert len(store.snapshot()) == sum(written) > 0
    with Datastore(str(tmp_path)) as again:
        again.ready()
        assert len(again.snapshot()) == sum(written)


def test_every_public_call_is_in_the_manual() -> None:
    manual = (ROOT / "docs" / "reference" / "limestone.md").read_text()
    for kind in (Datastore, LogChannel, limestone.BlockingBlobPool):
        calls = [name for name in vars(kind) if not name.startswith("_")]
        assert [name for name in calls if f"{name}" not in manual] == []


class HookedDisk(SystemDisk):
    """A disk that runs a hook before it handles a call on a log file."""

    def __init__(self, operation: str, before: Callable[[], None]) -> None:
        self._operation = operation
        self._before = before

    def append_to(self, path: str) -> File:
        return self._hooked(super().append_to(path))

    def create(self, path: str) -> File:
        return self._hooked(super().create(path))

    def _hooked(self, file: File) -> File:
        if names.is_pwal(Path(file.path).name):
            operate = getattr(file, self._operation)

            def hooked(*arguments: Any) -> Any:
                self._before()
                return operate(*arguments)

            setattr(file, self._operation, hooked)
        return file


def test_file_being_opened_is_never_reported_without_sessions(tmp_path: Path) -> None:
    """A replica that is seeded at that time would lack these sessions."""
    with Datastore(str(tmp_path)) as store:
        channel = store.create_channel()
        store.ready()
        store.switch_epoch(1)
        channel.begin_session()
        channel.end_session()
    said: list[dict[str, int]] = []
    disk = HookedDisk("size", lambda: said.append(store._store.finished_sizes()))
    with Datastore(str(tmp_path), outside=replace(production(), disk=disk)) as store:
        channel = store.create_channel()
        store.ready()
        store.switch_epoch(store.last_epoch + 1)
        said.clear()
        channel.begin_session()
        assert said == [{}]
        assert store._store.finished_sizes() == {"pwal_0000": 19}


@pytest.mark.parametrize("spill", [1 << 20, 1])
def test_shutdown_waits_for_writing_threads_and_discards_their_sessions(tmp_path: Path, spill: int) -> None:
    """Otherwise the threads would append to the files of the next process that opens the directory."""
    begun, may_write = threading.Event(), threading.Event()
    refused: list[BaseException] = []
    order: list[str] = []

    def before() -> None:
        begun.set()
        may_write.wait(DEADLINE_SECONDS)
        order.append("written")

    def write() -> None:
        try:
            channel.add_entry(1, b"stale", b"", (1, 0))
            channel.end_session()
        except BaseException as error:
            refused.append(error)

    def shut_down() -> None:
        store.shutdown()
        order.append("shut down")

    store = Datastore(str(tmp_path), outside=replace(production(), disk=HookedDisk("append", before)), spill=spill)
    channel = store.create_channel()
    store.ready()
    store.switch_epoch(1)
    channel.begin_session()
    threads = [threading.Thread(target=write), threading.Thread(target=shut_down)]
    threads[0].start()
    assert begun.wait(DEADLINE_SECONDS)
    threads[1].start()
    threads[1].join(0.2)
    may_write.set()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert order == ["written", "shut down"]
    assert [type(error) for error in refused] == [WrongTime]
    with Datastore(str(tmp_path)) as store:
        store.ready()
        assert len(store.snapshot()) == 0


def test_calls_are_rejected_while_another_thread_shuts_down(tmp_path: Path) -> None:
    waiting, closing, may_end = (threading.Event() for _ in range(3))
    outcomes: list[BaseException | str] = []

    async def end_slowly() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            closing.set()
            may_end.wait(DEADLINE_SECONDS)

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
            outcomes.append("returned")
        except BaseException as error:
            outcomes.append(error)

    def begin(*calls: Callable[[], object]) -> list[threading.Thread]:
        threads = [threading.Thread(target=attempt, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        return threads

    store = Datastore(str(tmp_path))
    channel = store.create_channel()
    store.ready()
    store.switch_epoch(1)
    channel.begin_session()
    pool = store.blob_pool()
    store._thread.start(end_slowly())
    assert waiting.wait(DEADLINE_SECONDS)
    shutting_down = begin(store.shutdown)
    assert closing.wait(DEADLINE_SECONDS)
    calls = begin(channel.abort_session, lambda: pool.register_data(b""), store.begin_backup, store.compact)
    for thread in calls:
        thread.join(DEADLINE_SECONDS)
    assert [(type(error), str(error)) for error in outcomes] == 4 * [(WrongTime, f"datastore {tmp_path} is shut down")]
    shutting_down += begin(store.shutdown, store.shutdown)
    shutting_down[-1].join(0.2)
    assert len(outcomes) == 4
    may_end.set()
    for thread in shutting_down:
        thread.join(DEADLINE_SECONDS)
    assert outcomes[4:] == ["returned"] * 3


class MeetingDisk(SystemDisk):
    """A disk on which the sync of a log file waits for a concurrent sync of another one."""

    def __init__(self, parties: int) -> None:
        self.meeting = threading.Barrier(parties)

    def append_to(self, path: str) -> File:
        return self._meeting(super().append_to(path))

    def create(self, path: str) -> File:
        return self._meeting(super().create(path))

    def _meeting(self, file: File) -> File:
        if names.is_pwal(Path(file.path).name):
            sync = file.sync

            def meet() -> None:
                self.meeting.wait(DEADLINE_SECONDS)
                sync()

            file.sync = meet  # type: ignore[method-assign]
        return file


def test_channels_sync_in_parallel(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def write(channel: LogChannel) -> None:
        try:
            channel.begin_session()
            channel.end_session()
        except BaseException as error:
            failed.append(error)

    with Datastore(str(tmp_path), outside=replace(production(), disk=MeetingDisk(3))) as store:
        channels = [store.create_channel() for _ in range(3)]
        store.ready()
        store.switch_epoch(1)
        writers = [threading.Thread(target=write, args=(channel,)) for channel in channels]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(DEADLINE_SECONDS)
    assert failed == []


async def test_channels_of_one_loop_sync_in_parallel(tmp_path: Path) -> None:
    outside = replace(production(), disk=MeetingDisk(2))
    async with limestone.AsyncDatastore(outside, Settings(str(tmp_path))) as store:
        channels = [await store.create_channel() for _ in range(2)]
        await store.ready()
        await store.switch_epoch(1)
        for channel in channels:
            await channel.begin_session()
        await asyncio.gather(*(channel.end_session() for channel in channels))
