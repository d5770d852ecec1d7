"""`flowstone promote` and `demote`: manual leaders, and servers without promotion."""

from __future__ import annotations

import json
import sys
from typing import Any, cast

import pytest

from flowstone.cli.replica_set.promote import promoted
from flowstone.observation.query import Asking
from flowstone.observation.report import Report
from tests.cli.conftest import Command, Terminal
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.mesh import Mesh, election, queue
from tests.interop.versions import fits
from tests.observation.reports import report
from tests.real_tarantool import free_port


@not_for_stand_ins
def test_member_leads_after_promote_and_not_after_demote(
    nodes: Cluster, flowstone: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is, no member is considered dead, and no election is repeated.
    mesh = Mesh(nodes, ("ours",) * 2, direct=True, replication_timeout=5, election_timeout=60)
    mesh.set_modes("manual")
    one, two = mesh.members
    assert flowstone("promote", "--yes", one.address).text == f"{one.address} leads in term 2\n"
    assert mesh.wait_leader() is one

    again = flowstone("promote", one.address)
    assert (again.code, again.text) == (0, f"{one.address} leads in term 2; nothing to do\n")

    shown = json.loads(flowstone("promote", "--yes", "--json", two.address).text)
    assert (shown["id"], shown["leader"], shown["queue_owner"]) == (two.id, two.id, two.id)
    assert (shown["is_changed"], shown["is_leader"], shown["term"]) == (True, True, election(two)["term"])
    assert mesh.wait_leader() is two
    mesh.wait_same(two)  # otherwise the prompt lists the rows that the other member lacks

    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    refused = flowstone("promote", one.address)
    assert (refused.code, refused.text) == (130, "")
    assert refused.errors == [f"promote {one.address} in place of {two.address}? (y/N) flowstone: nothing was changed"]
    assert mesh.wait_leader() is two

    found = flowstone("demote", "--yes", two.address)
    assert found.code == 0
    assert found.text.startswith(f"{two.address} does not lead in term ")
    assert election(two)["state"] != "leader"


class _Elected:
    """An elected member that claims the queue after a while."""

    def __init__(self, *queues: dict[str, int]) -> None:
        self._queues = iter(queues)

    async def report(self) -> Report:
        info: dict[str, Any] = {"election": {"state": "leader", "term": 3, "leader": 1}, "pid": 1}
        return report(1, {1: 5}, synchro={"queue": next(self._queues)}, **info)


async def test_leader_is_shown_when_it_owns_the_queue() -> None:
    old, new = ({"owner": owner, "len": 0, "term": term} for owner, term in ((2, 2), (1, 3)))
    shown = await promoted(cast(Asking, _Elected(old, old, new)))
    assert shown.queue is not None
    assert (shown.queue.owner, shown.queue.term) == (1, 3)


@not_for_stand_ins
def test_promote_without_elections_changes_the_owner_of_the_queue(nodes: Cluster, flowstone: Command) -> None:
    node = nodes.ours("a")
    assert flowstone("demote", node.address).text.endswith("; nothing to do\n")
    assert flowstone("promote", "--yes", node.address).code == 0
    assert queue(node)["owner"] == 1
    assert flowstone("demote", "--yes", node.address).code == 0
    assert queue(node)["owner"] == 0


@not_for_stand_ins
@pytest.mark.parametrize("why", ["orphan", "config"])
def test_promotion_without_effect_is_a_failure_with_a_reason(nodes: Cluster, flowstone: Command, why: str) -> None:
    node = nodes.ours("a")
    nobody = f"replicator:secret@127.0.0.1:{free_port()}"
    if why == "orphan":
        node.restart(replication=[nobody], replication_connect_timeout=0.5)
    else:
        node.restart(read_only=True)
    advice = {"orphan": "start the upstreams that it waits for", "config": "read_only=false`"}[why]
    for is_changed in (True, False):  # the member becomes the owner of the queue, but stays read-only
        found = flowstone("promote", "--yes", "--json", node.address)
        shown = json.loads(found.text)
        assert (found.code, shown["is_changed"], shown["is_leader"]) == (1, is_changed, False)
        assert shown["queue_owner"] == node.id
        (line,) = found.errors
        state = f"{node.address} does not lead in term {shown['term']}, although it owns the synchronous queue"
        assert line.startswith(f"flowstone: {state}: it is read-only ({why}); ")
        assert advice in line
    plain = flowstone("promote", "--yes", node.address)
    assert (plain.code, plain.text, plain.errors) == (1, "", [line])


@not_for_stand_ins
def test_server_outside_the_set_is_not_promoted(nodes: Cluster, flowstone: Command) -> None:
    master = nodes.ours("a")
    anonymous = nodes.ours("b", replication=[master.uri], replication_anon=True, read_only=True)
    found = flowstone("promote", "--yes", anonymous.address)
    assert (found.code, found.text) == (1, "")
    why = "not a member of its replica set (expelled, or an anonymous replica)"
    assert found.errors == [f"flowstone: {anonymous.address} cannot lead: {why}; promote a member"]


@not_for_stand_ins
def test_promote_changes_nothing_without_a_reachable_member(nodes: Cluster, flowstone: Command) -> None:
    node = nodes.ours("a")
    found = flowstone("promote", node.address)
    assert (found.code, found.text) == (2, "")
    assert found.errors == ["flowstone: stdin is not a terminal; use --yes to skip the confirmation"]
    assert queue(node)["owner"] == 0


@fits("2.6")
def test_promote_reports_that_2_6_lacks_promotion(cluster: Cluster, flowstone: Command) -> None:
    real, node = cluster.real("real"), cluster.ours("node")
    for action in ("promote", "demote"):
        for member, package in ((real, "Tarantool"), (node, "Flowstone")):
            found = flowstone(action, "--yes", member.address)
            assert found.code == 1
            (line,) = found.errors
            assert line.startswith(f"flowstone: {member.address} cannot {action}: {package} 2.6.0")
            assert "box.ctl.clear_synchro_queue()" in line
