"""A turn executed in bulk equals one executed request by request: in memory, in the log and in every reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.access import GUEST, Privilege, User
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import ADMIN
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response, decode_response, encode_request, frame, split
from flowstone.iproto.requests import decode_request
from flowstone.node.configuration import configure
from flowstone.node.instance import Instance
from flowstone.node.server import executor
from flowstone.node.server.executor import Executor
from flowstone.node.server.procedures_box import built_in
from flowstone.node.server.request_batch import Reply
from flowstone.node.server.session import Session
from flowstone.node.server.watchers import Watchers, sources_of
from flowstone.node.synchro.elections import Elections
from flowstone.node.wal.commits import Commits
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.replication.vclock import VClock
from tests.box.spaces import box_with, definition, on
from tests.node.fault_disk import FaultDisk
from tests.node.instances import REPLICASET_UUID, UUID

NUMBERS, TEXTS, TWICE, TEMPORARY, LOCAL, HASHED = range(512, 518)
SPACES = (
    definition(NUMBERS, on("0:unsigned"), fields="id:unsigned note:any"),
    definition(TEXTS, on("0:string")),
    definition(TWICE, on("0:unsigned"), on("1:unsigned")),
    definition(TEMPORARY, on("0:unsigned"), flags={"temporary": True}),
    definition(LOCAL, on("0:unsigned"), flags={"group_id": 1}),
    definition(HASHED, on("0:unsigned", type="hash")),
)
READER = 50
"""May read and write NUMBERS, read TEXTS, and has no rights on the others."""

WAL_IO = 40
SELECT, INSERT, REPLACE, UPDATE, DELETE = range(1, 6)
WRITES = (INSERT, REPLACE, UPDATE, DELETE)


class StoppedClock:
    """A constant clock, so that equal requests give equal rows."""

    def wall(self) -> float:
        return 1.7e9

    def monotonic(self) -> float:
        return 5.0


class Connection:
    """A session without a socket."""

    def __init__(self, instance: Instance, user: int) -> None:
        self.unread = bytearray()
        self.packet_size_max = 1 << 20
        self.sent: list[bytes] = []
        self.sends = 0
        self.replied = 0
        self.is_waiting = False
        self.refused: list[str] = []
        self.handled = 0
        self.postponed_count = 0
        self._session = Session(
            instance, Watchers(sources_of(instance)), built_in(), self.sent.append, id=1, salt=bytes(32)
        )
        self._session.user = user

    @property
    def user(self) -> int:
        return self._session.user

    def handle(self, packet: bytes) -> Reply | Coroutine[Any, Any, Reply]:
        self.handled += 1
        return self._session.handle(decode_request(packet, is_2_6=True))

    def start(self, reply: Coroutine[Any, Any, Reply]) -> None:
        raise AssertionError("none of the requests here is slow")

    def replying(self, size: int) -> None:
        self.replied += size

    def send(self, packets: Sequence[bytes]) -> None:
        self.sends += 1
        self.sent += packets

    def postponed(self, count: int) -> None:
        self.postponed_count += count

    def send_late(self, packets: Sequence[bytes], count: int) -> None:
        self.postponed_count -= count
        self.send(packets)

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)
        self.unread.clear()

    def responses(self) -> list[Response]:
        packets, _ = split(b"".join(self.sent))
        return [decode_response(packet) for packet in packets]

    def codes(self) -> list[int]:
        """Return the error codes; 0 for success."""
        return [response.type & 0x7FFF for response in self.responses()]

    def tuples(self) -> list[Any]:
        return [None if response.is_error else response.values()[Key.DATA] for response in self.responses()]


class Served:
    """The parts of a node between the bytes of connections and a log on a disk that can fail."""

    def __init__(self, users: Sequence[int] = (ADMIN,), mode: WalMode = WalMode.WRITE) -> None:
        self.box = box_with(*SPACES)
        access = self.box.access
        for user, name in ((GUEST, "guest"), (READER, "reader")):
            access.put_user(User(user, ADMIN, name))
            access.put_grant(user, "universe", 0, Privilege.SESSION | Privilege.USAGE)
        access.put_grant(READER, "space", NUMBERS, Privilege.READ | Privilege.WRITE)
        access.put_grant(READER, "space", TEXTS, Privilege.READ)
        self.disk = FaultDisk()
        outside = self.disk.outside()
        self.journal = Journal(outside, "data", instance_uuid=str(UUID), vclock=VClock({1: 5}), replica_id=1, mode=mode)
        self.rows: list[bytes] = []
        self.journal.on_written.append(lambda rows, _: self.rows.append(rows))
        clock = cast("Any", StoppedClock())
        self.commits = Commits(self.box, self.journal, clock)
        elections = Elections(outside, self.journal, self.commits.queue)
        who = UUID, REPLICASET_UUID, configure({}), elections
        instance = Instance(outside, self.box, self.journal, self.commits, *who, status="running")
        self.counters = instance.counters
        self.executor = Executor(self.box, self.journal, self.commits, clock, self.counters, wide=False)
        self.peers = [Connection(instance, user) for user in users]

    async def run(self, batches: Sequence[bytes]) -> None:
        """Run turns with these bytes from the connections, mostly one turn."""
        for peer, data in zip(self.peers, batches, strict=True):
            peer.unread += data
        before = -1
        while (left := sum(len(peer.unread) for peer in self.peers)) != before:
            before = left
            self.executor.execute(self.peers)
        await self.journal.drain()

    def fill(self, count: int) -> None:
        for key in range(count):
            for space in SPACES:
                row = (str(key),) if space.id == TEXTS else (key, key)
                statements.replace(self.box.begin(), self.box.space(space.id), pack(row))

    def contents(self) -> list[Any]:
        return [list(index.scan()) for space in SPACES for index in self.box.space(space.id).indexes.values()]


def plainly() -> Any:
    """Send every request to its session."""
    return patch.object(executor, "SCAN_SIZE_MIN", 1 << 40)


def in_bulk(count_min: int = 2) -> Any:
    """Lower the minimum for bulk execution."""
    return patch.multiple(executor, SCAN_SIZE_MIN=0, BATCH_COUNT_MIN=count_min)


def statement(type: int, space_id: int, values: tuple[Any, ...], sync: int = 1, **more: Any) -> bytes:
    body: dict[int, Any] = {Key.SPACE_ID.value: space_id}
    if type == SELECT:
        body |= {Key.INDEX_ID.value: 0, Key.LIMIT.value: 5, Key.OFFSET.value: 0, Key.ITERATOR.value: 0}
    body[Key.KEY.value if type in (SELECT, UPDATE, DELETE) else Key.TUPLE.value] = values
    body |= {Key[name].value: value for name, value in more.items()}
    return encode_request(type, sync, pack(body))


def numbered(kind: int, keys: Sequence[int], space_id: int = NUMBERS, first: int = 0) -> bytes:
    """Return statements on these keys, with syncs from `first` on."""
    rows = [(key,) if kind in (SELECT, DELETE) else (key, "x") for key in keys]
    return b"".join(statement(kind, space_id, row, first + number) for number, row in enumerate(rows))


KEYS = st.integers(0, 9)
SYNCS = st.sampled_from((0, 1, 127, 2**32, 2**63, 2**64 - 1))


@st.composite
def stretches(draw: st.DrawFn) -> bytes:
    """Draw statements of one kind on one space; rarely including one that is not plain."""
    space_id = draw(st.sampled_from((NUMBERS, NUMBERS, TEXTS, TWICE, TEMPORARY, LOCAL, HASHED, 999)))
    kind = draw(st.sampled_from((SELECT, INSERT, REPLACE, REPLACE, DELETE)))
    packets = []
    for key in draw(st.lists(KEYS, min_size=1, max_size=6)):
        first: Any = str(key) if space_id == TEXTS else key
        row = (first,) if kind in (SELECT, DELETE) else (first, draw(KEYS))
        packets.append(statement(kind, space_id, row, draw(SYNCS)))
    if draw(st.integers(0, 4)) == 0:
        packets.insert(draw(st.integers(0, len(packets))), draw(st.sampled_from(ODD)))
    return b"".join(packets)


ODD = (
    encode_request(RequestType.PING, 7),
    statement(SELECT, NUMBERS, (1, 2)),
    statement(SELECT, NUMBERS, ("x",)),
    statement(SELECT, NUMBERS, (), ITERATOR=2),
    statement(REPLACE, NUMBERS, ("x",)),
    statement(REPLACE, NUMBERS, ()),
    statement(INSERT, NUMBERS, (2**63, 1)),
    statement(DELETE, NUMBERS, ()),
    statement(UPDATE, NUMBERS, (1,), TUPLE=(("=", 1, "new"),)),
    frame(b"\x82\x00\x03\x01\x09\x81\x10\xcd\x02\x00"),
    frame(b"\x82\x00\x03\x01\x09\x82\x10\xcd\x02\x00\x21\x05"),
    frame(b"\x82\x00\x03\x01\x09\xc1"),
)
BATCHES = st.lists(st.lists(stretches(), max_size=5).map(b"".join), min_size=3, max_size=3)
USERS = (ADMIN, READER, GUEST)


@given(BATCHES, st.integers(0, 6))
def test_bulk_execution_gives_the_same_replies_state_and_rows(batches: list[bytes], filled: int) -> None:
    async def served() -> Served:
        made = Served(USERS)
        made.fill(filled)
        await made.run(batches)
        return made

    with in_bulk():
        bulk = asyncio.run(served())
    with plainly():
        plain = asyncio.run(served())
    for one, other in zip(bulk.peers, plain.peers, strict=True):
        assert b"".join(one.sent) == b"".join(other.sent)
        assert one.unread == other.unread == b""
    assert bulk.contents() == plain.contents()
    assert b"".join(bulk.rows) == b"".join(plain.rows)
    assert bulk.journal.vclock == plain.journal.vclock == bulk.journal.written_vclock
    assert list(bulk.box.in_flight) == list(plain.box.in_flight) == []


@pytest.mark.parametrize("way", [in_bulk, plainly], ids=["bulk", "plain"])
@given(batches=BATCHES, filled=st.integers(0, 6))
def test_failed_write_is_error_40_for_every_write_and_is_rolled_back(
    way: Callable[[], Any], batches: list[bytes], filled: int
) -> None:
    async def served(*, fails: bool) -> Served:
        made = Served(USERS)
        made.fill(filled)
        if fails:
            made.disk.broken.add("append")
        await made.run(batches)
        return made

    with way():
        fine, failed = asyncio.run(served(fails=False)), asyncio.run(served(fails=True))
    for one, other, sent in zip(fine.peers, failed.peers, batches, strict=True):
        requests = [decode_request(packet) for packet in split(sent)[0]]
        for request, before, after in zip(requests, one.responses(), other.responses(), strict=True):
            assert before.sync == after.sync == request.sync
            is_logged = request.type in WRITES and not before.is_error and request.uint(Key.SPACE_ID) != TEMPORARY
            if is_logged:
                assert after.type & 0x7FFF == WAL_IO
            elif after.type & 0x7FFF != WAL_IO:  # a read among the writes may have seen rolled-back rows
                assert (after.type, after.body) == (before.type, before.body)
            else:
                assert way is in_bulk
    assert failed.rows == []
    assert list(failed.box.in_flight) == []
    untouched = Served()
    untouched.fill(filled)
    temporary = [space.id for space in SPACES].index(TEMPORARY) + 1
    for number, (found, wanted) in enumerate(zip(failed.contents(), untouched.contents(), strict=True)):
        assert number == temporary or found == wanted


async def test_batch_beyond_one_log_block_is_executed_one_by_one() -> None:
    served = Served()
    with patch.object(executor, "BATCH_SIZE_MAX", 1000):
        await served.run([numbered(REPLACE, range(100))])
    assert served.peers[0].codes() == [0] * 100
    assert served.peers[0].handled == 100


async def test_turn_is_one_write_and_one_send_per_connection() -> None:
    served = Served([ADMIN] * 3)
    await served.run([numbered(REPLACE, [1])] * 3)
    appends = served.disk.appends
    mixed = numbered(REPLACE, range(50)) + numbered(SELECT, range(50)) + numbered(DELETE, range(9)) + ODD[0] + ODD[8]
    await served.run([mixed, mixed, numbered(INSERT, [777])])
    assert served.disk.appends == appends + 1
    assert [peer.sends for peer in served.peers] == [2, 2, 2]


async def test_requests_of_a_connection_see_its_earlier_writes() -> None:
    served = Served()
    for number in range(3):
        served.peers[0].sent.clear()
        row = (7, number)
        batch = statement(REPLACE, NUMBERS, row) * 20 + statement(SELECT, NUMBERS, (7,)) * 20
        await served.run([batch + statement(DELETE, NUMBERS, (7,)) * 15 + statement(SELECT, NUMBERS, (7,)) * 20])
        assert served.peers[0].tuples() == [(row,)] * 41 + [()] * 34


async def test_privileges_are_checked_per_connection() -> None:
    served = Served(USERS)
    await served.run([numbered(REPLACE, range(30))] * 3)
    assert [set(peer.codes()) for peer in served.peers] == [{0}, {0}, {42}]
    await served.run([numbered(SELECT, range(30))] * 3)
    assert [set(peer.codes()[30:]) for peer in served.peers] == [{0}, {0}, {42}]
    texts = b"".join(statement(REPLACE, TEXTS, (str(key),)) for key in range(30))
    await served.run([texts] * 3)
    assert [set(peer.codes()[60:]) for peer in served.peers] == [{0}, {42}, {42}]
    assert served.journal.vclock == VClock({1: 5 + 90})


@pytest.mark.parametrize("count", [1, 40])
async def test_partial_packet_waits_for_its_rest(count: int) -> None:
    whole = numbered(REPLACE, range(count + 1))
    size = len(whole) // (count + 1)
    for cut in range(count * size, len(whole)):
        served = Served()
        await served.run([whole[:cut]])
        assert served.peers[0].codes() == [0] * count
        assert served.peers[0].unread == whole[count * size : cut]
        await served.run([whole[cut:]])
        assert served.peers[0].codes() == [0] * (count + 1)
        assert served.peers[0].unread == b""


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("bad", [b"\xce\x00\x10\x00\x01", b"\x00", b"\xc1\x05", b"\xcf" + b"\xff" * 8])
async def test_invalid_packet_ends_only_its_own_connection(count: int, bad: bytes) -> None:
    """The requests before it are executed."""
    served = Served([ADMIN] * 2)
    await served.run([numbered(REPLACE, range(count)) + bad, numbered(REPLACE, range(100, 100 + count))])
    assert [len(peer.refused) for peer in served.peers] == [1, 0]
    assert [peer.codes() for peer in served.peers] == [[0] * count] * 2
    assert len(served.box.space(NUMBERS)) == 2 * count


async def test_requests_beyond_the_capacity_of_a_turn_wait_for_the_next() -> None:
    served = Served([ADMIN] * 3)
    with patch.object(executor, "TURN_REQUESTS_MAX", 100):
        served.executor = Executor(served.box, served.journal, served.commits, cast("Any", StoppedClock()), wide=False)
        for number, peer in enumerate(served.peers):
            peer.unread += numbered(REPLACE, range(number * 70, number * 70 + 70))
        served.executor.execute(served.peers)
        await served.journal.drain()
        assert [len(peer.codes()) for peer in served.peers] == [70, 30, 0]
        await served.run([b""] * 3)
    assert [peer.codes() for peer in served.peers] == [[0] * 70] * 3
    assert [response.sync for response in served.peers[1].responses()] == list(range(70))


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC, WalMode.NONE])
async def test_write_is_answered_only_after_the_log_has_it(mode: WalMode) -> None:
    served = Served(mode=mode)
    seen: list[int] = []
    served.journal.on_written.append(lambda rows, vclock: seen.append(len(served.peers[0].sent)))
    for number in range(3):
        served.peers[0].sent.clear()
        await served.run([numbered(REPLACE, range(40), first=number)])
        assert served.peers[0].codes() == [0] * 40
    assert seen == [0, 0, 0]


async def test_turn_that_fails_late_answers_with_its_own_syncs() -> None:
    """By then the next turn has used the table of requests."""
    served = Served(mode=WalMode.FSYNC)
    await served.run([numbered(REPLACE, range(20))])
    served.peers[0].sent.clear()
    served.disk.broken.add("sync")
    for first in (100, 200):
        served.peers[0].unread += numbered(REPLACE, range(50, 90), first=first)
        served.executor.execute(served.peers)
    await served.journal.drain()
    assert served.peers[0].codes() == [WAL_IO] * 80
    syncs = [response.sync for response in served.peers[0].responses()]
    assert sorted(syncs) == [*range(100, 140), *range(200, 240)]
    assert len(served.box.space(NUMBERS)) == 20


async def test_requests_after_one_that_waits_are_not_executed_in_bulk() -> None:
    """An INSERT of an existing key goes to the session; if it must wait, so must all later requests."""
    served = Served()
    served.fill(5)
    peer = served.peers[0]
    handle = peer.handle

    def wait(packet: bytes) -> Reply | Coroutine[Any, Any, Reply]:
        peer.is_waiting = True
        return handle(packet)

    with patch.object(peer, "handle", wait):
        tail = b"".join(statement(DELETE, NUMBERS, (key,)) + statement(SELECT, NUMBERS, (key,)) for key in range(10))
        await served.run([statement(SELECT, NUMBERS, (1,)) + numbered(INSERT, [3]) + tail])
    assert peer.handled == 21
