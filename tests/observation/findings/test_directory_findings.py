"""Damage in files is found with its byte, its rows and advice."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flowstone
from flowstone.observation.findings import directory_findings as findings
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.log_directory import look_into
from flowstone.outside import production
from tests import real_tarantool
from tests.chaos.small_disk import MountedDisk
from tests.interop.cluster import Cluster
from tests.interop.ledger import LEDGER, define
from tests.interop.member import SECONDS, eventually
from tests.node.upstream.test_applier import until
from tests.observation.directories import LOGS, ROWS, leave
from tests.observation.situations import make, pair, write

KINDS = pytest.mark.parametrize("kind", ["real", "ours"])


def _found(path: Path) -> list[Finding]:
    found = findings.directory_findings(look_into(production(), str(path)))
    assert all(str(path) in finding.what for finding in found), "each names its directory"
    return found


def _one(path: Path, kind: Kind) -> Finding:
    found = _found(path)
    assert [finding.kind for finding in found] == [kind], found
    return found[0]


def _logs(path: Path) -> list[Path]:
    return sorted(path.glob("*.xlog"))


def _snapshots(path: Path) -> list[Path]:
    return sorted(path.glob("*.snap"))


def _damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


@KINDS
def test_healthy_directory_has_no_findings(kind: str, tmp_path: Path) -> None:
    assert _found(leave(kind, tmp_path / "data")) == []


@KINDS
def test_damage_names_file_and_byte_and_is_critical_where_a_server_starts(kind: str, tmp_path: Path) -> None:
    data = leave(kind, tmp_path / "data")
    old, newest = _logs(data)[0], _logs(data)[LOGS - 1]
    _damage(old, old.stat().st_size // 2)
    finding = _one(data, Kind.DAMAGED_LOG)
    assert finding.severity is Severity.WARNING
    assert finding.what == f"{old} is damaged"
    assert "at bytes " in finding.why
    shutil.rmtree(data)
    data = leave(kind, tmp_path / "data")
    newest = _logs(data)[LOGS - 1]
    _damage(newest, newest.stat().st_size // 2)
    assert _one(data, Kind.DAMAGED_LOG).severity is Severity.STOPPED


@KINDS
def test_torn_end_is_a_warning_with_the_lost_bytes(kind: str, tmp_path: Path) -> None:
    data = leave(kind, tmp_path / "data")
    newest = [log for log in _logs(data) if log.stat().st_size > 300][-1]
    for later in [log for log in _logs(data) if log.name > newest.name]:
        later.unlink()
    newest.write_bytes(newest.read_bytes()[:-11])
    finding = _one(data, Kind.TORN_LOG)
    assert finding.severity is Severity.WARNING
    assert "bytes are not a complete block" in finding.why


@KINDS
def test_missing_log_is_a_gap_with_the_lost_rows(kind: str, tmp_path: Path) -> None:
    data = leave(kind, tmp_path / "data")
    _logs(data)[1].unlink()
    finding = _one(data, Kind.LOG_GAP)
    assert f"{ROWS} rows (" in finding.why
    assert "of replica 1)" in finding.why


def _starts(kind: str, data: Path) -> bool:
    """Return True if a server of this kind starts from the directory."""
    if kind == "real":
        try:
            return "up" in real_tarantool.run("box.cfg{log = 'server.log'} print('up') os.exit()", data)
        except RuntimeError:
            return False

    async def start() -> None:
        async with flowstone.Node(str(data)):
            pass

    try:
        asyncio.run(start())
    except flowstone.FlowstoneError:
        return False
    return True


@KINDS
@pytest.mark.parametrize("is_covered", [True, False])
def test_severity_of_a_gap_depends_on_the_server(kind: str, is_covered: bool, tmp_path: Path) -> None:
    """A server needs no row that the newest snapshot covers."""
    data = leave(kind, tmp_path / "data")
    if not is_covered:
        for snapshot in _snapshots(data)[1:]:
            snapshot.unlink()
    _logs(data)[1].unlink()
    finding = _one(data, Kind.LOG_GAP)
    assert finding.severity is (Severity.WARNING if is_covered else Severity.STOPPED)
    assert ("the newest snapshot covers these rows" in finding.why) is is_covered
    assert ("rebootstrap" in finding.advice) is not is_covered
    assert _starts(kind, data) is is_covered


@pytest.mark.parametrize("kind", ["real", "ours"])
def test_directory_of_a_rejoined_member_has_no_findings(cluster: Cluster, kind: str) -> None:
    """Its missing rows were never in its logs."""
    master, replica = pair(cluster, kind, kind, checkpoint_count=1)
    write(master, [1])
    replica.catch_up(master)
    replica.stop()
    master.restart(**({"wal_cleanup_delay": 0} if kind == "ours" else {}))
    oldest = min(path.name for path in master.files("xlog"))
    for number in range(2, 5):
        write(master, [number])
        master.snapshot()
    eventually("the old logs go", lambda: oldest not in [path.name for path in master.files("xlog")])
    write(master, [5])
    replica.start()
    replica.catch_up(master)
    assert _logs(replica.directory)[-1].stem < _snapshots(replica.directory)[-1].stem
    assert _found(replica.directory) == [], "nothing was written since"
    write(master, [6])
    replica.catch_up(master)
    seen = look_into(production(), str(replica.directory))
    assert len(seen.report.gaps) == 1
    assert findings.directory_findings(seen) == []
    replica.restart()
    write(master, [7])
    replica.catch_up(master)
    replica.stop()
    assert _found(replica.directory) == []
    (replica.directory / "manifest.json").write_text("{}")
    assert _one(replica.directory, Kind.LOG_GAP).severity is Severity.WARNING, "an archive keeps the history"


@KINDS
def test_missing_snapshot_prevents_every_start(kind: str, tmp_path: Path) -> None:
    data = leave(kind, tmp_path / "data")
    for snapshot in _snapshots(data):
        snapshot.unlink()
    assert Kind.NO_SNAPSHOT in [one.kind for one in _found(data)]


@KINDS
def test_truncated_snapshot_is_damaged(kind: str, tmp_path: Path) -> None:
    data = leave(kind, tmp_path / "data")
    newest = _snapshots(data)[-1]
    newest.write_bytes(newest.read_bytes()[:-4])
    finding = _one(data, Kind.DAMAGED_LOG)
    assert (finding.severity, finding.what) == (Severity.STOPPED, f"{newest} is damaged")
    assert "not complete" in finding.why


@KINDS
def test_snapshot_newer_than_all_logs_is_a_warning(kind: str, tmp_path: Path) -> None:
    data = leave(kind, tmp_path / "data")
    newest = _snapshots(data)[-1]
    for log in _logs(data)[1:]:
        log.unlink()
    finding = _one(data, Kind.LOG_GAP)
    assert finding.severity is Severity.WARNING
    assert newest.name in finding.why


def test_files_of_two_instances_in_one_directory_are_found(tmp_path: Path) -> None:
    data, other = leave("real", tmp_path / "data"), leave("ours", tmp_path / "other")
    last = data / _logs(other)[-1].name
    shutil.copy(_logs(other)[-1], last)
    finding = next(one for one in _found(data) if one.kind is Kind.MIXED_DIRECTORY)
    assert finding.severity is Severity.STOPPED
    stranger = look_into(production(), str(other)).instance_uuid
    assert finding.evidence == (f"{last}: written by instance {stranger}",)


@KINDS
def test_renamed_log_is_not_identified_by_its_name(kind: str, tmp_path: Path) -> None:
    data = leave(kind, tmp_path / "data")
    shutil.copy(_logs(data)[-1], data / f"{999:020d}.xlog")
    assert "file name says" in _one(data, Kind.DAMAGED_LOG).why


@KINDS
def test_incomplete_files_can_be_deleted(kind: str, tmp_path: Path) -> None:
    data = leave(kind, tmp_path / "data")
    (data / "00000000000000000999.snap.inprogress").write_bytes(b"half")
    assert _one(data, Kind.LEFTOVER_FILES).severity is Severity.WARNING


def test_full_disk_is_found_with_its_free_space(tmp_path: Path) -> None:
    try:
        disk = MountedDisk(tmp_path / "disk")
    except PermissionError:  # without the permission to mount, simulate a full disk
        seen = look_into(production(), str(leave("ours", tmp_path / "data")))
        found = findings.directory_findings(replace(seen, free_space=4096))
    else:
        try:
            data = leave("ours", tmp_path / "disk" / "data")
            assert _found(data) == []
            disk.fill()
            found = _found(data)
        finally:
            disk.close()
    assert [(one.kind, one.severity) for one in found] == [(Kind.DISK_FULL, Severity.STOPPED)]
    assert " are free for " in found[0].why


# --- synchronous transactions, and diverged histories ---


async def _life(path: Path, *steps: tuple[str, Any], **options: Any) -> None:
    """A single node that promotes itself and writes."""
    async with flowstone.Node(str(path), replication_synchro_quorum=1, **options) as node:
        for step, value in steps:
            if step == "create":
                space = await node.create_space("sure", id=601, format=[("id", "unsigned")], is_sync=True)
                await space.create_index("pk")
            elif step == "promote":
                await node.promote()
                await node.wait_rw(timeout=SECONDS)
            elif step == "write":
                await node.space("sure").replace((value,))
            else:
                await node.reconfigure(replication_synchro_quorum=31, replication_synchro_timeout=1000)
                before = node.info()["lsn"]
                writing = asyncio.create_task(node.space("sure").replace((value,)))
                await until(partial(_has_written, node, before), SECONDS)
                writing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await writing


def _has_written(node: flowstone.Node, since: int) -> bool:
    lsn: int = node.info()["lsn"]
    return lsn > since


def test_pending_transactions_are_reported_with_the_first_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    asyncio.run(_life(data, ("promote", None), ("create", None), ("write", 1), ("leave", 2)))
    finding = _one(data, Kind.UNDECIDED)
    assert finding.severity is Severity.WARNING
    end = look_into(production(), str(data)).end.get(1)
    assert f"transaction 1:{end} " in finding.why
    assert "queue belongs to replica 1, term 2" in finding.why


def test_diverged_histories_are_reported_with_the_fork_and_the_rows_of_each_side(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    asyncio.run(_life(ours, ("promote", None), ("create", None), ("write", 1)))
    shutil.copytree(ours, theirs)
    asyncio.run(_life(ours, ("promote", None), ("write", 10)))
    asyncio.run(_life(theirs, ("promote", None), ("write", 20), ("write", 21)))
    seen = [look_into(production(), str(path)) for path in (ours, theirs)]
    (finding,) = findings.compare(production(), seen)
    assert (finding.kind, finding.severity) == (Kind.SPLIT_BRAIN, Severity.STOPPED)
    assert "The same LSNs denote different rows" in finding.why
    told = "\n".join(finding.evidence)
    assert f"{ours}: 1:" in told
    assert "REPLACE sure {id: 10}" in told
    assert "REPLACE sure {id: 20}" in told
    assert "fork point {1: " in told


def test_lagging_directory_is_not_reported_as_forked(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    asyncio.run(_life(ours, ("promote", None), ("create", None), ("write", 1)))
    shutil.copytree(ours, theirs)
    asyncio.run(_life(ours, ("promote", None), ("write", 10)))
    assert findings.compare(production(), [look_into(production(), str(path)) for path in (ours, theirs)]) == []


def _compared(*paths: Path) -> list[Finding]:
    return findings.compare(production(), [look_into(production(), str(path)) for path in paths])


@pytest.mark.parametrize("kind", ["real", "ours"])
def test_two_processes_on_copies_of_one_directory_are_found(cluster: Cluster, kind: str) -> None:
    one, copy = make(cluster, kind, "one"), make(cluster, kind, "copy", start=False)
    define(one)
    one.stop()
    shutil.copytree(one.directory, copy.directory, dirs_exist_ok=True)
    one.start()
    assert _compared(one.directory, copy.directory) == [], "the directory is a backup"
    copy.start()
    finding = _compared(one.directory, copy.directory)[0]
    assert (finding.kind, finding.severity) == (Kind.COPIED_INSTANCE, Severity.STOPPED)
    assert finding.what == f"two processes run as one member: on {one.directory} and on {copy.directory}"
    assert one.uuid in finding.why
    one.client.insert(LEDGER, 1, 1, "of one")
    copy.client.insert(LEDGER, 1, 1, "of its copy")
    (finding,) = _compared(one.directory, copy.directory)
    assert finding.kind is Kind.COPIED_INSTANCE
    assert "of one" in finding.why
    assert "of its copy" in finding.why
    assert "save the rows that only it has" in finding.advice
    assert _compared(one.directory, one.directory) == [], "the directory is given twice"
    one.stop()
    copy.stop()
    (finding,) = _compared(one.directory, copy.directory)
    assert finding.kind is Kind.SPLIT_BRAIN
    assert "both belong to one instance" in finding.why


def test_growing_archive_is_not_a_copy_of_its_upstream(cluster: Cluster) -> None:
    server = cluster.real("server")
    archive = cluster.directory / "archive"
    command = [sys.executable, "-m", "flowstone.cli", "archive", "--json", server.uri, str(archive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if b'"connected"' in line)
            seen = [look_into(production(), str(path)) for path in (server.directory, archive)]
            assert seen[0].instance_uuid == seen[1].instance_uuid
            assert [one.is_in_use for one in seen] == [True, True]
            assert findings.compare(production(), seen) == []
        finally:
            process.terminate()


def test_directories_of_different_sets_have_no_common_history(tmp_path: Path) -> None:
    paths = [leave("ours", tmp_path / name) for name in ("a", "b")]
    (finding,) = findings.compare(production(), [look_into(production(), str(path)) for path in paths])
    assert finding.kind is Kind.WRONG_CLUSTER


def test_members_with_exclusive_rows_are_forked_without_contradiction(cluster: Cluster) -> None:
    """Logs of a real server and of a node: common rows are equal, byte for byte."""
    real, ours = pair(cluster, "real", "ours")
    ours.wait_writable()
    write(real, range(1, 4))
    ours.catch_up(real)
    ours.configure(replication=[])
    ours.client.insert(LEDGER, 100, 1, "of ours")
    real.client.insert(LEDGER, 200, 1, "of the real one")
    real.stop()
    ours.stop()
    seen = [look_into(production(), str(member.directory)) for member in (real, ours)]
    (finding,) = findings.compare(production(), seen)
    assert (finding.kind, finding.severity) == (Kind.FORKED, Severity.WARNING)
    assert "only " in finding.why
    lines = [line for line in finding.evidence if "INSERT ledger" in line]
    assert len(lines) == 2
    assert "of the real one" in lines[0]
    assert "of ours" in lines[1]
    assert len(finding.evidence) == 3


@pytest.mark.parametrize("kind", ["real", "ours"])
def test_rows_only_in_a_snapshot_are_counted_without_advice_to_follow(cluster: Cluster, kind: str) -> None:
    one, other = pair(cluster, kind, kind)
    other.configure(replication=[])
    write(one, range(1, 4))
    one.snapshot()
    write(one, [4])
    end = one.vclock()[1]
    other.wait_writable()
    other.client.insert(LEDGER, 9, 1, "of the other")
    one.stop()
    other.stop()
    newest = _snapshots(one.directory)[-1].stem
    for log in _logs(one.directory):
        if log.stem < newest:
            log.unlink()
    (finding,) = _compared(one.directory, other.directory)
    assert (finding.kind, finding.severity) == (Kind.FORKED, Severity.STOPPED)
    told = f"only {one.directory} has 4 rows, 1:{end - 3}…{end - 1} of them in a snapshot but in no log, those in its "
    assert f"{told}logs beginning with 1:{end} REPLACE ledger" in finding.why
    assert f"{other.directory} cannot follow: {one.directory} has no log of 1:{end - 3}…{end - 1}" in finding.advice
    # The advice works.
    other.start(replication=[])
    one.start(replication=[other.uri])
    one.catch_up(other)
    other.restart(replication=[one.uri])
    other.catch_up(one)
    assert other.tuples(LEDGER) == one.tuples(LEDGER)
    assert other.count(LEDGER) == 5


def test_forked_rows_with_the_same_key_collide(cluster: Cluster) -> None:
    real, ours = pair(cluster, "real", "ours")
    ours.wait_writable()
    ours.configure(replication=[])
    ours.client.insert(LEDGER, 20, 1, "of ours")
    real.client.insert(LEDGER, 20, 1, "of the real one")
    real.stop()
    ours.stop()
    (finding,) = _compared(real.directory, ours.directory)
    assert (finding.kind, finding.severity) == (Kind.FORKED, Severity.WARNING)
    assert "Both sides have written the key ledger {" in finding.why
    assert "20" in finding.why.partition("Both sides have written")[2]
    assert "replication_skip_conflict" in finding.advice
