"""Metrics and health of the node in this process: what its report tells, and what only it can know.

`tnt_…` names that are here have Tarantool's meaning; those of its allocators, fibers and Lua have none in a node, and
are missing. A node that starts tells little by its calls, and its peers may keep it there for minutes: it is asked then
as they ask it, and what it says of them in its log is added.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node.archive_upstream import ask_ballot
from flowstone.node.node import Node, NotRunning
from flowstone.node.statistics import DiskUsage, Statistics
from flowstone.observation.asking import ASK_SECONDS
from flowstone.observation.own_report import report_now
from flowstone.observation.report import Report
from flowstone.outside import Outside, production
from flowstone.web.health import Health, node_health, starting_health
from flowstone.web.metrics import Families, add_reports
from flowstone.web.peer_complaints import PeerComplaints

_STATM: Final = "/proc/self/statm"


class NodeMetrics:
    """What `monitoring.py` serves about `node`, from before it has started until after it has stopped.

    `own` is where it listens, or will; None where nobody can know.
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
        """Whether a node that starts has its data: by its ballot, for which nobody has to log in."""
        if self._own is None or not self._node.configuration.replication:
            return False
        try:
            async with asyncio.timeout(ASK_SECONDS):
                ballot = await ask_ballot(self._outside, self._own)
        except (FlowstoneError, TimeoutError):
            return False
        return ballot.is_booted and not ballot.is_loading

    async def _look(self) -> tuple[Report, Statistics, DiskUsage | OSError]:
        """A disk that fails is when all else is wanted most: its error is an answer, too."""
        usage: DiskUsage | OSError
        try:
            usage = await self._node.disk_usage()
        except OSError as error:
            usage = error
        return report_now(self._node), self._node.statistics(), usage


def add_process(families: Families, alias: str) -> None:
    """Time and memory of the process, as Tarantool's module names them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    families.gauge("tnt_cpu_user_time", "CPU user time usage", used.ru_utime, alias=alias)
    families.gauge("tnt_cpu_system_time", "CPU system time usage", used.ru_stime, alias=alias)
    families.gauge("tnt_cfg_current_time", "Tarantool cfg time", time.time(), alias=alias)
    sizes = _memory()
    if sizes is not None:
        families.gauge("tnt_memory", "Tarantool instance memory usage", sizes[1], alias=alias)
        families.gauge("tnt_memory_virt", "Tarantool instance virtual memory usage", sizes[0], alias=alias)


def _memory() -> tuple[int, int] | None:
    """Bytes of address space and of memory; None where the system does not tell it like Linux."""
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
    text = "Logins that failed"
    families.counter("flowstone_auth_failures_total", text, seen.auth_failures, alias=alias)
    text = "Login attempts that were delayed or rejected after too many failures"
    families.counter("flowstone_auth_delays_total", text, seen.auth_delays, alias=alias)
    for name, total in {**seen.operations, "ERROR": seen.errors}.items():
        text = "Total amount of operations"
        families.counter("tnt_stats_op_total", text, total, alias=alias, operation=name.lower())
    for space in seen.spaces:
        families.gauge("tnt_space_len", "Space length", space.len, alias=alias, name=space.name, engine=space.engine)
    _add_wal(families, alias, seen)
    for follower in seen.followers:
        of: dict[str, str | int] = {"alias": alias, "id": follower.id, "uuid": follower.uuid}
        families.counter("flowstone_relay_rows_total", "Rows that this replica was sent", follower.rows, **of)
        families.counter("flowstone_relay_bytes_total", "Bytes of rows that it was sent", follower.bytes, **of)


def _add_wal(families: Families, alias: str, seen: Statistics) -> None:
    wal = seen.wal
    families.counter("flowstone_wal_rows_total", "Rows written to the log", wal.rows, alias=alias)
    families.counter("flowstone_wal_bytes_total", "Bytes written to the log", wal.bytes, alias=alias)
    families.counter("flowstone_wal_rotations_total", "Logs that were ended for the next", wal.rotations, alias=alias)
    families.counter("flowstone_wal_failures_total", "Writes that failed", wal.failures, alias=alias)
    families.gauge("flowstone_wal_failing", "Whether the last write failed", int(wal.failure is not None), alias=alias)
    text = "Seconds that writes to the log took: without a sync (write), and with it (fsync)"
    families.histogram("flowstone_wal_write_seconds", text, wal.write_seconds, alias=alias, mode="write")
    families.histogram("flowstone_wal_write_seconds", text, wal.synced_seconds, alias=alias, mode="fsync")


def add_usage(families: Families, alias: str, report: Report, usage: DiskUsage) -> None:
    families.gauge("flowstone_wal_files", "Logs on disk", len(usage.logs), alias=alias)
    families.gauge("flowstone_wal_files_bytes", "Bytes of logs on disk", sum(b for _, b in usage.logs), alias=alias)
    families.gauge("flowstone_snapshots_bytes", "Bytes of snapshots on disk", usage.snapshots_bytes, alias=alias)
    for directory, room in (("wal_dir", usage.wal_free_bytes), ("memtx_dir", usage.memtx_free_bytes)):
        text = "Bytes that the file system can still take"
        families.gauge("flowstone_disk_free_bytes", text, room, alias=alias, directory=directory)
    held: dict[str, int] = {}
    for consumer in report.gc.consumers if report.gc is not None else ():
        held[consumer.name] = max(held.get(consumer.name, 0), usage.held_from(consumer.signature))
    for name, size in held.items():
        text = "Bytes of logs that this consumer has not read to their end"
        families.gauge("flowstone_gc_held_bytes", text, size, alias=alias, consumer=name)
