"""`flowstone snapshot`: real servers and nodes write one, and a failing one does not stop the others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests import real_tarantool
from tests.cli.conftest import Command
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.versions import fits
from tests.node.fake_server import answering, peer, refusal
from tests.real_tarantool import free_port


@fits("2.6")
def test_snapshots_are_written_one_at_a_time(cluster: Cluster, flowstone: Command) -> None:
    members = [cluster.real("real"), cluster.ours("ours")]
    before = [len(member.files("snap")) for member in members]
    nobody = f"127.0.0.1:{free_port()}"
    found = flowstone("snapshot", "--yes", "--json", members[0].address, nobody, members[1].address)
    assert found.code == 1
    first, missing, second = json.loads(found.text)["snapshots"]
    for shown, member, count in zip((first, second), members, before, strict=True):
        assert (shown["address"], shown["error"]) == (member.address, None)
        assert shown["vclock"] == {str(number): lsn for number, lsn in member.vclock().items()}
        assert len(member.files("snap")) == count + 1
    assert missing["vclock"] is None
    assert "connection refused" in missing["error"]

    again = flowstone("snapshot", "--yes", members[1].address)
    assert (again.code, again.errors) == (0, [])
    assert again.text.startswith(f"{members[1].address} wrote a snapshot at {{1: ")

    refused = flowstone("snapshot", members[1].address)
    assert (refused.code, refused.text) == (2, "")


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("data/5.snap: No space left on device", "free space in its snapshot directory (memtx_dir)"),
        ("data/5.snap: Input/output error", "see its log"),
    ],
)
async def test_system_error_has_advice_and_no_generic_code(flowstone: Command, message: str, advice: str) -> None:
    async with peer(answering(lambda request: refusal(0, message), (2, 6, 0))) as address:
        found = await asyncio.to_thread(flowstone, "snapshot", "--yes", address)
    assert (found.code, found.text) == (1, "")
    assert found.errors == [f"flowstone: snapshot failed at {address}: {message}; {advice}"]


@not_for_stand_ins
def test_timeout_names_the_server_with_possible_causes(nodes: Cluster, flowstone: Command) -> None:
    node = nodes.ours("a")
    node.pause()
    try:
        asked = flowstone("promote", "--yes", node.address)
        wanted = flowstone("snapshot", "--yes", node.address)
    finally:
        node.resume()
    for found, reason in ((asked, f"{node.address} did not answer within 3 s"), (wanted, ": no answer within 3 s")):
        assert found.code == 1
        (line,) = found.errors
        assert node.address in line
        assert reason in line
        assert "its process may hang: check that it is running, and check its log" in line


ONLY_SNAPSHOTS = """
box.schema.user.create('backup', {password = 'secret'})
box.schema.func.create('box.snapshot')
box.schema.user.grant('backup', 'execute', 'function', 'box.snapshot')
"""


def test_written_snapshot_is_reported_without_the_privilege_to_query_its_position(
    tarantool: object, tmp_path: Path, flowstone: Command
) -> None:
    with real_tarantool.serve(tmp_path, setup=ONLY_SNAPSHOTS) as server:
        before = len(list(tmp_path.glob("*.snap")))
        found = flowstone("snapshot", "--yes", f"backup:secret@{server.uri}")
        assert len(list(tmp_path.glob("*.snap"))) == before + 1
        assert (found.code, found.errors) == (0, [])
        assert found.text.startswith(f"{server.uri} wrote a snapshot in ")
        told = flowstone("snapshot", "--yes", "--json", f"backup:secret@{server.uri}")
        assert [(each["vclock"], each["error"]) for each in json.loads(told.text)["snapshots"]] == [(None, None)]


@pytest.mark.parametrize("answer", ["7", "{}", "{checkpoints = {}}", "{checkpoints = {{}}}", "{checkpoints = {1}}"])
def test_written_snapshot_is_reported_despite_an_invalid_position(
    tarantool: object, tmp_path: Path, flowstone: Command, answer: str
) -> None:
    setup = f"rawset(box.info, 'gc', function() return {answer} end)"
    with real_tarantool.serve(tmp_path, setup=setup) as server:
        found = flowstone("snapshot", "--yes", server.uri)
        assert (found.code, found.errors) == (0, [])
        assert found.text.startswith(f"{server.uri} wrote a snapshot in ")
