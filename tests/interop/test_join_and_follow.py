"""A node and real servers in one replica set join each other, and all have the same data at the end."""

from __future__ import annotations

import shutil
from threading import Thread

from tests.conftest import FULL
from tests.interop import workload
from tests.interop.cluster import IS_OURS_REAL, LATE, Cluster
from tests.interop.compare import assert_converged, assert_same_data, assert_same_log, assert_same_vclock, oldest_lsn
from tests.interop.member import Member, RealMember, eventually, wait_ready
from tests.interop.versions import ANY, fits
from tests.interop.workload import Workload, change, define

TRANSACTIONS = 100_000 if FULL else 3_000
FEW = 300
CATCH_UP_SECONDS = 600.0 if FULL else 60.0


def test_node_joins_a_real_master_and_follows_every_kind_of_change(cluster: Cluster) -> None:
    master = cluster.real("master")
    is_synchronous = define(master, cluster.binary.dialect)
    change(master, FEW, seed=1, is_synchronous=is_synchronous)
    replica = cluster.ours("replica", replication=[master.uri], read_only=True)
    replica.wait_follow(master)
    change(master, TRANSACTIONS, seed=2, is_synchronous=is_synchronous)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    assert_same_log(master, replica, origins=[1])
    if not (IS_OURS_REAL and is_synchronous):  # a real 2.6 cannot recover synchronous spaces from a snapshot
        replica.restart()
    change(master, FEW, seed=3, is_synchronous=is_synchronous)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)


def test_anonymous_node_follows_a_real_master_and_registers_while_running(cluster: Cluster) -> None:
    master = cluster.real("master")
    is_synchronous = define(master, cluster.binary.dialect)
    change(master, FEW, seed=1, is_synchronous=is_synchronous)
    replica = cluster.ours("replica", replication=[master.uri], replication_anon=True, read_only=True)
    replica.wait_follow(master)
    change(master, TRANSACTIONS, seed=2, is_synchronous=is_synchronous)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    assert replica.id == 0
    eventually("the master counts it", lambda: master.info()["replication_anon"]["count"] == 1)
    replica.configure(replication_anon=False)
    assert replica.id == 2
    replica.configure(read_only=False)
    change(master, FEW, seed=3, is_synchronous=is_synchronous)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    assert_same_log(master, replica, origins=[1])
    master.configure(replication=[replica.uri])
    master.wait_follow(replica)
    replica.client.replace(workload.PLAIN, 10**6, "mine", 1, 1)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    assert master.vclock()[2] == 1


def test_real_server_joins_a_node_and_follows_every_kind_of_change(cluster: Cluster) -> None:
    master = cluster.ours("master")
    is_synchronous = define(master, cluster.binary.dialect)
    change(master, FEW, seed=1, is_synchronous=is_synchronous)
    replica = cluster.real("replica", replication=[master.uri], read_only=True)
    replica.wait_follow(master)
    change(master, TRANSACTIONS, seed=2, is_synchronous=is_synchronous)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    assert_same_log(master, replica, origins=[1])


def test_real_replica_of_a_node_reconnects_after_a_restart_of_either(cluster: Cluster) -> None:
    master = cluster.ours("master")
    is_synchronous = define(master, cluster.binary.dialect)
    replica = cluster.real("replica", replication=[master.uri], read_only=True)
    replica.stop()
    change(master, FEW, seed=2, is_synchronous=is_synchronous)
    replica.start()
    replica.wait_follow(master)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    master.restart()
    change(master, FEW, seed=3, is_synchronous=is_synchronous)
    replica.wait_follow(master)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    replica.kill()
    change(master, FEW, seed=4, is_synchronous=is_synchronous)
    master.kill()
    master.start()
    replica.start()
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    assert_same_log(master, replica, origins=[1])


def _lose_logs(master: Member, replica: Member) -> None:
    """Restart the master so that it deletes the logs that a disconnected replica needs."""
    has = replica.vclock()[1]
    replica.stop()
    master.restart(checkpoint_count=1, **_no_delay(master))
    for seed in (5, 6):
        change(master, FEW, seed=seed)
        master.snapshot()
    eventually("logs are collected", lambda: (oldest_lsn(master) or has + 1) > has)


def _no_delay(master: Member) -> dict[str, float]:
    """Real servers except 2.6 keep logs for members that have not returned, unless configured otherwise."""
    knows_no_delay = isinstance(master, RealMember) and master.info()["version"].startswith("2.6")
    return {} if knows_no_delay else {"wal_cleanup_delay": 0}


def _lose_logs_and_join_anew(master: Member, replica: Member) -> None:
    uuid = replica.uuid
    _lose_logs(master, replica)
    replica.start()
    replica.wait_follow(master)
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)
    assert (replica.uuid, replica.id) == (uuid, 2)


@fits("<3.0" if IS_OURS_REAL else ANY)  # newer masters never forget the replicas for which they keep logs
def test_real_replica_without_its_logs_rejoins_a_node(cluster: Cluster) -> None:
    master = cluster.ours("master")
    define(master, cluster.binary.dialect)
    replica = cluster.real("replica", replication=[master.uri])
    _lose_logs_and_join_anew(master, replica)
    assert "rebootstrap" in replica.log()


@fits("<3.0")
def test_node_without_its_logs_rejoins_a_real_master(cluster: Cluster) -> None:
    master = cluster.real("master")
    define(master, cluster.binary.dialect)
    replica = cluster.ours("replica", replication=[master.uri])
    _lose_logs_and_join_anew(master, replica)


def test_chain_from_a_real_server_by_a_node_to_a_real_server(cluster: Cluster) -> None:
    first = cluster.real("first")
    is_synchronous = define(first, cluster.binary.dialect)
    change(first, FEW, seed=1, is_synchronous=is_synchronous)
    middle = cluster.ours("middle", replication=[first.uri])
    last = cluster.real("last", replication=[middle.uri])
    last.wait_follow(middle)
    change(first, TRANSACTIONS // 3, seed=2, is_synchronous=is_synchronous)
    last.catch_up(first, middle, seconds=CATCH_UP_SECONDS)
    assert_same_vclock(middle, last)
    assert_same_data(middle, last)
    assert_same_data(first, last, besides=["_cluster"])  # the middle member registered the last one
    assert_same_log(first, middle, origins=[1])
    assert_same_log(middle, last, origins=[1])
    last.wait_follow(middle)
    assert not last.upstream(1)


def test_mesh_of_two_real_servers_and_a_node_converges_while_all_write(cluster: Cluster) -> None:
    members: list[Member] = [
        cluster.real("one", start=False),
        cluster.ours("two", start=False, dialect=cluster.binary.dialect),
        cluster.real("three", start=False),
    ]
    everybody = [member.uri for member in members]
    for member in members:
        member.options["replication"] = everybody
        member.launch(**LATE)
    wait_ready(*members)
    members[0].wait_writable()
    workload.run(members[0], workload.definitions(is_synchronous=False))
    for member in members:
        member.wait_writable()
        member.catch_up(members[0])
    _write_on_all(members, TRANSACTIONS // 3)
    assert_converged(*members, seconds=CATCH_UP_SECONDS)
    for other in members[1:]:
        assert_same_log(members[0], other, origins=[1, 2, 3])


def _write_on_all(members: list[Member], count: int) -> None:
    problems: list[BaseException] = []

    def write(number: int, member: Member) -> None:
        steps = Workload(7, writer=number, has_definitions=False).steps(count)
        try:
            workload.run(member, steps)
        except BaseException as error:
            problems.append(error)

    threads = [Thread(target=write, args=pair) for pair in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_node_starts_from_files_of_a_real_replica_and_the_replica_from_those_of_the_node(cluster: Cluster) -> None:
    master = cluster.real("master")
    is_synchronous = define(master, cluster.binary.dialect)
    replica = cluster.real("replica", replication=[master.uri], read_only=True)
    change(master, FEW, seed=1, is_synchronous=is_synchronous)
    replica.catch_up(master)
    replica.stop()
    ours = cluster.ours("ours", start=False, replication=[master.uri], read_only=True)
    _move_files(replica, ours)
    change(master, FEW, seed=2, is_synchronous=is_synchronous)
    ours.start()
    ours.wait_follow(master)
    assert_converged(master, ours)
    assert ours.id == 2
    ours.stop()
    _move_files(ours, replica)
    change(master, FEW, seed=3, is_synchronous=is_synchronous)
    replica.start()
    assert_converged(master, replica, seconds=CATCH_UP_SECONDS)


def _move_files(source: Member, target: Member) -> None:
    for suffix in ("snap", "xlog"):
        for path in source.files(suffix):
            shutil.move(path, target.directory / path.name)
