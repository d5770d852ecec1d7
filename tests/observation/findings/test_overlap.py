"""Rows are distinguished from others with the same LSNs: compares the logs of a directory with those of live
members.
"""

from __future__ import annotations

import asyncio

from flowstone.iproto.uri import parse_uri
from flowstone.observation.findings.overlap import Overlap, overlap
from flowstone.observation.log_directory import look_into
from flowstone.observation.survey import Survey
from flowstone.outside import production
from tests.interop.cluster import Cluster
from tests.interop.member import SECONDS, Member, eventually
from tests.observation.situations import lose_rows, make, pair, write


def compared(stopped: Member, *members: Member | str) -> Overlap:
    """Compare the directory of one member with the answers of others, queried as guests or by URI."""
    uris = [parse_uri(one if isinstance(one, str) else one.address) for one in members]

    async def look() -> Overlap:
        outside = production()
        survey = Survey(outside, uris, timeout=SECONDS)
        try:
            (replica_set,) = await survey.look()
            asked = [(one, survey.asking(one).uri) for one in replica_set.members if one.report is not None]
            directory = look_into(outside, str(stopped.directory))
            return await overlap(outside, [directory], directory.end.without_zero(), asked)
        finally:
            await survey.close()

    return asyncio.run(look())


def test_overlap_of_a_follower_with_its_master_is_equal(cluster: Cluster) -> None:
    for kinds in (("real", "ours"), ("ours", "real")):
        master = make(cluster, kinds[0], f"master-{kinds[0]}")
        master.client.insert(272, "first")
        replica = make(cluster, kinds[1], f"replica-{kinds[1]}", replication=[master.uri])
        replica.wait_follow(master)
        for number in range(30):
            master.client.replace(272, f"key {number}")
        replica.catch_up(master)
        replica.stop()
        found = compared(replica, master)
        assert found.compared >= 30
        assert (found.unlike, found.unread) == ({}, ())


def test_rows_without_an_equal_copy_are_unlike(cluster: Cluster) -> None:
    master, replica = pair(cluster, "real", "ours")
    other = make(cluster, "ours", "other", replication=[replica.uri])
    other.wait_follow(replica)
    lose_rows(cluster, master, replica, 3, [100, 101])
    last = master.vclock()[1]
    assert replica.vclock()[1] == last + 1
    other.catch_up(replica)
    other.stop()
    found = compared(other, replica, master)
    assert found.compared >= 3
    assert found.unlike == {}, "the replica has them, whatever the master has"
    master.stop()
    found = compared(master, replica)
    assert found.unlike == {1: (last - 1, last)}


def test_rows_without_logs_are_not_compared(cluster: Cluster) -> None:
    master, replica = pair(cluster, "ours", "ours", checkpoint_count=1)
    replica.stop()
    oldest = min(path.name for path in master.files("xlog"))
    master.client.delete(320, 2)
    for number in range(3):
        write(master, [number])
        master.snapshot()
    eventually("the old logs go", lambda: oldest not in [path.name for path in master.files("xlog")])
    found = compared(replica, master)
    assert found.compared == 0
    (line,) = found.unread
    assert line.startswith(f"{master.address} no longer has logs of these rows")
