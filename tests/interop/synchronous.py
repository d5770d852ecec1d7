"""Support for tests of synchronous replication: spaces, pending commits, and logs as stories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import SHUT_RDWR
from threading import Thread
from typing import Any, Final, Self

import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import unpack
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.reader import LogFile
from tests.interop import workload
from tests.interop.client import Request
from tests.interop.cluster import Cluster
from tests.interop.compare import LoggedRow, Transactions, transactions
from tests.interop.member import SECONDS, Member, by_id, eventually
from tests.interop.versions import Binary

SYNC, PLAIN, OWN = 730, 731, 732
FOREIGN_QUEUE, MISMATCH, QUORUM_TIMEOUT, ROLLED_BACK = 214, 215, 216, 217
FOREVER: Final = 1000
"""A timeout longer than any test."""

PATIENT: Final = {"replication_synchro_quorum": 2, "replication_synchro_timeout": FOREVER}
NOW: Final = {"replication_synchro_timeout": 0.001}
BOTH_WAYS = pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
THREE = pytest.mark.parametrize("kinds", [("real", "ours", "real"), ("ours", "real", "ours")], ids="-".join)

_VERDICTS: Final = {RequestType.RAFT_CONFIRM: "confirm", RequestType.RAFT_ROLLBACK: "rollback"}


def define(member: Member) -> None:
    """Define a synchronous, an asynchronous and a local space."""
    kinds: dict[str, dict[str, Any]] = {
        "sure": {"id": SYNC, "is_sync": True},
        "plain": {"id": PLAIN},
        "own": {"id": OWN, "is_local": True},
    }
    for name, options in kinds.items():
        create = ["call", "box.schema.space.create", [name, options]]
        index = ["call", f"box.space.{name}:create_index", ["pk", {"parts": [1, "unsigned"]}]]
        workload.run(member, [create, index])


def make_pair(cluster: Cluster, master_kind: str, replica_kind: str, **options: Any) -> tuple[Member, Member]:
    """Make a pair with a quorum of both and long timeouts."""
    master: Member = getattr(cluster, master_kind)("master", **(PATIENT | options))
    define(master)
    replica: Member = getattr(cluster, replica_kind)("replica", **(PATIENT | options), replication=[master.uri])
    replica.wait_follow(master)
    replica.wait_writable()
    return master, replica


class Pairs:
    """Pairs that several tests share: created on first use, reset for each test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[tuple[str, ...], tuple[Cluster, Member, Member]] = {}

    def get(self, binary: Binary, master_kind: str, replica_kind: str) -> tuple[Cluster, Member, Member]:
        key = str(binary), master_kind, replica_kind
        if key not in self._made:
            cluster = Cluster(self._directory / "-".join(key), binary)
            try:
                # No heartbeat is due during a test: rows and ACKs for a commit must be sent when they are due.
                pair = make_pair(cluster, master_kind, replica_kind, replication_timeout=FOREVER)
            except BaseException:
                cluster.close()
                raise
            self._made[key] = cluster, *pair
        else:
            self._renew(*self._made[key][1:])
        return self._made[key]

    @staticmethod
    def _renew(master: Member, replica: Member) -> None:
        master.configure(replication_synchro_quorum=1)  # requests that are still pending
        master.configure(replication=[])
        replica.catch_up(master)
        # Without heartbeats a connection between nodes may time out, and is then retried only once.
        replica.configure(replication=[])
        eventually(f"{replica} has left", lambda: master.downstream(2).get("status") != "follow")
        for member in (master, replica):
            member.configure(**PATIENT, replication_timeout=FOREVER)
        replica.configure(replication=[master.uri])
        replica.wait_follow(master)
        for space in (SYNC, PLAIN, OWN):
            UnderWay(master, *(delete(space, key) for key in keys(master, space))).codes()
        replica.catch_up(master)

    def close(self) -> Iterator[str]:
        """Close the pairs; report those with unexpected errors in their logs."""
        for cluster, *members in self._made.values():
            cluster.close()
            for member in members:
                if "Traceback" in member.log():
                    yield f"{member}:\n{member.log()}"


def insert(space: int, *fields: Any) -> Request:
    return Request(RequestType.INSERT, {Key.SPACE_ID: space, Key.TUPLE: fields})


def replace(space: int, *fields: Any) -> Request:
    return Request(RequestType.REPLACE, {Key.SPACE_ID: space, Key.TUPLE: fields})


def delete(space: int, *key: Any) -> Request:
    return Request(RequestType.DELETE, {Key.SPACE_ID: space, Key.KEY: key})


def call(function: str, *arguments: Any) -> Request:
    return Request(RequestType.CALL, {Key.FUNCTION_NAME: function, Key.TUPLE: arguments})


def together(*steps: list[Any]) -> Request:
    """Return one transaction of several statements."""
    return call("interop.transaction", list(steps))


class UnderWay:
    """Requests sent to a member together, on their own connection; they may wait for a verdict."""

    def __init__(self, member: Member, *requests: Request) -> None:
        self._what = f"{len(requests)} requests to {member}"
        self._client = member.connect()
        self._requests = requests
        self._errors: list[TarantoolError | None] = []
        self._problem: OSError | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def errors(self, *, seconds: float = SECONDS) -> list[TarantoolError | None]:
        """Return the error of each answer, None for success."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"no answer to {self._what}"
        if self._problem is not None:
            raise self._problem
        return self._errors

    def codes(self, *, seconds: float = SECONDS) -> list[int]:
        """Return the error codes, 0 for success."""
        return [error.code if error else 0 for error in self.errors(seconds=seconds)]

    def abandon(self) -> None:
        """Close the connection, as a client that times out or dies does."""
        with suppress(OSError):  # the member has answered already
            self._client.detach().shutdown(SHUT_RDWR)
        self._thread.join(SECONDS)

    def _run(self) -> None:
        try:
            with self._client:
                for answer in self._client.pipeline(self._requests):
                    self._errors.append(answer.error() if answer.is_error else None)
        except OSError as error:
            self._problem = error


class Story:
    """The log rows from here on, of any member with the same rows: "1+2 confirm 1+1" is the second one of member 1.

    LSNs are relative to the current positions of the members.
    """

    def __init__(self, *members: Member) -> None:
        self._start: dict[int, int] = {}
        for member in members:
            for origin, lsn in member.vclock().items():
                self._start[origin] = max(lsn, self._start.get(origin, 0))

    def of(self, member: Member) -> list[str]:
        """Return one text per transaction in the log of a member."""
        return [", ".join(map(self._tell, rows)) for rows in self._new(member)]

    def rows(self, member: Member) -> list[LoggedRow]:
        return [row for rows in self._new(member) for row in rows]

    def _new(self, member: Member) -> Transactions:
        return [rows for rows in transactions(member) if rows[-1].lsn > self._start.get(rows[-1].replica_id, 0)]

    def wait(self, count: int, *members: Member, origin: int = 1) -> Self:
        """Wait until the members have this number of new rows of an originator."""
        for member in members:
            member.wait_vclock({origin: self._start.get(origin, 0) + count})
        return self

    def _tell(self, row: LoggedRow) -> str:
        verdict = _VERDICTS.get(RequestType(row.type))
        where = self._place(row.replica_id, row.lsn)
        if verdict is None:
            return f"{where} {RequestType(row.type).name.lower()}"
        body = unpack(row.body)
        assert set(body) == {Key.REPLICA_ID, Key.LSN}, f"2.6 rejects other keys: {body}"
        return f"{where} {verdict} {self._place(body[Key.REPLICA_ID], body[Key.LSN])}"

    def _place(self, origin: int, lsn: int) -> str:
        return f"{origin}+{lsn - self._start.get(origin, 0)}"


def wait_acked(member: Member, replica: Member) -> None:
    """Wait until `member` knows that `replica` has all of its rows."""
    number = replica.id

    eventually(f"{replica} acknowledges to {member}", lambda: _has_acked(member.downstream(number), member))


def wait_anonymous_acked(member: Member, count: int) -> None:
    """Wait until `member` knows of `count` anonymous replicas with all of its rows."""

    def are_acked() -> bool:
        rows = dict(member.call("box.info.replication_anon")).values()
        return [_has_acked(row["downstream"], member) for row in rows] == [True] * count

    eventually(f"{count} anonymous replicas acknowledge to {member}", are_acked)


def _has_acked(downstream: dict[str, Any], member: Member) -> bool:
    theirs = by_id(downstream.get("vclock", {}))
    return all(theirs.get(origin, 0) >= lsn for origin, lsn in member.vclock().items())


def keys(member: Member, space: int = SYNC) -> list[int]:
    """Return the keys that a reader sees."""
    return [unpack(raw)[0] for raw in member.tuples(space)]


def wait_keys(wanted: list[int], *members: Member, space: int = SYNC) -> None:
    def has(member: Member) -> bool:
        return keys(member, space) == wanted

    for member in members:
        eventually(f"{member} has {wanted}", partial(has, member))


def snapshot_keys(member: Member, space: int = SYNC) -> list[int]:
    """Return the keys in the newest snapshot of a member."""
    found = []
    with LogFile.open(SystemDisk(), str(member.files("snap")[-1])) as snapshot:
        for transaction in snapshot.transactions():
            for row in transaction.rows:
                body = unpack(row.body)
                if body.get(Key.SPACE_ID) == space:
                    found.append(body[Key.TUPLE][0])
    return found


def assert_told(story: Story, wanted: Sequence[str], *members: Member) -> None:
    for member in members:
        assert story.of(member) == list(wanted), f"the log of {member}"
