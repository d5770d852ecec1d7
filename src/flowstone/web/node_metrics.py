"""Metrics and health of the node in this process: from its report, its counters, its disk usage and the process.

`tnt_…` metrics have Tarantool's meaning. Metrics of allocators, fibers and Lua do not apply to a node and are omitted.
A node that waits for its peers can take minutes to start and has no report until then: its state comes from its ballot,
requested as a peer would, and the reasons from what its log says about the peers.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from typing import Final

from flowstone.archive.upstream_query import ask_ballot
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node.node import Node, NotRunning
from flowstone.node.statistics import DiskUsage, Statistics
from flowstone.observation.own_report import report_now
from flowstone.observation.query import ASK_SECONDS
from flowstone.observation.report import Report
from flowstone.outside import Outside, production
from flowstone.web.health import Health, node_health, starting_health
from flowstone.web.metrics import Families, add_reports
from flowstone.web.peer_complaints import PeerComplaints

_STATM: Final = "/proc/self/statm"


class NodeMetrics:
    """`monitoring.Monitored` for `node`, usable from before its start until after its stop.

    `own` is the URI at which the node listens or is going to listen; None if it is unknown.
    """

    def __init__(self, node: Node, own: Uri | None = None, outside: Outside | None = None) -> None:
        self._node = node
        self._own = own
        self._outside = outside or production()
        self.complaints = PeerComplaints(lambda: [parse_uri(uri).address for uri in node.configuration.replication])

    async def metrics(self) -> Families:
        families = Families()
        try:
            report, statistics, usage = await self._look()
        except NotRunning:
            return families
        add_reports(families, [report])
        alias = report.name or report.address
        add_process(families, alias)
        add_statistics(families, alias, statistics)
        if isinstance(usage, DiskUsage):
            add_usage(families, alias, report, usage)
        return families

    async def health(self) -> Health:
        try:
            return node_health(*await self._look(), self.complaints.now())
        except NotRunning:
            return starting_health(has_data=await self._has_data(), complaints=self.complaints.now())

    async def _has_data(self) -> bool:
        """Return True if a starting node has loaded its data, according to its ballot, which needs no login."""
        if self._own is None or not self._node.configuration.replication:
            return False
        try:
            async with asyncio.timeout(ASK_SECONDS):
                ballot = await ask_ballot(self._outside, self._own)
        except (FlowstoneError, TimeoutError):
            return False
        return ballot.is_booted and not ballot.is_loading

    async def _look(self) -> tuple[Report, Statistics, DiskUsage | OSError]:
        """Return report, statistics and disk usage; if the disk cannot be queried, the usage is the OSError, because
        the rest is still needed."""
        usage: DiskUsage | OSError
        try:
            usage = await self._node.disk_usage()
        except OSError as error:
            usage = error
        return report_now(self._node), self._node.statistics(), usage


def add_process(families: Families, alias: str) -> None:
    """Add CPU time and memory of the process, under the names of Tarantool's module."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    families.gauge("tnt_cpu_user_time", "CPU user time usage", used.ru_utime, alias=alias)
    families.gauge("tnt_cpu_system_time", "CPU system time usage", used.ru_stime, alias=alias)
    families.gauge("tnt_cfg_current_time", "Tarantool cfg time", time.time(), alias=alias)
    sizes = _memory()
    if sizes is not None:
        families.gauge("tnt_memory", "Tarantool instance memory usage", sizes[1], alias=alias)
        families.gauge("tnt_memory_virt", "Tarantool instance virtual memory usage", sizes[0], alias=alias)


def _memory() -> tuple[int, int] | None:
    """Return the virtual and resident size in bytes; None on systems without Linux's /proc."""
    try:
        with open(_STATM, encoding="ascii") as file:
            virtual, resident, *_ = map(int, file.read().split())
    except OSError:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return virtual * page, resident * page


def add_statistics(families: Families, alias: str, seen: Statistics) -> None:
    families.counter("tnt_net_sent_total", "Totally sent in bytes", seen.sent_bytes, alias=alias)
    families.counter("tnt_net_received_total", "Totally received in bytes", seen.received_bytes, alias=alias)
    families.counter("tnt_net_connections_total", "Connections total amount", seen.connections_total, alias=alias)
    families.gauge("tnt_net_connections_current", "Current connections amount", seen.connections, alias=alias)
    families.counter("tnt_net_requests_total", "Requests total amount", seen.requests, alias=alias)
    families.gauge("tnt_net_requests_current", "Pending requests", seen.requests_in_progress, alias=alias)
    text = "Failed logins"
    families.counter("flowstone_auth_failures_total", text, seen.auth_failures, alias=alias)
    text = "Login attempts delayed or rejected after too many failures"
    families.counter("flowstone_auth_delays_total", text, seen.auth_delays, alias=alias)
    for name, total in {**seen.operations, "ERROR": seen.errors}.items():
        text = "Total amount of operations"
        families.counter("tnt_stats_op_total", text, total, alias=alias, operation=name.lower())
    for space in seen.spaces:
        families.gauge("tnt_space_len", "Space length", space.len, alias=alias, name=space.name, engine=space.engine)
    _add_wal(families, alias, seen)
    for follower in seen.followers:
        of: dict[str, str | int] = {"alias": alias, "id": follower.id, "uuid": follower.uuid}
        families.counter("flowstone_relay_rows_total", "Rows sent to this replica", follower.rows, **of)
        families.counter("flowstone_relay_bytes_total", "Bytes of rows sent to this replica", follower.bytes, **of)


def _add_wal(families: Families, alias: str, seen: Statistics) -> None:
    wal = seen.wal
    families.counter("flowstone_wal_rows_total", "Rows written to the WAL", wal.rows, alias=alias)
    families.counter("flowstone_wal_bytes_total", "Bytes written to the WAL", wal.bytes, alias=alias)
    families.counter("flowstone_wal_rotations_total", "WAL file rotations", wal.rotations, alias=alias)
    families.counter("flowstone_wal_failures_total", "Failed WAL writes", wal.failures, alias=alias)
    text = "Whether the last WAL write failed"
    families.gauge("flowstone_wal_failing", text, int(wal.failure is not None), alias=alias)
    text = "Duration of WAL writes in seconds, without a sync (write) and with one (fsync)"
    families.histogram("flowstone_wal_write_seconds", text, wal.write_seconds, alias=alias, mode="write")
    families.histogram("flowstone_wal_write_seconds", text, wal.synced_seconds, alias=alias, mode="fsync")


def add_usage(families: Families, alias: str, report: Report, usage: DiskUsage) -> None:
    families.gauge("flowstone_wal_files", "WAL files on disk", len(usage.logs), alias=alias)
    text = "Bytes of WAL files on disk"
    families.gauge("flowstone_wal_files_bytes", text, sum(size for _, size in usage.logs), alias=alias)
    families.gauge("flowstone_snapshots_bytes", "Bytes of snapshots on disk", usage.snapshots_bytes, alias=alias)
    for directory, room in (("wal_dir", usage.wal_free_bytes), ("memtx_dir", usage.memtx_free_bytes)):
        text = "Free bytes on the file system"
        families.gauge("flowstone_disk_free_bytes", text, room, alias=alias, directory=directory)
    held: dict[str, int] = {}
    for consumer in report.gc.consumers if report.gc is not None else ():
        held[consumer.name] = max(held.get(consumer.name, 0), usage.held_from(consumer.signature))
    for name, size in held.items():
        text = "Bytes of logs retained for this consumer"
        families.gauge("flowstone_gc_held_bytes", text, size, alias=alias, consumer=name)
