"""`flowstone.follow` of a real server: the same data, only settled, across all faults of the server."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

import flowstone
from flowstone.iproto.msgpack import pack
from tests.conftest import FULL
from tests.interop import workload
from tests.interop.cluster import Cluster
from tests.interop.compare import contents
from tests.interop.member import RealMember, by_id, eventually
from tests.interop.workload import change, define

TRANSACTIONS = 100_000 if FULL else 2_000
FEW = 300
SECONDS = 600.0 if FULL else 60.0
SCHEMA_SPACES = 512
PATIENT_TIMEOUT = 10
"""`replication_timeout` for tests without a timeout on a busy machine."""

Content = dict[str, dict[bytes, bytes]]
"""Tuples by the name of their space and by their key."""


class Copy:
    """A copy of the data, built only from the initial data and the calls of on_change."""

    def __init__(self, replica: flowstone.BlockingReplica) -> None:
        self.tuples: Content = read(replica)
        replica.on_change(self.follow)

    def follow(self, changes: list[flowstone.SettledChange]) -> None:
        for one in changes:
            if one.space is None or (one.space_id or 0) < SCHEMA_SPACES:
                continue
            space = self.tuples.setdefault(one.space, {})
            if one.type in ("TRUNCATE", "DROP"):
                space.clear()
                continue
            assert one.key is not None
            key = pack(one.key)
            found = space.get(key)
            assert found == (one.old.raw if one.old is not None else None), one
            if one.new is None:
                del space[key]
            else:
                space[key] = one.new.raw

    def assert_is(self, replica: flowstone.BlockingReplica) -> None:
        kept = {name: space for name, space in self.tuples.items() if space}
        assert kept == {name: space for name, space in read(replica).items() if space}


def read(replica: flowstone.BlockingReplica) -> Content:
    """Return all tuples of all user spaces, by name and primary key."""
    found: Content = {}
    for number, _, name, *_ in replica.space("_space"):
        if number >= SCHEMA_SPACES and replica.space(number).indexes:
            parts = replica.space("_index").get((number, 0))["parts"]  # type: ignore[index]
            fields = [part["field"] if isinstance(part, dict) else part[0] for part in parts]
            space = found[name] = {}
            for one in replica.space(number):
                space[pack(tuple(one[field] for field in fields))] = one.raw
    return found


class Reading:
    """A replica, read as members are."""

    def __init__(self, replica: flowstone.BlockingReplica) -> None:
        self._replica = replica

    def tuples(self, space: int, index: int = 0) -> list[bytes]:
        return [one.raw for one in self._replica.space(space).index(index)]


def assert_equal(master: RealMember, replica: flowstone.BlockingReplica) -> None:
    """Compare everything that is replicated, by every index."""
    replica.wait_for(master.vclock(), timeout=SECONDS)
    wanted, found = list(contents(master)), list(contents(Reading(replica)))  # type: ignore[arg-type]
    assert [one.name for one in wanted] == [one.name for one in found]
    for there, here in zip(wanted, found, strict=True):
        assert here.tuples == there.tuples, there.name


def complaints(master: RealMember) -> list[str]:
    """Return the errors of the server's thread that feeds us; other threads may fail for other reasons."""
    return [line for line in master.log().splitlines() if " relay/" in line and (" E> " in line or " !> " in line)]


@pytest.fixture
def master(cluster: Cluster) -> RealMember:
    return cluster.real("master", checkpoint_count=1)


def test_follower_receives_every_kind_of_change(cluster: Cluster, master: RealMember) -> None:
    is_synchronous = define(master, cluster.binary.dialect)
    change(master, FEW, seed=1, is_synchronous=is_synchronous)
    master.configure(replication_timeout=PATIENT_TIMEOUT)
    with flowstone.follow(master.uri, replication_timeout=PATIENT_TIMEOUT) as replica:
        assert_equal(master, replica)
        copy = Copy(replica)
        change(master, TRANSACTIONS, seed=2, is_synchronous=is_synchronous)
        assert_equal(master, replica)
        copy.assert_is(replica)
        assert master.info()["replication_anon"]["count"] == 1
        assert complaints(master) == []


def test_follow_without_triggers_ends_with_the_same_data(cluster: Cluster, master: RealMember) -> None:
    is_synchronous = define(master, cluster.binary.dialect)
    with flowstone.follow(master.uri) as replica:
        change(master, FEW, seed=1, is_synchronous=is_synchronous)
        master.eval("for i = 1, 5000 do box.space.plain:replace{i, 'x', i, i, {a = i}} end")
        assert_equal(master, replica)


def test_follower_continues_after_restarts_and_kills_of_the_master(cluster: Cluster, master: RealMember) -> None:
    is_synchronous = define(master, cluster.binary.dialect)
    with flowstone.follow(master.uri, replication_timeout=0.5) as replica:
        copy = Copy(replica)
        resyncs: list[Any] = []
        replica.on_resync(lambda before, after: resyncs.append((before, after)))
        for seed in (1, 2, 3):
            change(master, FEW, seed=seed, is_synchronous=is_synchronous and seed == 1)
            if seed == 2:
                master.kill()
                master.start()
            elif not (is_synchronous and seed == 1):
                master.restart()
        change(master, FEW, seed=4)
        assert_equal(master, replica)
        copy.assert_is(replica)
        assert resyncs == []


def test_follower_continues_after_lost_connections(cluster: Cluster, master: RealMember) -> None:
    define(master, cluster.binary.dialect)
    wire = cluster.proxy(master)
    with flowstone.follow(wire.uri, replication_timeout=0.5) as replica:
        copy = Copy(replica)
        for seed in (1, 2, 3):
            change(master, FEW, seed=seed)
            wire.disconnect()
        assert_equal(master, replica)
        copy.assert_is(replica)


def test_replica_has_only_selected_spaces(cluster: Cluster, master: RealMember) -> None:
    define(master, cluster.binary.dialect)
    change(master, FEW, seed=1)
    with flowstone.follow(master.uri, spaces=["plain", "later"]) as replica:
        change(master, FEW, seed=2)
        master.eval("box.schema.space.create('later'):create_index('pk') box.space.later:insert{1}")
        replica.wait_for(master.vclock(), timeout=SECONDS)
        assert Reading(replica).tuples(workload.PLAIN) == master.tuples(workload.PLAIN)
        assert replica.space("later").get(1) == (1,)
        with pytest.raises(flowstone.TarantoolError, match="'pairs' is not followed"):
            replica.space("pairs")


# --- synchronous transactions ---


def _promote(cluster: Cluster, master: RealMember) -> None:
    """Synchronous transactions need an owner of the queue in newer servers."""
    if cluster.binary.dialect != "2.6":
        master.eval("box.ctl.promote()")
        master.wait_writable()
    master.eval("box.schema.space.create('sure', {is_sync = true}):create_index('pk')")
    master.eval("box.schema.space.create('loose'):create_index('pk')")


def _wait_until_held(replica: flowstone.BlockingReplica, count: int) -> None:
    eventually("it is held back", lambda: replica.info()["held"] >= count)


LATER = "require('fiber').create(function() box.space.{}:insert{{{}}} end)"


def test_synchronous_transaction_is_visible_and_delivered_when_confirmed(cluster: Cluster, master: RealMember) -> None:
    _promote(cluster, master)
    told: list[Any] = []
    with flowstone.follow(master.uri) as replica:
        replica.on_change(lambda changes: told.append([(one.space, one.new) for one in changes]))
        before = replica.vclock
        master.configure(replication_synchro_quorum=2, replication_synchro_timeout=600)
        for where, what in (("sure", 1), ("loose", 2)):
            master.eval(LATER.format(where, what))
        _wait_until_held(replica, 2)
        assert (told, replica.vclock, len(replica.space("sure"))) == ([], before, 0)
        # We have the row but do not acknowledge it: our ACK would complete the quorum.
        assert _acknowledged(master) == [before.to_mapping()]
        master.configure(replication_synchro_quorum=1)
        eventually("it is confirmed", lambda: len(replica.space("loose")) == 1)
        replica.wait_for(master.vclock(), timeout=SECONDS)
        assert told == [[("sure", (1,))], [("loose", (2,))]]


def _acknowledged(master: RealMember) -> list[dict[int, int]]:
    """Return what each of the master's anonymous replicas has acknowledged."""
    found = master.eval("return box.info.replication_anon()")
    return [by_id(one["downstream"]["vclock"]) for one in found.values()]


def test_rolled_back_synchronous_transaction_is_never_visible(cluster: Cluster, master: RealMember) -> None:
    _promote(cluster, master)
    told: list[Any] = []
    with flowstone.follow(master.uri) as replica:
        replica.on_change(lambda changes: told.extend((one.space, one.new) for one in changes))
        master.configure(replication_synchro_quorum=2, replication_synchro_timeout=600)
        # Both are written before the first times out: 2.6.0 rolls back a transaction in flight after its ROLLBACK row,
        # while its log, and thus every reader, has it confirmed with the next one.
        for number in (1, 2):
            master.eval(LATER.format("sure", number))
        _wait_until_held(replica, 2)
        master.configure(replication_synchro_timeout=0.01)
        eventually("it is rolled back", lambda: master.eval("return box.space.sure:count()") == 0)
        master.configure(replication_synchro_quorum=1)
        master.eval("box.space.sure:insert{3}")
        replica.wait_for(master.vclock(), timeout=SECONDS)
        assert told == [("sure", (3,))]
        assert replica.space("sure").select() == [(3,)]


# --- deleted logs ---


def _lose_logs(master: RealMember) -> None:
    for number in (1, 2, 3):
        change(master, FEW, seed=10 + number)
        master.snapshot()


def test_new_snapshot_is_fetched_when_the_logs_are_lost(cluster: Cluster, master: RealMember) -> None:
    define(master, cluster.binary.dialect)
    wire = cluster.proxy(master)
    with flowstone.follow(wire.uri, replication_timeout=0.5) as replica:
        resyncs: list[Any] = []
        replica.on_resync(lambda before, after: resyncs.append((before, after)))
        before = replica.vclock
        plain = replica.space("plain")
        assert len(plain) == 0
        wire.cut()
        if cluster.binary.version >= (3, 3, 0):  # this version keeps logs for anonymous replicas as well
            master.restart(wal_cleanup_delay=0, replication_anon_ttl=0.1)
        _lose_logs(master)
        wire.mend()
        assert_equal(master, replica)
        assert [one[0] for one in resyncs] == [before]
        assert len(plain) == len(master.tuples(workload.PLAIN))
        change(master, FEW, seed=20)
        assert_equal(master, replica)


def test_master_that_lost_its_tail_is_rejected_with_the_lost_rows(cluster: Cluster, master: RealMember) -> None:
    define(master, cluster.binary.dialect)
    master.stop()
    shutil.copytree(master.directory, cluster.directory / "copy")
    master.start()
    with flowstone.follow(master.uri, replication_timeout=0.5) as replica:
        have = master.vclock()[1]
        change(master, FEW, seed=1)
        replica.wait_for(master.vclock(), timeout=SECONDS)
        ours = replica.vclock.get(1)
        master.stop()
        for path in (*master.files("xlog"), *master.files("snap")):
            path.unlink()
        for path in (cluster.directory / "copy").iterdir():
            if path.suffix in (".xlog", ".snap"):
                shutil.copy(path, master.directory)
        master.start()
        with pytest.raises(flowstone.CannotFollow, match=f"has lost rows {have + 1}…{ours} of replica 1"):
            replica.wait_for({1: ours + 1}, timeout=SECONDS)


# --- bad input ---


def test_follower_reports_a_rejection_as_one_error(cluster: Cluster, master: RealMember) -> None:
    workload.run(master, [["call", "box.schema.user.create", ["nobody", {"password": "secret"}]]])
    password = "Incorrect password supplied for user 'replicator'"
    if cluster.binary.dialect != "2.6":
        password = "User not found or supplied credentials are invalid"
    for user, message in (
        ("replicator:wrong", password),
        (
            "nobody:secret",
            "Read access to universe '' is denied for user 'nobody'; grant the user the role 'replication'",
        ),
    ):
        uri = f"{user}@{master.address}"
        with pytest.raises(flowstone.CannotFollow, match=message), flowstone.follow(uri):
            pass
