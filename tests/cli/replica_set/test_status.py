"""`flowstone status` on real servers and nodes: tables, JSON, live output, and the exit code for scripts."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from typing import IO, Any

from flowstone.cli import run
from tests.cli.conftest import Command
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.member import Member, eventually
from tests.interop.mesh import Mesh, election
from tests.interop.versions import fits
from tests.places import ROOT
from tests.real_tarantool import free_port

COMMAND = (sys.executable, "-m", "flowstone.cli", "status")


@fits("2.6")
def test_status_of_real_servers_and_a_node(cluster: Cluster, flowstone: Command) -> None:
    patient: dict[str, Any] = {"replication_timeout": 2}  # no member may be considered dead while the machine is busy
    master = cluster.real("master", **patient)
    node = cluster.ours("node", replication=[master.uri], **patient)
    replica = cluster.real("replica", replication=[master.uri], read_only=True, **patient)
    node.catch_up(master)
    replica.configure(replication=[master.uri, node.uri])
    node.wait_follow(master)
    replica.wait_follow(master, node)
    for member in (node, replica):
        member.catch_up(master)
    found = flowstone("status", replica.address)
    assert (found.code, found.errors) == (0, [])
    rows = [line.split() for line in found.text.splitlines()]
    assert ["•", "1", master.address, "rw", "master", *_vclock(master)] in rows
    assert ["•", "3", replica.address, "read", "replica", "config", *_vclock(replica)] in rows
    assert [node.address, master.address, "follow"] in [row[:3] for row in rows]
    assert "  Master:   multi" in found.text.splitlines()

    node.kill()
    found = flowstone("status", replica.address)
    assert found.code == 1
    assert f"  ! {node.address} is unreachable: connection refused" in found.text.splitlines()
    assert found.text.splitlines()[-1] == f"Run flowstone explain {replica.address} for causes and advice."


def _vclock(member: Member) -> list[str]:
    return str(member.vclock()).split()


@not_for_stand_ins
def test_status_of_nodes_with_elections_as_json_and_live(nodes: Cluster, flowstone: Command) -> None:
    mesh = Mesh(nodes, ("ours",) * 3, direct=True, replication_timeout=1.5)  # no member may be considered dead
    mesh.set_modes("candidate")
    leader = mesh.wait_leader()
    mesh.wait_same(leader)
    for member in mesh:
        member.wait_follow(*mesh.others(member))
    others = [one for one in mesh if one is not leader]
    found = flowstone("status", "--json", others[0].address)
    assert (found.code, found.errors) == (0, [])
    shown = json.loads(found.text)
    (one,) = shown["replicasets"]
    assert (shown["is_healthy"], one["complaints"], one["failover"], one["master"]) == (True, [], "election", "single")
    assert one["leader"] == leader.id
    assert one["queue"]["owner"] == leader.id
    assert {member["address"]: member["role"] for member in one["members"]} == {
        leader.address: "leader",
        others[0].address: "follower",
        others[1].address: "follower",
    }
    assert {member["why_read_only"] for member in one["members"]} == {None, "election"}
    assert [link["lag_lsn"] for link in one["links"]] == [0] * 6
    _check_documented(one, one["members"][0], one["links"][0], one["queue"])
    _check_json_lines(others[0])
    _check_screen(others[0])


@not_for_stand_ins
def test_leader_lost_with_the_quorum_is_not_shown_as_leader(nodes: Cluster, flowstone: Command) -> None:
    """The remaining member reports it forever: it cannot start a new term."""
    mesh = Mesh(nodes, ("ours",) * 2, direct=True)
    mesh.set_modes("candidate")
    leader = mesh.wait_leader()
    (survivor,) = mesh.others(leader)
    number = leader.id
    leader.kill()
    eventually("it is missed", lambda: survivor.upstream(number)["status"] == "disconnected")
    shown = json.loads(flowstone("status", "--json", survivor.address).text)
    (one,) = shown["replicasets"]
    assert (one["leader"], one["failover"]) == (0, "election")
    assert not any(member["is_leader"] for member in one["members"])
    assert f"no leader in term {one['term']}" in one["complaints"]
    assert "no leader" in flowstone("status", survivor.address).text
    assert election(survivor)["leader"] == number


def _check_documented(*tables: dict[str, object]) -> None:
    """Check that the reference documents every key."""
    page = (ROOT / "docs/reference/json-output.md").read_text()
    _, _, section = page.partition("## `flowstone status --json`")
    documented = set(re.findall(r"`(\w+)`", section.partition("\n## ")[0]))
    assert {key for table in tables for key in table} <= documented


def _check_json_lines(member: Member) -> None:
    command = [*COMMAND, "--watch", "--interval=0.1", "--json", member.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")
    assert all(look["is_healthy"] for look in looks)


def _check_screen(member: Member) -> None:
    """Check that tables are updated in place on a terminal, and that Ctrl-C ends the command."""
    assert member.address.encode() in _watched(member.address)


def _watched(address: str, *, lines: int = 25) -> bytes:
    """Return the output to a terminal between two updates."""
    screen, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": str(lines)}
    command = [*COMMAND, "--watch", "--interval=0.1", address]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        with open(screen, "rb", buffering=0) as shown:
            seen = _read_until(shown, b"\x1b[1A")  # cursor up, to overwrite the previous output
            process.send_signal(signal.SIGINT)
            _read_until(shown, None)
        assert process.wait(30) == 0
    return seen


def test_lines_beyond_the_terminal_height_are_counted(flowstone: Command) -> None:
    address = f"127.0.0.1:{free_port()}"
    needed = len(flowstone("status", address).text.splitlines())
    assert f"… {needed - 4} more lines; enlarge the terminal, ".encode() in _watched(address, lines=5)


def _read_until(screen: IO[bytes], text: bytes | None) -> bytes:
    seen = b""
    while text is None or text not in seen:
        try:
            data = screen.read(4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    return seen


def test_exit_code_is_1_when_no_server_answers(flowstone: Command) -> None:
    port = free_port()
    found = flowstone("status", f"127.0.0.1:{port}")
    assert found.code == 1
    assert f"  ! 127.0.0.1:{port} is unreachable: connection refused" in found.text.splitlines()
    assert "  Queue:    unknown" in found.text.splitlines()


@fits("2.6")
def test_missing_rights_are_reported_without_the_password(cluster: Cluster, flowstone: Command) -> None:
    member = cluster.real("a")
    found = flowstone("status", "-u", "replicator", "-p", "secret", "--json", member.address)
    assert found.code == 1
    (one,) = json.loads(found.text)["replicasets"]
    (lost,) = one["members"]
    assert lost["unreachable"]["is_denied"]
    assert "grant('replicator'" in lost["unreachable"]["hint"]
    assert "secret" not in found.text


def test_interval_without_watch_is_a_usage_error(flowstone: Command) -> None:
    found = flowstone("status", "--interval=1", f"127.0.0.1:{free_port()}")
    assert (found.code, found.text) == (2, "")
    assert found.errors == ["flowstone: --interval requires --watch; add --watch, or omit --interval"]


def test_invalid_uri_is_a_usage_error() -> None:
    assert run(["status", "no address"]) == 2
    assert run(["status"]) == 2
