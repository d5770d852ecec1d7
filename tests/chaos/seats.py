"""Replica sets for chaos: processes, the links between them, proxies for clients, and small disks.

All traffic between two members, and between clients and members, passes through a proxy. Logs and snapshots of nodes
are on disks that can be full; their output is not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from flowstone.iproto.errors import TarantoolError
from tests.chaos.small_disk import SmallDisk, small_disk
from tests.interop import workload
from tests.interop.client import Client, Disconnected
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged
from tests.interop.member import Member, RealMember, Timeout, eventually, wait_ready
from tests.interop.mesh import QUORUM_TIMEOUT, SYNCHRONOUS, Mesh
from tests.interop.proxy import Proxy
from tests.interop.versions import Binary
from tests.judges.files import list_files
from tests.judges.real_server import instance_uuid
from tests.real_tarantool import free_port

M = TypeVar("M", bound=Member)

SETS, REGISTERS, LISTS = 760, 761, 762
"""Synchronous spaces."""

OWN_SETS, OWN_REGISTERS = ASYNCHRONOUS = 770, 771

NAMES: Final = {
    SETS: "sets",
    REGISTERS: "registers",
    LISTS: "lists",
    OWN_SETS: "own_sets",
    OWN_REGISTERS: "own_registers",
}
OPTIONS: Final[dict[str, Any]] = {
    "replication_timeout": 0.5,
    "replication_connect_timeout": 3,
    "replication_synchro_timeout": 5,
    "wal_max_size": 1 << 20,
    "checkpoint_count": 3,
}
"""An isolated leader rolls back only after it has noticed its isolation, after 4 × `replication_timeout`;
docs/explanation/reliability.md gives the reason under what is not promised.
"""

START_SECONDS: Final = 90.0
STARTS_MAX: Final = 3
READ_ONLY: Final = 7
QUORUM: Final = 3
VERDICT_SECONDS: Final = 4.0
"""Timeout for the answer to a synchronous transaction of a real master."""

LSN_TWICE: Final = "Attempt to write a broken LSN to WAL"
"""2.6.0 logs this when it writes a row twice, and rejects its own log at the next start. A failed applier resets the
vclock of all appliers (`applier_txn_rollback_cb`) while a row of another applier is on its way to disk."""

FOREVER: Final = 1000
"""The timeout of a real master: 2.6.0 that rolls back dies of it sooner or later (a segmentation fault in its memory
pool), and may have written an LSN twice by then."""


class ChaosCluster(Cluster):
    """Members with fixed ports; nodes are on small disks."""

    def __init__(self, directory: Path, binary: Binary) -> None:
        super().__init__(directory, binary)
        self.disks: dict[Member, SmallDisk] = {}

    def _add(self, member: M, start: bool) -> M:
        if not isinstance(member, RealMember):
            place = self.directory / "disks" / member.name
            disk = small_disk(place, lambda: member.pid, member.directory / "member.log")
            self.disks[member] = disk
            http = f"127.0.0.1:{free_port()}"
            member.options |= {"wal_dir": str(place), "memtx_dir": str(place), "http_listen": http}
        return super()._add(member, start)

    def close(self) -> None:
        super().close()
        for disk in self.disks.values():
            disk.close()


class Seats(ABC):
    """A set that is complete and working when created."""

    synchronous: tuple[int, ...]
    asynchronous: tuple[int, ...] = ()
    has_elections: bool
    options_of_real: ClassVar[dict[str, Any]] = {}
    master: Member | None = None
    """The only writer of synchronous spaces, if no other member can become it."""
    is_calm = False
    """Synchronous spaces have no writer at the moment."""
    own_writers: Sequence[Member] = ()
    """Return the writers of asynchronous spaces.

    None beside a real master: the queue of 2.6.0 hangs for ever if an asynchronous transaction arrives while a CONFIRM
    is being written, and it reuses an LSN if rows of others are rejected because the queue is not empty.
    """

    def __init__(self, directory: Path, binary: Binary, kinds: Sequence[str], **options: Any) -> None:
        self._cluster = ChaosCluster(directory, binary)
        self.rejoined = 0
        """Number of times that a real server rejoined because it had rejected its own log."""
        try:
            first, *others = kinds
            self.mesh = Mesh(self._cluster, (first,), **(OPTIONS | options))
            for kind in others:
                self.mesh.join(kind, **(OPTIONS | options | (self.options_of_real if kind == "real" else {})))
            self.members = self.mesh.members
            self.doors = {member: self._cluster.proxy(member) for member in self.members}
            self._define()
            self._begin()
        except BaseException as error:
            error.add_note(self._cluster.logs())
            self._cluster.close()
            raise

    def _define(self) -> None:
        first = self.members[0]
        for space in (*self.synchronous, *self.asynchronous):
            name, options = NAMES[space], {"id": space, "is_sync": space in self.synchronous}
            create = ["call", "box.schema.space.create", [name, options]]
            index = ["call", f"box.space.{name}:create_index", ["pk", {"parts": [1, "unsigned"]}]]
            refusals = workload.run(first, [create, index])
            assert not refusals, refusals
        self.mesh.wait_same(first)

    @abstractmethod
    def _begin(self) -> None:
        """Set options that apply only after all members have joined."""

    @property
    def disks(self) -> dict[Member, SmallDisk]:
        return self._cluster.disks

    @property
    def nodes(self) -> list[Member]:
        return [member for member in self.members if not isinstance(member, RealMember)]

    def wires(self) -> Iterator[Proxy]:
        """Yield the proxies between members."""
        return (self.mesh.wire(one, two) for one in self.members for two in self.mesh.others(one))

    @contextmanager
    def calm(self, members: Sequence[Member]) -> Iterator[None]:
        """Enter while `members` are stopped and restarted: waits until that is safe."""
        yield

    def start(self, *members: Member) -> None:
        """Start stopped members concurrently, and wait until they serve.

        Make a real replica that wrote an LSN twice rejoin with its id.
        """
        refused = [member for member in members if isinstance(member, RealMember) and self._has_lsn_twice(member)]
        if len(refused) < len(members):
            self._start(*(member for member in members if member not in refused))
        for member in refused:
            self._check_nothing_is_lost_with(member)
            member.discard_data()
            self.rejoined += 1
            self._start(member)

    def _check_nothing_is_lost_with(self, member: RealMember) -> None:
        """Check that other members have all rows that `member` originated: its data will be discarded."""
        uuid = instance_uuid(member.directory)
        number = next(each["id"] for each in self._running().replication().values() if each["uuid"] == uuid)
        _, logs = list_files(member.directory)
        written = max((row.lsn for log in logs for row in log.rows() if row.replica_id == number), default=0)
        others = [other for other in self.mesh.others(member) if other.is_running]
        eventually(
            f"row {written} of {member}, whose log no server starts from, is on another member",
            lambda: any(other.vclock().get(number, 0) >= written for other in others),
            seconds=VERDICT_SECONDS,
        )

    def _running(self) -> Member:
        return next(member for member in self.members if member.is_running)

    def _has_lsn_twice(self, member: RealMember) -> bool:
        return member is not self.master and LSN_TWICE in member.log()

    def _start(self, *members: Member) -> None:
        """Start members; restart a real 2.6.0, which may crash when it commits recovered transactions."""
        starting: Sequence[Member] = members
        for attempts_left in reversed(range(STARTS_MAX)):
            for member in starting:
                member.launch()
            try:
                wait_ready(*members, seconds=START_SECONDS)
                return
            except Timeout:
                starting = [member for member in members if isinstance(member, RealMember) and not member.is_running]
                if not starting or not attempts_left:
                    raise

    def help(self) -> bool:
        """Repair a real server that cannot continue by itself; return True if one was restarted."""
        return False

    def is_followed(self, member: Member) -> bool:
        """Return True if all other members follow `member`."""
        return all(member.downstream(other).get("status") == "follow" for other in self.mesh.others(member))

    def heal_wires(self) -> None:
        for proxy in (*self.wires(), *self.doors.values()):
            proxy.heal()

    def assert_equal(self) -> None:
        """Check that all members follow each other and have the same data, byte for byte."""
        for member in self.members:
            member.wait_follow(*self.mesh.others(member), seconds=START_SECONDS)
        self.wait_settled()
        assert_converged(*self.members, seconds=START_SECONDS)

    @abstractmethod
    def wait_settled(self) -> None:
        """Wait until no transaction is pending and writes are possible."""

    def close(self) -> None:
        self._cluster.close()


class ElectionSeats(Seats):
    """Three nodes that elect their leader. `stranger`: a real server as one of the members."""

    synchronous = SETS, REGISTERS, LISTS
    has_elections = True
    options_of_real: ClassVar[dict[str, Any]] = {"memtx_use_mvcc_engine": True}

    def __init__(self, directory: Path, stranger: Binary | None = None) -> None:
        binary = stranger or Binary("no server", (2, 11, 0))
        super().__init__(directory, binary, ("ours", "real" if stranger else "ours", "ours"), election_timeout=1)

    def _begin(self) -> None:
        for member in self.members:
            self.mesh.configure(member, replication_connect_quorum=2)
        self.mesh.set_modes("candidate")
        self.mesh.wait_leader()

    def wait_settled(self) -> None:
        self.mesh.wait_leader(seconds=START_SECONDS)


class Seats26(Seats):
    """Two real servers of 2.6 and two nodes; one of the four is the only writer of synchronous spaces.

    A quorum is three, so any two quorums overlap. No member is anonymous, because 2.6 would count it.
    """

    synchronous = SETS, REGISTERS
    asynchronous = ASYNCHRONOUS
    has_elections = False
    master: Member

    def __init__(self, directory: Path, binary: Binary, master_kind: str) -> None:
        kinds = ("real", "ours", "real", "ours") if master_kind == "real" else ("ours", "real", "ours", "real")
        super().__init__(directory, binary, kinds)

    def _begin(self) -> None:
        self.master = self.members[0]
        for member in self.members:
            self.mesh.configure(member, replication_connect_quorum=2, replication_synchro_quorum=QUORUM)
        if isinstance(self.master, RealMember):
            self.mesh.configure(self.master, replication_synchro_timeout=FOREVER)
        else:
            self.own_writers = self.members

    @contextmanager
    def calm(self, members: Sequence[Member]) -> Iterator[None]:
        """A real 2.6.0 crashes when it commits recovered transactions, and no other member can decide for it while
        others write.

        So the queue of a real master must be empty before it stops.
        """
        if self.master not in members or not isinstance(self.master, RealMember):
            yield
            return
        door = self.doors[self.master]
        self.is_calm = True
        door.cut()  # traffic in flight to the member is lost
        try:
            eventually("the queue is empty", self._is_at_rest, seconds=START_SECONDS)
            yield
        finally:
            door.mend()
            self.is_calm = False

    def _is_at_rest(self) -> bool:
        """Return True if the queue of the member is empty, or will never progress."""
        return not self.master.is_running or _is_answered(self.master) or self._stands_still()

    def help(self) -> bool:
        if not isinstance(self.master, RealMember) or not self._stands_still():
            return False
        with self.calm([self.master]):
            self.master.kill()
            self.start(self.master)
        return True

    def _stands_still(self) -> bool:
        """The queue of a real 2.6.0 hangs for ever after two CONFIRMs were written at once: its log has verdicts, a
        quorum has its log, and no client is answered any more. Check twice: a verdict may be in flight.
        """
        with suppress(TarantoolError, OSError):  # the server has just exited: the next poll will report that
            return all(not _is_answered(self.master) and self._is_with_a_quorum() for _ in range(2))
        return False

    def _is_with_a_quorum(self) -> bool:
        """Wait until a quorum has acknowledged the log of the master; return False if that takes too long."""
        lsn, others = self.master.info()["lsn"], self.mesh.others(self.master)

        def is_acknowledged() -> bool:
            vclocks = [self.master.downstream(other).get("vclock", {}) for other in others]
            return sum(vclock.get(self.master.id, 0) >= lsn for vclock in vclocks) + 1 >= QUORUM

        with suppress(Timeout):
            return eventually("a quorum has it", is_acknowledged, seconds=VERDICT_SECONDS)
        return False

    def wait_settled(self) -> None:
        self.master.wait_writable(seconds=START_SECONDS)


def _is_answered(member: Member) -> bool:
    """Wait for the answer to a synchronous transaction, even a rollback: all earlier ones are decided then."""
    with Client(member.port, seconds=VERDICT_SECONDS) as client:
        try:
            client.replace(SYNCHRONOUS, 1)
        except Disconnected:
            return False
        except TarantoolError as error:
            return error.code in (QUORUM_TIMEOUT, READ_ONLY)
        return True
