"""`flowstone rebootstrap`: a stopped member rejoins with its identity, and no row without another copy is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.interop.cluster import Cluster
from tests.interop.member import Member
from tests.interop.versions import fits
from tests.observation.situations import lose_rows, pair

LOOKER = """
box.session.su('admin', function()
    box.schema.user.create('looker', {password = 'x'})
    box.schema.user.grant('looker', 'execute', 'universe')
end)
"""
"""A user with the right to query everything, but not to read the log."""


def data(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".snap", ".xlog"))


def write(member: Member, key: int) -> None:
    member.client.replace(512, key)


@fits("2.6")
def test_members_rejoin_with_their_ids_once_their_rows_are_found_elsewhere(
    cluster: Cluster, flowstone: Command
) -> None:
    master = cluster.real("master")
    master.eval("box.schema.space.create('s', {id = 512}):create_index('pk')")
    for replica in (cluster.ours("ours", replication=[master.uri]), cluster.real("real", replication=[master.uri])):
        replica.wait_follow(master)
        master.configure(replication=[replica.uri])
        replica.wait_writable()
        write(replica, 10 * replica.id)
        master.catch_up(replica)
        replica.catch_up(master)  # the position at which it is stopped
        number, uuid, position = replica.id, replica.uuid, replica.vclock()

        running = flowstone("rebootstrap", "--yes", replica.directory, master.address)
        assert (running.code, running.text) == (1, "")
        assert running.errors == [f"flowstone: an instance is running in {replica.directory}; stop it first"]

        replica.stop()
        files = data(replica.directory)
        unasked = flowstone("rebootstrap", f"{replica.directory}/.", "--wal-dir", replica.directory, master.address)
        assert (unasked.code, data(replica.directory)) == (2, files)

        found = flowstone("rebootstrap", "--yes", "--json", replica.directory, master.address)
        assert found.code == 0, found.errors
        shown = json.loads(found.text)
        assert (shown["instance_uuid"], shown["id"], shown["lost"], shown["unlike"]) == (uuid, number, {}, {})
        compared = shown["compared"]
        assert compared > 0
        same = f"rows have the same LSNs as at {master.address}; the newest {compared} were compared and are equal"
        assert f"flowstone: {same}" in found.errors
        assert shown["vclock"] == {str(one): lsn for one, lsn in position.items()}
        (aside,) = shown["kept_in"]
        assert (data(replica.directory), data(Path(aside))) == ([], files)

        replica.start(instance_uuid=uuid)
        replica.catch_up(master)
        assert (replica.id, replica.uuid, replica.count(512)) == (number, uuid, master.count(512))


@fits("2.6")
def test_rows_without_another_copy_are_listed_and_deleted_only_by_force(cluster: Cluster, flowstone: Command) -> None:
    master = cluster.real("master")
    master.eval("box.schema.space.create('s', {id = 512}):create_index('pk')")
    replica = cluster.ours("replica", replication=[master.uri])
    replica.catch_up(master)
    replica.wait_writable()
    for key in range(3):
        write(replica, key)
    replica.stop()
    refused = flowstone("rebootstrap", "--yes", replica.directory, master.address)
    assert (refused.code, refused.text) == (1, "")
    (line,) = refused.errors
    assert f"has rows that are missing at {master.address}: 3 rows, 1..3 of replica 2" in line
    assert f"flowstone cat --show-system --replica 2 --from 1 {replica.directory}" in line
    assert data(replica.directory)

    found = flowstone("rebootstrap", "--yes", "--force", "--delete", replica.directory, master.address)
    assert found.code == 0
    assert "flowstone: LOST: 3 rows, 1..3 of replica 2" in found.errors
    assert data(replica.directory) == []
    assert not list(replica.directory.glob("before-rebootstrap-*"))
    assert found.text.startswith(f"deleted the snapshots and logs of {replica.directory}\n")


@fits("2.6")
@pytest.mark.parametrize("kind", ["real", "ours"])
def test_rows_with_conflicting_lsns_are_listed_and_deleted_only_by_force(
    cluster: Cluster, flowstone: Command, kind: str
) -> None:
    """According to the vclocks, the other member has all of them."""
    master, replica = pair(cluster, kind, "ours")
    lose_rows(cluster, master, replica, 3, [100])
    number = master.vclock()[1]
    assert number < replica.vclock()[1]
    master.stop()
    options = ("--yes", "--delete", master.directory, replica.address)
    refused = flowstone("rebootstrap", *options)
    assert (refused.code, refused.text) == (1, "")
    (line,) = refused.errors
    assert f"has rows whose LSNs belong to different rows at {replica.address}: 1 row, {number} of replica 1" in line
    assert f"`flowstone cat --show-system --replica 1 --from {number} {master.directory}` prints them" in line
    saved = flowstone("cat", "--show-system", "--replica", "1", "--from", number, master.directory)
    assert "written since" in saved.text

    found = flowstone("rebootstrap", "--force", *options)
    assert found.code == 0
    lost = f"flowstone: LOST: 1 row, {number} of replica 1, whose LSNs belong to different rows at {replica.address}"
    assert lost in found.errors
    assert data(master.directory) == []


@fits("2.6")
def test_rows_matched_only_by_lsn_are_listed_and_deleted_only_by_force(cluster: Cluster, flowstone: Command) -> None:
    master = cluster.real("master")
    master.eval("box.schema.space.create('s', {id = 512}):create_index('pk')")
    master.eval(LOOKER)
    replica = cluster.ours("replica", replication=[master.uri])
    replica.catch_up(master)
    write(master, 1)
    replica.catch_up(master)
    replica.stop()
    options = ("--yes", "-u", "looker", "-p", "x", replica.directory, master.address)
    refused = flowstone("rebootstrap", "--delete", *options)
    assert refused.code == 1
    assert "but were not compared" in refused.errors[0]
    assert "is denied for user 'looker'" in refused.errors[0]
    assert data(replica.directory)

    found = flowstone("rebootstrap", *options)
    assert found.code == 0, found.errors
    assert f"rows have the same LSNs as at {master.address}, but were not compared" in "\n".join(found.errors)


@fits("2.6")
def test_logs_and_vinyl_files_in_separate_directories_are_deleted_with_the_snapshots(
    cluster: Cluster, flowstone: Command, tmp_path: Path
) -> None:
    master = cluster.real("master")
    logs = tmp_path / "logs"
    logs.mkdir()
    replica = cluster.real("replica", replication=[master.uri], wal_dir=str(logs))
    replica.catch_up(master)
    replica.wait_writable()
    replica.eval("box.schema.space.create('v', {id = 600, engine = 'vinyl', is_local = true}):create_index('pk')")
    master.configure(replication=[replica.uri])
    replica.eval("box.space.v:insert{1} box.snapshot()")
    master.catch_up(replica)
    uuid = replica.uuid
    assert (replica.directory / "600").is_dir()
    replica.stop()
    options = ("--yes", "--wal-dir", logs, replica.directory, master.address)
    found = flowstone("rebootstrap", *options)
    assert found.code == 0, found.errors
    places = replica.directory, logs
    (aside,), (logs_aside,) = (list(place.glob("before-rebootstrap-*")) for place in places)
    assert found.text == (
        f"moved the snapshots and logs of {replica.directory} and {logs} "
        f"to {aside} and {logs_aside}, which can be deleted once the member has joined\n"
        f"to rejoin, start the member with instance_uuid {uuid} (flowstone serve --instance-uuid {uuid}, "
        f"or box.cfg{{instance_uuid = '{uuid}'}} in Tarantool)\n"
    )
    assert data(replica.directory) == data(logs) == []
    assert data(aside)
    assert data(logs_aside)
    assert not (replica.directory / "600").exists()
    assert not list(replica.directory.glob("*.vylog"))
    replica.start(instance_uuid=uuid)
    assert replica.id == 2


@fits("2.6")
def test_directory_of_another_set_or_of_no_member_is_rejected(
    cluster: Cluster, flowstone: Command, tmp_path: Path
) -> None:
    master, stranger = cluster.real("master"), cluster.real("stranger")
    stranger.stop()
    refused = flowstone("rebootstrap", "--yes", stranger.directory, master.address)
    assert refused.code == 1
    assert "belongs to replica set" in refused.errors[0]

    missing = tmp_path / "missing"
    assert flowstone("rebootstrap", "--yes", missing, master.address).code == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert flowstone("rebootstrap", "--yes", empty, master.address).code == 2
    (empty / "manifest.json").write_text("{}")
    archive = flowstone("rebootstrap", "--yes", empty, master.address)
    assert (archive.code, archive.errors) == (
        2,
        [f"flowstone: {empty}: is an archive; specify the data directory of a stopped member"],
    )
    master.stop()
    alone = flowstone("rebootstrap", "--yes", stranger.directory, master.address)
    assert alone.errors == [f"flowstone: {master.address} is unreachable: connection refused"]
