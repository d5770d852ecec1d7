"""Findings about a node's disk."""

from __future__ import annotations

from typing import Any

import msgspec

from flowstone.observation.explanation import explain
from flowstone.observation.findings.disk_findings import FREE_BYTES_MIN
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.health import complaints
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import ReportedDisk
from tests.observation.reports import report, upstream


def found(disk: ReportedDisk | None = None, **info: Any) -> tuple[Finding, ...]:
    sets = replica_sets([msgspec.structs.replace(report(1, {1: 5}, **info), disk=disk)])
    findings = explain(sets)
    assert complaints(sets[0]) == tuple(finding.what for finding in findings)
    return findings


def test_full_disk_is_found_with_the_failed_writes() -> None:
    wal = {"failure": "Failed to write to disk: No space left on device", "failures": 244}
    (finding,) = found(wal=wal)
    assert (finding.kind, finding.severity) == (Kind.DISK_FULL, Severity.STOPPED)
    assert finding.what == "db1:3301 cannot write its log"
    assert "244 writes have failed" in finding.why


def test_full_disk_of_a_follower_is_not_predicted_to_fail_the_next_write() -> None:
    """A replicated row has no client, and no more rows arrive until `replication` is set again."""
    failure = "Failed to write to disk: No space left on device"
    follower = report(
        2,
        {1: 5},
        {1: {"upstream": upstream(1, "stopped", message=failure)}},
        ro=True,
        package="Flowstone",
        wal={"failure": failure, "failures": 1},
    )
    finding = next(finding for finding in explain(replica_sets([follower])) if "cannot write" in finding.what)
    assert "replication from db1:3301 has stopped" in finding.why
    assert "client" not in finding.why
    assert finding.advice.startswith(
        "free space on the disk with the logs of db2:3301, then set `replication` on db2:3301 again (`flowstone config"
    )
    assert "next write" not in finding.advice


def test_log_that_fails_for_another_reason_has_its_own_kind() -> None:
    (finding,) = found(wal={"failure": "Input/output error", "failures": 1})
    assert (finding.kind, finding.severity) == (Kind.LOG_FAILING, Severity.STOPPED)
    assert "1 write has failed" in finding.why


def test_low_free_space_is_a_warning() -> None:
    (finding,) = found(ReportedDisk(wal_free_bytes=FREE_BYTES_MIN - 1, memtx_free_bytes=FREE_BYTES_MIN))
    assert (finding.kind, finding.severity) == (Kind.DISK_FULL, Severity.WARNING)
    assert "left for wal_dir" in finding.why
    assert found(ReportedDisk(wal_free_bytes=FREE_BYTES_MIN, memtx_free_bytes=FREE_BYTES_MIN)) == ()
    assert found(ReportedDisk()) == ()


def test_unreadable_directory_is_found() -> None:
    (finding,) = found(ReportedDisk(failure="Input/output error"))
    assert (finding.kind, finding.severity) == (Kind.LOG_FAILING, Severity.WARNING)
