"""Replica sets in which every member follows every other, and the state of their elections and synchronous queue.

Members start with elections off: the first one creates users and spaces, then modes are set at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Self

from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import unpack
from tests.interop import workload
from tests.interop.client import Client
from tests.interop.cluster import Cluster
from tests.interop.compare import transactions
from tests.interop.member import SECONDS, Member, eventually
from tests.interop.proxy import Proxy
from tests.judges.judging import judge_all

SYNCHRONOUS, PLAIN = 720, 721
REPLICATION_TIMEOUT, ELECTION_TIMEOUT = 0.5, 2.0
TIMING = {"replication_timeout": REPLICATION_TIMEOUT, "election_timeout": ELECTION_TIMEOUT}
"""A leader counts as lost after four times the first; an election without a winner is repeated after the second."""

RAFT, PROMOTE, DEMOTE, CONFIRM, ROLLBACK = 30, 31, 32, 40, 41
NAMES = {PROMOTE: "PROMOTE", DEMOTE: "DEMOTE", CONFIRM: "CONFIRM", ROLLBACK: "ROLLBACK"}
QUORUM_TIMEOUT, SYNC_ROLLBACK = 216, 217
OWNER, LSN, TERM = 0x02, 0x03, 0x53
"""Body keys of such rows."""


class Mesh:
    """Members in join order, so that the first has id 1.

    Each direction between two has its own proxy, unless the mesh is `direct`.
    """

    def __init__(self, cluster: Cluster, kinds: Iterable[str], *, direct: bool = False, **options: Any) -> None:
        self._cluster = cluster
        self._is_direct = direct
        self._wires: dict[tuple[Member, Member], Proxy] = {}
        self.members: list[Member] = []
        for kind in kinds:
            self.join(kind, **options)
        first = self.members[0]
        define(first)
        self.wait_same(first)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def join(self, kind: str, **options: Any) -> Member:
        """Add a member to a set that may have a leader already."""
        number = len(self.members) + 1
        member: Member = getattr(self._cluster, kind)(f"{kind}{number}", start=False, **(self._timing() | options))
        others = list(self.members)
        self.members.append(member)
        if not self._is_direct:
            for other in others:
                self._wires[member, other] = self._cluster.proxy(other)
                self._wires[other, member] = self._cluster.proxy(member)
        if others:
            member.options["replication"] = self._uris(member)
        elif member.kind == "flowstone":
            member.options["dialect"] = self._cluster.binary.dialect
        member.start()
        for other in others:
            self.configure(other, replication=self._uris(other))
        for other in others:
            other.wait_follow(member)
        member.wait_follow(*others)
        return member

    def _timing(self) -> dict[str, Any]:
        """Return the timing options; without elections for servers that have none."""
        return {"replication_timeout": REPLICATION_TIMEOUT} if self._cluster.binary.dialect == "2.6" else TIMING

    def _uris(self, member: Member) -> list[str]:
        if self._is_direct:
            return [other.uri for other in self.others(member)]
        return [proxy.uri for (follower, _), proxy in self._wires.items() if follower is member]

    def configure(self, member: Member, **options: Any) -> None:
        """Set options now and for later starts."""
        member.configure(**options)
        member.options |= options

    def set_modes(self, *modes: str, **options: Any) -> None:
        """Set `election_mode` of each member in turn, or of all."""
        for member, mode in zip(self.members, modes * (1 if len(modes) > 1 else len(self.members)), strict=True):
            self.configure(member, election_mode=mode, **options)

    # --- partitions ---

    def isolate(self, *members: Member) -> None:
        """Hold all traffic between these members and all others."""
        for proxy in self._between(members):
            proxy.cut()

    def rejoin(self, *members: Member) -> None:
        for proxy in self._between(members):
            proxy.mend()

    def wire(self, follower: Member, upstream: Member) -> Proxy:
        """Return the proxy for what `follower` receives from `upstream`."""
        return self._wires[follower, upstream]

    def wires(self, member: Member) -> list[Proxy]:
        """Return the proxies of both directions between a member and all others."""
        return self._between((member,))

    def _between(self, members: tuple[Member, ...]) -> list[Proxy]:
        return [wire for (one, two), wire in self._wires.items() if (one in members) != (two in members)]

    # --- agreement ---

    def others(self, *members: Member) -> list[Member]:
        return [one for one in self.members if one not in members]

    def wait_leader(self, *among: Member, besides: Member | None = None, seconds: float = SECONDS) -> Member:
        """Wait for the writable leader that all of `among` (by default all members) follow in one term."""
        voters = list(among or self.members)

        def agreed() -> Member | None:
            seen = [election(member) for member in voters]
            leaders = {(one["leader"], one["term"]) for one in seen}
            leader = next((member for member in voters if election(member)["state"] == "leader"), None)
            if leader is None or leader is besides or leaders != {(leader.id, election(leader)["term"])}:
                raise TimeoutError(seen)
            return leader if not leader.info()["ro"] else None

        found: Member = eventually(f"{voters} agree on a leader", agreed, seconds=seconds)
        return found

    def wait_owner(self, owner: Member | int, *among: Member, seconds: float = SECONDS) -> int:
        """Return the term in which all of `among` know `owner` as the owner of the queue."""
        number = owner if isinstance(owner, int) else owner.id

        def agreed() -> int | None:
            seen = {(queue(member)["owner"], queue(member)["term"]) for member in among or self.members}
            if len(seen) > 1 or seen != {(number, max(term for _, term in seen))}:
                raise TimeoutError(seen)
            return max(term for _, term in seen)

        term: int = eventually(f"{number} owns the queue", agreed, seconds=seconds)
        return term

    def judge(self, **archives: Path) -> None:
        """Stop all members, which have equal data; check that servers start from their directories with the same
        rows."""
        for member in self.members:
            member.kill()
        judge_all({member.name: member.directory for member in self.members} | archives)

    def wait_same(self, *sources: Member) -> None:
        """Wait until all members have the rows of `sources`."""
        for member in self.members:
            member.catch_up(*(source for source in sources if source is not member))


def define(member: Member) -> None:
    """Define a synchronous and an asynchronous space."""
    spaces: dict[str, dict[str, Any]] = {
        "synchronous": {"id": SYNCHRONOUS, "is_sync": True},
        "plain": {"id": PLAIN},
    }
    for name, options in spaces.items():
        create = ["call", "box.schema.space.create", [name, options]]
        index = ["call", f"box.space.{name}:create_index", ["pk", {"parts": [1, "unsigned"]}]]
        refusals = workload.run(member, [create, index])
        assert not refusals, refusals


def election(member: Member) -> dict[str, Any]:
    """Return box.info.election."""
    shown: dict[str, Any] = member.info()["election"]
    return shown


def queue(member: Member) -> dict[str, Any]:
    """Return box.info.synchro.queue."""
    shown: dict[str, Any] = member.info()["synchro"]["queue"]
    return shown


def wait_until(member: Member, what: str, condition: Callable[[Member], object]) -> None:
    eventually(f"{member} {what}", partial(condition, member))


def promote(member: Member) -> None:
    member.call("box.ctl.promote")


def demote(member: Member) -> None:
    member.call("box.ctl.demote")


def write(member: Member, *fields: Any, space: int = SYNCHRONOUS) -> None:
    with member.connect() as client:
        client.replace(space, *fields)


def keys(member: Member, space: int = SYNCHRONOUS) -> list[int]:
    return [unpack(raw)[0] for raw in member.tuples(space)]


def refusal(action: Callable[[], object]) -> int:
    """Return the code of the error with which a request is rejected."""
    try:
        action()
    except TarantoolError as error:
        return error.code
    raise AssertionError(f"{action} was not rejected")


class Pending:
    """A write in flight: `outcome` is the code of its error, 0 on success."""

    def __init__(self, member: Member, *fields: Any, space: int = SYNCHRONOUS) -> None:
        self._client: Client = member.connect()
        self._answer: int | None = None
        self._thread = Thread(target=partial(self._run, fields, space), daemon=True)
        self._thread.start()

    def _run(self, fields: tuple[Any, ...], space: int) -> None:
        try:
            self._client.replace(space, *fields)
            self._answer = 0
        except TarantoolError as error:
            self._answer = error.code
        except OSError:
            self._answer = -1
        finally:
            self._client.close()

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    def outcome(self, *, seconds: float = SECONDS) -> int:
        """Return -1 if the connection ended without an answer."""
        self._thread.join(seconds)
        assert self._answer is not None, "no answer yet"
        return self._answer

    def wait_on(self, *members: Member) -> Self:
        """Wait until the write is in the queues of `members`."""
        for member in members:
            wait_until(member, "has a transaction that waits", lambda one: queue(one)["len"])
        return self


# --- logs ---


def verdicts(member: Member, since: int = 0) -> list[tuple[str, int, dict[int, Any]]]:
    """Return CONFIRM, ROLLBACK, PROMOTE and DEMOTE in the log, in order: name, originator, body."""
    return [
        (NAMES[row.type], row.replica_id, unpack(row.body))
        for rows in transactions(member)
        for row in rows
        if row.type in NAMES and row.lsn > since
    ]
