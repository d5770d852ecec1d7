"""Kills, suspensions and cut connections in any order: no row is lost, duplicated, split or reordered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from tests.conftest import FULL
from tests.interop import ledger, workload
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged, assert_same_log, oldest_lsn
from tests.interop.ledger import Scribe
from tests.interop.member import Member, by_id, eventually
from tests.interop.proxy import Proxy
from tests.interop.workload import Workload

ROUNDS = 200 if FULL else 8
TIMEOUT = 0.25
"""`replication_timeout`: a peer that is silent for four times as long counts as lost."""

SEED = 20


class Pair:
    """Return a master, its replica, and the proxy between them."""

    def __init__(self, master: Member, replica: Member, wire: Proxy) -> None:
        self.master, self.replica, self.wire = master, replica, wire

    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            "master killed": partial(self._kill, self.master),
            "replica killed": partial(self._kill, self.replica),
            "master stopped": self.master.restart,
            "replica stopped": self.replica.restart,
            "master stands still": partial(self._freeze, self.master, self._is_upstream_lost),
            "replica stands still": partial(self._freeze, self.replica, self._is_downstream_lost),
            "master stands still for a moment": partial(self._freeze, self.master, lambda: True),
            "replica stands still for a moment": partial(self._freeze, self.replica, lambda: True),
            "disconnected": self.wire.disconnect,
            "cut": self._cut,
            "cut in the middle of something": self._cut_somewhere,
            "black hole": self._black_hole,
        }

    def _kill(self, member: Member) -> None:
        member.kill()
        member.start()

    def _freeze(self, member: Member, is_noticed: Callable[[], bool]) -> None:
        member.pause()
        try:
            eventually(f"somebody misses {member}", is_noticed)
        finally:
            member.resume()

    def _cut(self) -> None:
        self.wire.cut()
        eventually("the replica notices", self._is_upstream_lost)
        self.wire.mend()

    def _cut_somewhere(self) -> None:
        self.wire.cut_after(1000)
        eventually("the replica notices", self._is_upstream_lost)
        self.wire.mend()

    def _black_hole(self) -> None:
        self.wire.hold()
        try:
            eventually("the replica notices", self._is_upstream_lost)
        finally:
            self.wire.release()

    def _is_upstream_lost(self) -> bool:
        return self.replica.upstream(1).get("status") != "follow"

    def _is_downstream_lost(self) -> bool:
        return self.master.downstream(2).get("status") != "follow"


@pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
def test_transactions_arrive_once_complete_and_in_order_despite_faults(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    random = Random(f"{SEED}/{master_kind}")
    master: Member = getattr(cluster, master_kind)("master", replication_timeout=TIMEOUT, checkpoint_count=ROUNDS)
    ledger.define(master)
    wire = cluster.proxy(master)
    options = {"replication": [wire.uri], "replication_timeout": TIMEOUT, "checkpoint_count": ROUNDS}
    replica: Member = getattr(cluster, replica_kind)("replica", read_only=True, **options)
    faults = Pair(master, replica, wire).faults()
    deck: list[str] = []
    with Scribe(master) as scribe:
        for number in range(ROUNDS):
            if number % 10 == 9:  # a snapshot keeps restarts short; all logs are kept
                master.snapshot()
                replica.snapshot()
            deck = deck or random.sample(sorted(faults), len(faults))
            _round(deck.pop(), faults, scribe, replica)
    assert_converged(master, replica)
    for member in (master, replica):
        ledger.assert_whole(member, scribe.answered)
    assert_same_log(master, replica, origins=[1])
    eventually(f"{replica} is connected", lambda: master.downstream(replica).get("status") == "follow")


def _round(name: str, faults: dict[str, Callable[[], None]], scribe: Scribe, replica: Member) -> None:
    """Inject a fault while the scribe writes; the replica must get everything written after it."""
    before = len(scribe.answered)
    eventually("the scribe writes", lambda: len(scribe.answered) > before + 5)
    faults[name]()
    after = len(scribe.answered)
    eventually(f"after '{name}' the scribe writes", lambda: len(scribe.answered) > after + 5)
    newest = scribe.answered[-1]
    eventually(f"after '{name}' {replica} has {newest}", lambda: _newest(replica) >= newest)


def _newest(member: Member) -> int:
    found: tuple[int, int, int] | None = member.call("box.space.ledger:get", [0, 0])
    return found[2] if found is not None else 0


def test_two_masters_converge_after_faults(cluster: Cluster) -> None:
    one = cluster.real("one", replication_timeout=TIMEOUT)
    workload.run(one, workload.definitions(is_synchronous=False))
    wire = cluster.proxy(one)
    two = cluster.ours("two", replication=[wire.uri], replication_timeout=TIMEOUT)
    back = cluster.proxy(two)
    one.configure(replication=[back.uri])
    one.options["replication"] = [back.uri]
    one.wait_follow(two)
    two.wait_writable()
    random = Random(SEED)
    for number in range(max(3, ROUNDS // 10)):
        fault = random.choice((one.kill, two.kill, one.stop, two.stop, wire.disconnect, back.disconnect))
        for writer, member in enumerate((one, two)):
            workload.run(member, Workload(number, writer=writer, has_definitions=False).steps(100))
        fault()
        for writer, member in enumerate((one, two)):
            if member.is_running:
                workload.run(member, Workload(number + 1000, writer=writer, has_definitions=False).steps(100))
            else:
                member.launch()
        for member in (one, two):
            member.wait_ready()
            member.wait_writable()
    assert_converged(one, two)
    assert_same_log(one, two, origins=[1, 2])


def test_log_is_kept_for_the_slowest_registered_replica_and_collected_after_its_removal(cluster: Cluster) -> None:
    master = cluster.ours("master", checkpoint_count=1)
    ledger.define(master)
    quick, slow = (cluster.real(name, replication=[master.uri], read_only=True) for name in ("quick", "slow"))
    _assert_kept_for(master, quick, slow)


def test_real_master_keeps_its_log_for_a_node_until_the_node_is_removed(cluster: Cluster) -> None:
    master = cluster.real("master", checkpoint_count=1)
    ledger.define(master)
    quick = cluster.real("quick", replication=[master.uri], read_only=True)
    slow = cluster.ours("slow", replication=[master.uri], read_only=True)
    _assert_kept_for(master, quick, slow)


def _assert_kept_for(master: Member, quick: Member, slow: Member) -> None:
    first = _write_and_checkpoint(master, quick, slow, first=1)
    slow_id, needed = slow.id, slow.vclock()[1]
    slow.stop()
    first = _write_and_checkpoint(master, quick, first=first)
    first = _write_and_checkpoint(master, quick, first=first)
    assert (oldest_lsn(master) or 0) <= needed, "the log was deleted before the slow replica had it"
    slow.start()
    slow.catch_up(master)
    ledger.assert_whole(slow, list(range(1, first)))
    first = _write_and_checkpoint(master, quick, slow, first=first)
    eventually("what all have is collected", lambda: (oldest_lsn(master) or needed + 1) > needed)
    needed = slow.vclock()[1]
    slow.stop()
    first = _write_and_checkpoint(master, quick, first=first)
    first = _write_and_checkpoint(master, quick, first=first)
    assert (oldest_lsn(master) or 0) <= needed, "the log was deleted before the slow replica had it"
    master.client.delete(CLUSTER, slow_id)
    quick.catch_up(master)
    eventually("what only the removed replica needed is collected", lambda: (oldest_lsn(master) or needed + 1) > needed)


CLUSTER = 320


def _write_and_checkpoint(master: Member, *replicas: Member, first: int) -> int:
    """Write ten transactions, and a snapshot when the replicas have them; return the number of the next transaction."""
    for number in range(first, first + 10):
        master.call("interop.transaction", ledger.transaction(number))
    for replica in replicas:
        eventually(f"{master} knows that {replica} has all", partial(_is_acked, master, replica))
    master.snapshot()
    return first + 10


def _is_acked(master: Member, replica: Member) -> bool:
    return by_id(master.downstream(replica).get("vclock", {})) == master.vclock()
