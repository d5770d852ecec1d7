"""The target for turns: bulk execution equals single execution, and a failed write undoes it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import numpy as np

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import ADMIN
from flowstone.errors import FlowstoneError
from flowstone.iproto import request_scan
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import PacketError, encode_request, split
from flowstone.iproto.requests import decode_request
from flowstone.iproto.scan import Cells
from flowstone.node.configuration import configure
from flowstone.node.instance import Instance
from flowstone.node.server.executor import Executor
from flowstone.node.server.procedures_box import built_in
from flowstone.node.server.request_batch import Reply
from flowstone.node.server.session import Session
from flowstone.node.server.watchers import Watchers, sources_of
from flowstone.node.synchro.elections import Elections
from flowstone.node.wal.commits import Commits
from flowstone.node.wal.journal import Journal
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from tests.box.spaces import definition, on, put
from tests.node.instances import REPLICASET_UUID, UUID

SIZE_MAX = 1 << 20
SPACES = (
    definition(512, on("0:unsigned"), fields="id:unsigned name:string amount:number?"),
    definition(513, on("0:string"), fields="id:string"),
    definition(514, on("0:integer"), on("1:string", unique=False)),
    definition(515, on("1:unsigned", type="hash")),
)
FIRST = {512: (1, "one", 1), 513: ("one", 1), 514: (1, "one"), 515: ("one", 1)}


TABLE: Cells = np.empty((request_scan.LINES, 1024), np.int64)


class _SmallBox(Box):
    """Return a box without system spaces, which would take most of the time."""

    def _put_system_spaces(self) -> None:
        pass


class _Written:
    """A journal that keeps the rows, or fails."""

    replica_id = 1
    is_idle = is_ready = True

    def __init__(self, error: FlowstoneError | None) -> None:
        self.rows: list[bytes] = []
        self.written_vclock = self.vclock = VClock({1: 0})
        self._lsn = 0
        self._error = error
        self._waiting: list[Callable[[FlowstoneError | None], None]] = []
        self.on_failure: list[Callable[[], None]] = []

    def next_lsn(self, replica_id: int) -> int:
        return self._lsn + 1

    def submit(self, rows: bytes, count: int, done: Callable[[Any], None], *, local_count: int = 0) -> None:
        self._lsn += count
        self.rows.append(rows)
        self._waiting.append(done)

    def write_now(self, rows: bytes, count: int) -> None:
        self._lsn += count
        self.rows.append(rows)
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for done in waiting if self._error is None else reversed(waiting):
            done(self._error)


class _Moment:
    """A stopped clock: equal requests write equal rows."""

    def wall(self) -> float:
        return 1.5

    def monotonic(self) -> float:
        return 1.5


class _Peer:
    """A connection without a socket. Slow procedures are excluded."""

    user = ADMIN
    is_waiting = False
    packet_size_max = SIZE_MAX

    def __init__(self, instance: Instance) -> None:
        self.unread = bytearray()
        self.replies = b""
        self.is_refused = False
        watchers = Watchers(sources_of(instance))
        self._session = Session(instance, watchers, built_in(), self._hear, id=1, salt=bytes(32))
        self._session.user = ADMIN

    def _hear(self, packet: bytes) -> None:
        self.replies += packet

    def handle(self, packet: bytes) -> Reply | Coroutine[Any, Any, Reply]:
        return self._session.handle(decode_request(packet, is_2_6=True))

    def start(self, reply: Coroutine[Any, Any, Reply]) -> None:
        reply.close()

    def replying(self, size: int) -> None: ...

    def send(self, packets: Sequence[bytes]) -> None:
        self.replies += b"".join(packets)

    def postponed(self, count: int) -> None:
        raise AssertionError("no space here is synchronous")

    def send_late(self, packets: Sequence[bytes], count: int) -> None:
        raise AssertionError("no space here is synchronous")

    def refuse(self, reason: str) -> None:
        self.is_refused = True
        self.unread.clear()


class _Served:
    """A box with its turns, some connections, and existing rows."""

    def __init__(self, count: int, error: FlowstoneError | None = None) -> None:
        self.box = _SmallBox(Dialect.V2_6)
        for defined in SPACES:
            put(self.box, defined)
        self.journal = _Written(error)
        clock, journal = cast("Any", _Moment()), cast("Journal", self.journal)
        for space_id, row in FIRST.items():
            statements.replace(self.box.begin(), self.box.space(space_id), pack(row))
        commits = Commits(self.box, journal, clock)
        outside = production()
        elections = Elections(outside, journal, commits.queue)
        who = UUID, REPLICASET_UUID, configure({}), elections
        instance = Instance(outside, self.box, journal, commits, *who, status="running")
        self.executor = Executor(self.box, journal, commits, clock, wide=False)
        self.executor._table = TABLE  # shared: errors keep the frames that they passed, and so the turns
        self.peers = [_Peer(instance) for _ in range(count)]

    def one_by_one(self, pieces: Sequence[bytes]) -> None:
        for peer, piece in zip(self.peers, pieces, strict=True):
            at = 0
            while at < len(piece) and not peer.is_refused:
                packet = _first_packet(piece[at:])
                peer.unread += packet or piece[at:]
                self.executor.execute([peer])
                self.executor.execute([peer])
                at += len(packet) or len(piece)

    def at_once(self, pieces: Sequence[bytes]) -> None:
        for peer, piece in zip(self.peers, pieces, strict=True):
            peer.unread += piece
        self.executor.execute(self.peers)
        self.executor.execute(self.peers)  # an invalid packet may be reported in a separate turn

    def contents(self) -> list[tuple[int, int, list[tuple[Any, bytes]]]]:
        """Return the tuples of every index in order."""
        return [
            (defined.id, number, list(index.scan()))
            for defined in SPACES
            for number, index in self.box.space(defined.id).indexes.items()
        ]


def _first_packet(data: bytes) -> bytes:
    """Return a packet with its length; None if it is incomplete or invalid."""
    for end in range(1, 10):
        try:
            packets, _ = split(data[:end], size_max=SIZE_MAX)
        except PacketError:
            return b""
        if packets:
            return data[:end]
    head = data[0]
    width = 0 if head < 0x80 else {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}[head]
    size = head if not width else int.from_bytes(data[1 : 1 + width], "big")
    whole = 1 + width + size
    return data[:whole] if whole <= len(data) else b""


def turn(data: bytes) -> None:
    middle = len(data) // 2
    for pieces in ([data], [data[:middle], data[middle:]]):
        bulk, plain, failed = _Served(len(pieces)), _Served(len(pieces)), _Served(len(pieces), FAILURE)
        before = failed.contents()
        bulk.at_once(pieces)
        plain.one_by_one(pieces)
        failed.at_once(pieces)
        for one, other in zip(bulk.peers, plain.peers, strict=True):
            assert one.replies == other.replies
            assert one.is_refused == other.is_refused
        assert bulk.contents() == plain.contents()
        assert b"".join(bulk.journal.rows) == b"".join(plain.journal.rows)
        assert failed.contents() == before


FAILURE = FlowstoneError("the disk is full")


def _statement(type: RequestType, space_id: int, **body: Any) -> bytes:
    keys = {Key[name].value: value for name, value in body.items()}
    return encode_request(type, 300, pack({Key.SPACE_ID.value: space_id} | keys))


def _batch(count: int) -> tuple[bytes, ...]:
    """Return runs of equal statements, some on existing keys, and a mix of them."""
    numbers = range(count)
    rows: dict[int, list[tuple[Any, ...]]] = {
        512: [(number, f"name{number}", number / 2) for number in numbers],
        513: [(f"key{number}", number) for number in numbers],
        514: [(number, f"name{number % 3}") for number in numbers],
        515: [(f"name{number}", number) for number in numbers],
    }
    keys = {512: 0, 513: 0, 514: 0, 515: 1}
    found = []
    for space_id, tuples in rows.items():
        picked = [(row[keys[space_id]],) for row in tuples]
        found += [
            b"".join(_statement(RequestType.REPLACE, space_id, TUPLE=row) for row in tuples),
            b"".join(_statement(RequestType.INSERT, space_id, TUPLE=row) for row in tuples[2:]),
            b"".join(_statement(RequestType.REPLACE, space_id, TUPLE=row) for row in tuples)
            + b"".join(_statement(RequestType.SELECT, space_id, KEY=key, LIMIT=9) for key in picked)
            + b"".join(_statement(RequestType.DELETE, space_id, KEY=key) for key in picked),
            b"".join(
                _statement(RequestType.REPLACE, space_id, TUPLE=row)
                + _statement(RequestType.SELECT, space_id, KEY=key, LIMIT=1)
                + _statement(RequestType.DELETE, space_id, KEY=key)
                + _statement(RequestType.INSERT, space_id, TUPLE=row)
                for row, key in zip(tuples, picked, strict=True)
            ),
        ]
    return tuple(found)


CORPUS = _batch(20)
