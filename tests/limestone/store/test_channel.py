"""Log channels: the bytes of each call, sessions that spill, end or are aborted, and calls in a wrong state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode, put, remove
from flowstone.limestone.store.channel import AsyncLogChannel, Parts, both
from flowstone.limestone.store.epochs import Due
from flowstone.outside import production

V = WriteVersion(3, 4)
BEGIN, END = encode(Marker(EntryType.MARKER_BEGIN, 7)), encode(Marker(EntryType.MARKER_END, 7))


class Host:
    """A store with one epoch that records the calls of its channel."""

    def __init__(self) -> None:
        self.guard = nullcontext()
        self.told: list[str] = []
        self.blobs: list[tuple[object, ...]] = []
        self.sent: list[tuple[int, bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: BaseException | None = None

    def begin(self, channel: int) -> int:
        return 7

    def check(self) -> None:
        if self.failure is not None:
            raise WrongTime("the store has failed")

    @contextmanager
    def writing(self) -> Iterator[None]:
        self.check()
        yield

    def fail(self, error: BaseException) -> None:
        self.failure = error

    def uses_blobs(self, blob_ids: AbstractSet[int]) -> None:
        self.blobs.append(("used", *sorted(blob_ids)))

    def logs_blobs(self, blob_ids: AbstractSet[int]) -> None:
        self.blobs.append(("logged", *sorted(blob_ids)))

    async def takes_blobs_back(self, blob_ids: AbstractSet[int]) -> None:
        self.blobs.append(("taken back", *sorted(blob_ids)))

    def replicated(self, channel: int, epoch: int, parts: Parts) -> Coroutine[Any, Any, None]:
        async def replicate() -> None:
            self.sent.append((epoch, b"".join(parts())))
            assert [bytes(part) for part in parts()] == [bytes(part) for part in parts()]
            await self.gate.wait()

        return replicate()

    def finish(self, channel: int) -> Due:
        self.told.append("finished")
        return Due(record=7)

    def abort(self, channel: int) -> Due:
        self.told.append("aborted")
        return Due(inform=7)

    async def done(self, due: Due) -> None:
        assert (self.told[-1], due) in [("finished", Due(record=7)), ("aborted", Due(inform=7))]


@pytest.fixture
async def host() -> Host:
    return Host()


def made(host: Host, path: Path, spill: int = 1 << 20) -> AsyncLogChannel:
    return AsyncLogChannel(host, production(), str(path), 3, spill)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 the channel tells nobody
            await asyncio.sleep(0)


CALLS = [
    put(1, b"k", b"v", V),
    put(1, b"", b"", V),
    put(2, b"k", b"blobs", V, (4, 5)),
    remove(1, b"gone", V),
    Entry(EntryType.CLEAR_STORAGE, 8, V),
    Entry(EntryType.ADD_STORAGE, 9, V),
    Entry(EntryType.REMOVE_STORAGE, 10, V),
]


def call(channel: AsyncLogChannel, entry: Entry) -> None:
    match entry.type:
        case EntryType.REMOVE:
            channel.remove_entry(entry.storage_id, entry.key, entry.version)
        case EntryType.CLEAR_STORAGE:
            channel.truncate_storage(entry.storage_id, entry.version)
        case EntryType.ADD_STORAGE:
            channel.add_storage(entry.storage_id, entry.version)
        case EntryType.REMOVE_STORAGE:
            channel.remove_storage(entry.storage_id, entry.version)
        case _:
            channel.add_entry(entry.storage_id, entry.key, entry.value, entry.version, entry.blob_ids)


@pytest.mark.parametrize("spill", [1, 60, 1 << 20])
async def test_call_writes_its_entry_to_the_file_and_to_the_replicas(host: Host, tmp_path: Path, spill: int) -> None:
    channel = made(host, tmp_path, spill)
    entries = b"".join(map(encode, CALLS))
    for _ in range(2):
        await channel.begin_session()
        assert channel.epoch == 7
        for entry in CALLS:
            call(channel, entry)
        await channel.end_session()
    await channel.begin_session()
    channel.add_entries(CALLS)
    channel.add_entries(5, [b"a", b"b"], [b"x", b"yy"], (3, 9))
    await channel.end_session()
    many = encode(put(5, b"a", b"x", WriteVersion(3, 9))) + encode(put(5, b"b", b"yy", WriteVersion(3, 10)))
    assert channel.epoch is None
    assert host.told == ["finished"] * 3
    assert host.blobs == [("used", 4, 5), ("logged", 4, 5)] * 3
    assert host.sent == [(7, entries), (7, entries), (7, entries + many)]
    data = (tmp_path / "pwal_0003").read_bytes()
    assert data == (BEGIN + entries + END) * 2 + BEGIN + entries + many + END
    assert channel.finished_size == len(data)


@pytest.mark.parametrize("spill", [1, 60, 1 << 20])
async def test_aborted_session_leaves_no_trace(host: Host, tmp_path: Path, spill: int) -> None:
    channel = made(host, tmp_path, spill)
    await channel.begin_session()
    channel.add_entry(1, b"k", b"v", V)
    await channel.end_session()
    await channel.begin_session()
    for entry in CALLS:
        call(channel, entry)
    await channel.abort_session()
    assert host.blobs == [("used", 4, 5), ("taken back", 4, 5)]
    await channel.begin_session()
    channel.remove_entry(1, b"k", V)
    await channel.end_session()
    assert host.told == ["finished", "aborted", "finished"]
    first, last = encode(put(1, b"k", b"v", V)), encode(remove(1, b"k", V))
    assert (tmp_path / "pwal_0003").read_bytes() == BEGIN + first + END + BEGIN + last + END
    assert [data for _, data in host.sent] == [first, last]


async def test_session_ends_when_replicated_despite_a_cancelled_caller(host: Host, tmp_path: Path) -> None:
    channel = made(host, tmp_path)
    await channel.begin_session()
    host.gate.clear()
    ending = asyncio.ensure_future(channel.end_session())
    await until(lambda: bool(host.sent))
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    for wrong in (channel.begin_session(), channel.end_session(), channel.abort_session()):
        with pytest.raises(WrongTime):
            await wrong
    with pytest.raises(WrongTime, match="is ending"):
        channel.add_entry(1, b"k", b"v", V)
    assert host.told == []
    host.gate.set()
    await until(lambda: channel.epoch is None)
    await channel.begin_session()
    assert (host.told, host.failure) == (["finished"], None)


async def test_cancelled_session_end_leaves_no_worker_and_no_pending_replica() -> None:
    gate = asyncio.Event()
    done: list[str] = []

    async def here() -> None:
        await gate.wait()
        done.append("here")

    async def fails() -> None:
        raise OSError("no")

    async def there() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            done.append("not there")

    waiting = asyncio.ensure_future(both(here(), fails()))
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(OSError, match="no"):
        await waiting
    assert done == ["here"]

    async def fails_later() -> None:
        await asyncio.sleep(0)
        await fails()

    with pytest.raises(OSError, match="no"):
        await both(fails_later(), there())
    await until(lambda: done == ["here", "not there"])


async def test_calls_in_the_wrong_state_raise(host: Host, tmp_path: Path) -> None:
    channel = made(host, tmp_path)
    for wrong in (channel.end_session(), channel.abort_session()):
        with pytest.raises(WrongTime, match="log channel 3 has no open session"):
            await wrong
    for entry in CALLS:
        with pytest.raises(WrongTime, match="no open session"):
            call(channel, entry)
    with pytest.raises(WrongTime):
        channel.add_entries([])
    await channel.begin_session()
    with pytest.raises(WrongTime, match="has an open session"):
        await channel.begin_session()
    await channel.end_session()
    assert (tmp_path / "pwal_0003").read_bytes() == BEGIN + END


NO_ID = "storage id must be a 64-bit number, not"
NO_VERSION = r"version must be a pair of 64-bit numbers \(major, minor\), not"
NO_BYTES = "keys and values must be bytes"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((1 << 64, b"k", b"v", V), NO_ID),
        ((-1, b"k", b"v", V), f"{NO_ID} -1"),
        (("1", b"k", b"v", V), f"{NO_ID} '1'"),
        ((1, b"k", b"v", (1, 1 << 64)), NO_VERSION),
        ((1, b"k", b"v", (1, 2, 3)), NO_VERSION),
        ((1, b"k", b"v", 5), f"{NO_VERSION} 5"),
        ((1, "k", b"v", V), NO_BYTES),
        ((1, 7, b"v", V), NO_BYTES),
        ((1, b"k", None, V), NO_BYTES),
        ((1, b"k", memoryview(b"abcd").cast("I"), V), NO_BYTES),
    ],
)
async def test_oversized_entry_is_rejected_without_partial_writes(
    host: Host, tmp_path: Path, arguments: tuple[Any, ...], complaint: str
) -> None:
    channel = made(host, tmp_path)
    storage_id, key, value, version = arguments
    await channel.begin_session()
    with pytest.raises(LocalProtocolError, match=complaint):
        channel.add_entry(*arguments)
    with pytest.raises(LocalProtocolError, match=complaint):
        channel.add_entries(storage_id, [key], [value], version)
    if not isinstance(value, memoryview):
        with pytest.raises(LocalProtocolError, match=complaint):
            channel.add_entry(storage_id, key, value, version, [4])
        with pytest.raises(LocalProtocolError, match=complaint):
            channel.add_entries([Entry(EntryType.NORMAL, storage_id, version, key, value)])
    if value == b"v":
        with pytest.raises(LocalProtocolError, match=complaint):
            channel.remove_entry(storage_id, key, version)
        if key == b"k":
            with pytest.raises(LocalProtocolError, match=complaint):
                channel.add_storage(storage_id, version)
    await channel.end_session()
    assert (tmp_path / "pwal_0003").read_bytes() == BEGIN + END
    assert host.blobs == []


async def test_file_is_rotated_only_between_sessions(host: Host, tmp_path: Path) -> None:
    channel = made(host, tmp_path)
    assert channel.put_aside("pwal_0003.1.0") is None
    moved: list[str | None] = []
    await channel.begin_session()
    channel.when_closed(lambda: moved.append(channel.put_aside("pwal_0003.1.0")))
    assert moved == []
    await channel.end_session()
    assert moved == ["pwal_0003.1.0"]
    assert channel.finished_size == 0
    await channel.begin_session()
    await channel.abort_session()
    channel.when_closed(lambda: moved.append(channel.put_aside("pwal_0003.2.0")))
    assert moved[1:] == [None]
    assert production().disk.list_directory(str(tmp_path)) == ["pwal_0003", "pwal_0003.1.0"]
