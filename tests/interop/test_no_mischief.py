"""A node disturbs a real server no more than a real member does: no error in its log, no timeout, no orphan."""

from __future__ import annotations

import re
from functools import partial

from tests.interop import ledger, workload
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged
from tests.interop.ledger import Scribe
from tests.interop.member import Member, eventually
from tests.interop.workload import Workload

ERROR_LINE = re.compile(r"^\d{4}-\d\d-\d\d .* (?:[EF]|!)> (.*)$")
GOODBYE = re.compile("unexpected EOF when reading from socket|Relay to .* disconnected")
"""A real master's log lines when a replica leaves, even a real one that is stopped; 3.x in two lines."""
TIMEOUT = 1.25
"""`replication_timeout`: on a busy machine a delay of some seconds must not cause a timeout."""


def _errors(member: Member, since: int = 0) -> list[str]:
    lines = member.log()[since:].splitlines()
    return [match.group(1) for match in map(ERROR_LINE.match, lines) if match is not None]


def _assert_only_goodbyes(master: Member, count: int) -> None:
    errors = _errors(master)
    assert all(map(GOODBYE.search, errors)), errors
    assert len(errors) <= 2 * count, errors


def _wait_left(master: Member, replica: Member | int) -> None:
    """Wait until the master has noticed the disconnect: a replica that returns earlier is connected twice."""
    eventually("the master notices", lambda: master.downstream(replica).get("status") == "stopped")


def _wait_heartbeats(master: Member, replica: Member, count: int) -> None:
    """Wait until the replica has answered this number of heartbeats, as seen in its idle time."""
    idle = [0.0]

    def are_enough() -> bool:
        downstream = master.downstream(replica)
        if not downstream:
            return False  # the replica has just been registered
        assert downstream["status"] == "follow", downstream
        if downstream["idle"] < idle[-1]:
            idle.append(0.0)
        idle[-1] = downstream["idle"]
        return len(idle) > count

    eventually(f"{replica} answers heartbeats", are_enough)


def test_node_causes_no_error_in_the_log_of_a_real_master(cluster: Cluster) -> None:
    master = cluster.real("master", replication_timeout=TIMEOUT)
    ledger.define(master)
    replica = cluster.ours("replica", replication=[master.uri], replication_timeout=TIMEOUT, read_only=True)
    with Scribe(master) as scribe:
        eventually("the scribe writes", lambda: len(scribe.answered) > 200)
    assert_converged(master, replica)
    _wait_heartbeats(master, replica, 6)
    assert _errors(master) == []
    replica.configure(replication=[])
    _wait_left(master, replica)
    replica.configure(replication=[master.uri])
    replica.wait_follow(master)
    number = replica.id
    replica.stop()
    _wait_left(master, number)
    replica.start()
    replica.wait_follow(master)
    replica.stop()
    _assert_only_goodbyes(master, 3)


def test_anonymous_node_causes_no_error_in_the_log_of_a_real_master(cluster: Cluster) -> None:
    master = cluster.real("master", replication_timeout=TIMEOUT)
    ledger.define(master)
    replica = cluster.ours("replica", start=False, replication=[master.uri], replication_timeout=TIMEOUT)
    replica.start(read_only=True, replication_anon=True)
    with Scribe(master) as scribe:
        eventually("the scribe writes", lambda: len(scribe.answered) > 200)
    assert_converged(master, replica)
    replica.configure(replication_anon=False)
    _wait_heartbeats(master, replica, 4)
    replica.stop()
    _assert_only_goodbyes(master, 2)


def test_busy_node_does_not_time_out(cluster: Cluster) -> None:
    """Changes that take long to apply delay its heartbeats only for a moment."""
    master = cluster.real("master", replication_timeout=TIMEOUT)
    is_synchronous = workload.define(master, cluster.binary.dialect)
    replica = cluster.ours("replica", replication=[master.uri], replication_timeout=TIMEOUT, read_only=True)
    replica.wait_follow(master)
    replica.stop()
    workload.run(master, Workload(1, is_synchronous=is_synchronous).steps(4000))
    mark = len(master.log())
    replica.start()
    assert_converged(master, replica)
    assert _errors(master, mark) == []
    eventually("the master has its answer", partial(_is_following, master, replica))


def _is_following(master: Member, replica: Member) -> bool:
    return master.downstream(replica).get("status") == "follow"
