"""A leader dies or hangs under load: a successor takes over in time, and keeps every acknowledged write and no rejected
one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

import pytest

from flowstone.iproto.errors import TarantoolError
from tests.conftest import FULL
from tests.interop.client import Client
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.compare import assert_converged
from tests.interop.member import SECONDS, Member, eventually
from tests.interop.mesh import (
    ELECTION_TIMEOUT,
    REPLICATION_TIMEOUT,
    SYNCHRONOUS,
    Mesh,
    election,
    keys,
    promote,
    wait_until,
)
from tests.interop.versions import fits

ROUNDS = 10 if FULL else 1
WRITERS = 4
PATIENCE_SECONDS = 3.0
"""How long a writer waits for an answer before it turns to another member."""

RETRY_SECONDS, PACE_SECONDS = 0.02, 0.01
CLOSE_SECONDS = 0.3
KEYS_EACH = 1_000_000
BETWEEN = 30
"""Number of acknowledged writes before and after each fault."""


class Load:
    """Writers that insert rows into the synchronous space, each key once, at any member that accepts writes.

    Each write ends as acknowledged, as rejected by an error, or as unknown: there was no answer.
    """

    def __init__(self, members: Sequence[Member], writers: int = WRITERS) -> None:
        self.acknowledged: set[int] = set()
        self.refused: dict[int, TarantoolError] = {}
        self.unknown: set[int] = set()
        self._members = members
        self._lock = Lock()
        self._ending = Event()
        self._problems: list[BaseException] = []
        self._threads = [Thread(target=self._run, args=(number,), daemon=True) for number in range(writers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(SECONDS)
        if error is None:
            assert not self._problems, self._problems
            assert not any(thread.is_alive() for thread in self._threads)

    def wait_writes(self, what: str, count: int = BETWEEN) -> None:
        """Wait for this number of further acknowledged writes."""
        before = len(self.acknowledged)
        eventually(f"writes {what}", lambda: self._problems or len(self.acknowledged) > before + count)

    def _run(self, writer: int) -> None:
        key = (writer + 1) * KEYS_EACH
        turn = writer
        try:
            while not self._ending.is_set():
                member = self._members[turn % len(self._members)]
                turn += 1
                try:
                    with Client(member.port, seconds=PATIENCE_SECONDS) as client:
                        key = self._write(client, key)
                except (OSError, TarantoolError):  # the member is down, or rejects logins while starting
                    self._ending.wait(RETRY_SECONDS)
        except BaseException as error:
            self._problems.append(error)

    def _write(self, client: Client, key: int) -> int:
        """Return the next key once this member accepts no more writes."""
        while not self._ending.is_set():
            try:
                client.insert(SYNCHRONOUS, key, "x" * 50)
            except TarantoolError as error:
                with self._lock:
                    self.refused[key] = error
                self._ending.wait(RETRY_SECONDS)
                return key + 1
            except OSError:
                with self._lock:
                    self.unknown.add(key)
                return key + 1
            with self._lock:
                self.acknowledged.add(key)
            key += 1
            self._ending.wait(PACE_SECONDS)
        return key

    def assert_kept(self, member: Member) -> None:
        present = set(keys(member))
        lost = self.acknowledged - present
        assert not lost, f"{member} has lost {len(lost)} of {len(self.acknowledged)}: {sorted(lost)[:10]}"
        undead = {key: self.refused[key] for key in present & set(self.refused)}
        assert not undead, f"{member} has {len(undead)} that were rejected: {sorted(undead.items())[:10]}"
        strange = present - self.acknowledged - self.unknown
        assert not strange, f"{member} has unexpected rows: {sorted(strange)[:10]}"


def _wait_whole(mesh: Mesh, leader: Member) -> None:
    """Wait until all are connected with all, and in sync: unread rows look like heartbeats."""
    for member in mesh:
        member.wait_follow(*mesh.others(member))
        wait_until(member, "is followed by all", partial(_is_followed, mesh.others(member)))
        wait_until(member, "is not far behind", partial(_is_close, leader))


def _is_followed(followers: Sequence[Member], member: Member) -> bool:
    return all(member.downstream(follower).get("status") == "follow" for follower in followers)


def _is_close(leader: Member, member: Member) -> bool:
    began = time.monotonic()
    member.wait_vclock(leader.vclock())
    return time.monotonic() - began < CLOSE_SECONDS


def _wait_successor(mesh: Mesh, leader: Member, term: int, began: float) -> Member:
    """Wait for the successor of `leader`, which led in `term` until `began`, within the time limit."""
    others = mesh.others(leader)

    def successor() -> Member | None:
        return next((member for member in others if _leads(member, term)), None)

    found: Member = eventually(f"one of {others} leads", successor)
    took = time.monotonic() - began
    split_votes = election(found)["term"] - term - 1
    limit = 4 * REPLICATION_TIMEOUT + 1 + 1.1 * ELECTION_TIMEOUT * split_votes
    assert took <= limit, f"{found} leads after {took:.2f} s and {split_votes} split votes: limit {limit:.2f} s"
    return found


def _leads(member: Member, since: int) -> bool:
    """Return True if it leads in a later term, and is writable."""
    info = member.info()
    return info["election"]["state"] == "leader" and info["election"]["term"] > since and not info["ro"]


def _kill(mesh: Mesh, leader: Member, term: int, load: Load) -> None:
    began = time.monotonic()
    leader.kill()
    _wait_successor(mesh, leader, term, began)
    load.wait_writes("go on without it")
    leader.start()


def _hang(mesh: Mesh, leader: Member, term: int, load: Load) -> None:
    began = time.monotonic()
    leader.pause()
    _wait_successor(mesh, leader, term, began)
    load.wait_writes("go on without it")
    leader.resume()
    wait_until(leader, "follows the next one", lambda one: election(one)["leader"] not in (0, one.id))


def _stop(mesh: Mesh, leader: Member, term: int, load: Load) -> None:
    began = time.monotonic()
    leader.stop()
    _wait_successor(mesh, leader, term, began)
    load.wait_writes("go on without it")
    leader.start()


Fault = Callable[[Mesh, Member, int, Load], None]
FAULTS = pytest.mark.parametrize(
    "fault",
    [
        pytest.param(_kill, id="killed"),
        pytest.param(_hang, id="hanging"),
        *([pytest.param(_stop, id="stopped")] if FULL else []),
    ],
)


def _lose_leaders(mesh: Mesh, fault: Fault) -> None:
    mesh.set_modes("candidate")
    with Load(mesh.members) as load:
        for _ in range(ROUNDS):
            _wait_whole(mesh, mesh.wait_leader())
            load.wait_writes("are acknowledged")
            leader = mesh.wait_leader()  # on a busy machine, another member may lead by now
            term = election(leader)["term"]
            fault(mesh, leader, term, load)
            mesh.wait_leader()
        load.wait_writes("are acknowledged at last")
    mesh.wait_leader()
    for member in mesh:
        member.wait_follow(*mesh.others(member))
    assert_converged(*mesh)
    for member in mesh:
        load.assert_kept(member)


@FAULTS
@not_for_stand_ins
def test_lost_leader_is_replaced_in_time_without_losing_acknowledged_writes(nodes: Cluster, fault: Fault) -> None:
    mesh = Mesh(nodes, ("ours", "ours", "ours"), direct=True)
    _lose_leaders(mesh, fault)
    mesh.judge()


@FAULTS
@pytest.mark.parametrize("kinds", [("real", "ours", "real"), ("ours", "real", "ours")], ids="-".join)
@fits(">=2.11")
def test_lost_leader_of_a_mixed_set_is_replaced_in_time_without_losing_acknowledged_writes(
    cluster: Cluster, kinds: tuple[str, ...], fault: Fault
) -> None:
    mesh = Mesh(cluster, kinds, direct=True)
    _lose_leaders(mesh, fault)
    promote(mesh.members[1])
    assert mesh.wait_leader() is mesh.members[1]
    mesh.judge()
