"""Statistics of a node at one moment, for `box.stat`, `box.stat.net` and the metrics of `web/`.

Reads the counters and counts nothing itself. Disk usage has functions of its own, because they wait for the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.iproto.constants import RequestType
from flowstone.node.counters import Histogram
from flowstone.node.disk_query import FREE_SPACE_SECONDS
from flowstone.node.downstream.relay_stream import Downstream
from flowstone.node.instance import Instance
from flowstone.outside.disk import Disk
from flowstone.xlog.directory import scan_directory

OPERATIONS: Final[Mapping[str, tuple[RequestType, ...]]] = {
    "SELECT": (RequestType.SELECT,),
    "INSERT": (RequestType.INSERT,),
    "REPLACE": (RequestType.REPLACE,),
    "UPDATE": (RequestType.UPDATE,),
    "UPSERT": (RequestType.UPSERT,),
    "DELETE": (RequestType.DELETE,),
    "CALL": (RequestType.CALL, RequestType.CALL_16),
    "EVAL": (RequestType.EVAL,),
    "AUTH": (RequestType.AUTH,),
    "BEGIN": (RequestType.BEGIN,),
    "COMMIT": (RequestType.COMMIT,),
    "ROLLBACK": (RequestType.ROLLBACK,),
    "EXECUTE": (RequestType.EXECUTE,),
    "PREPARE": (RequestType.PREPARE,),
}
"""The operations in `box.stat` besides ERROR, and their request types."""


class Durations(msgspec.Struct, frozen=True):
    """A histogram of durations: counts up to each bound and above the previous one, and the sum of seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class WalStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Writes to the log since the start. `failure` is the error of the last write; None if it succeeded."""

    rows: int
    bytes: int
    rotations: int
    failures: int
    failure: str | None
    write_seconds: Durations
    synced_seconds: Durations


class SentToReplica(msgspec.Struct, frozen=True, kw_only=True):
    """Rows and bytes sent to a replica since the start; `id` is 0 for an anonymous replica."""

    id: int
    uuid: str
    rows: int
    bytes: int


class SpaceSize(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tuples in a user space."""

    name: str
    engine: str
    len: int


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a node since its start. `operations` has the names of `box.stat`."""

    operations: dict[str, int]
    requests: int
    errors: int
    received_bytes: int
    sent_bytes: int
    connections: int
    connections_total: int
    requests_in_progress: int
    auth_failures: int
    auth_delays: int
    wal: WalStatistics
    followers: tuple[SentToReplica, ...]
    spaces: tuple[SpaceSize, ...]


class DiskUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and free space of the directories. `logs` has the start signature and size of each log, oldest first."""

    wal_dir: str
    memtx_dir: str
    wal_free_bytes: int
    memtx_free_bytes: int
    logs: tuple[tuple[int, int], ...]
    snapshots_bytes: int

    def held_from(self, signature: int) -> int:
        """Return the size of the logs that a replica needs that has all rows up to `signature`."""
        first = max((start for start, _ in self.logs if start <= signature), default=0)
        return sum(size for start, size in self.logs if start >= first)


def statistics_of(instance: Instance, replicas: Iterable[Downstream]) -> Statistics:
    counters, journal = instance.counters, instance.journal
    wal = journal.counters
    return Statistics(
        operations={name: sum(counters.operations[kind] for kind in kinds) for name, kinds in OPERATIONS.items()},
        requests=sum(counters.operations),
        errors=counters.errors,
        received_bytes=counters.received_bytes,
        sent_bytes=counters.sent_bytes,
        connections=counters.connections,
        connections_total=counters.connections_total,
        requests_in_progress=counters.requests_in_progress,
        auth_failures=counters.auth_failures,
        auth_delays=counters.auth_delays,
        wal=WalStatistics(
            rows=journal.row_count,
            bytes=journal.written_bytes,
            rotations=wal.rotations,
            failures=wal.failures,
            failure=wal.failure,
            write_seconds=_durations(wal.write_seconds),
            synced_seconds=_durations(wal.synced_seconds),
        ),
        followers=tuple(
            SentToReplica(id=each.id, uuid=str(each.uuid), rows=each.sent_rows, bytes=each.sent_bytes)
            for each in replicas
        ),
        spaces=tuple(_sizes(instance)),
    )


def _durations(histogram: Histogram) -> Durations:
    return Durations(histogram.bounds, tuple(histogram.counts), histogram.sum)


def _sizes(instance: Instance) -> Iterable[SpaceSize]:
    """Yield the sizes of user spaces, without temporary ones and names with _, as Tarantool's metrics module does."""
    for space in instance.box.spaces.values():
        definition = space.definition
        is_users = space.id >= FIRST_USER_SPACE_ID and not space.name.startswith("_")
        if is_users and not definition.is_temporary and space.primary is not None:
            yield SpaceSize(name=space.name, engine=definition.engine, len=len(space))


def disk_usage(disk: Disk, memtx_dir: str, wal_dir: str) -> DiskUsage:
    """Return the usage of the directories. Blocks while it reads the disk."""
    logs = [(log.signature, _size(disk, log.path)) for log in scan_directory(disk, wal_dir).logs]
    snapshots = [_size(disk, snapshot.path) for snapshot in scan_directory(disk, memtx_dir).snapshots]
    return DiskUsage(
        wal_dir=wal_dir,
        memtx_dir=memtx_dir,
        wal_free_bytes=disk.free_space(wal_dir),
        memtx_free_bytes=disk.free_space(memtx_dir),
        logs=tuple(logs),
        snapshots_bytes=sum(snapshots),
    )


async def free_space(instance: Instance) -> dict[str, Any]:
    """Return the free bytes of the file systems of the directories, or the reason why they are unknown."""
    outside, query = instance.outside, instance.free_space_query
    places = instance.configuration.directories
    try:
        memtx, wal = await query.get(outside, _free_bytes, outside.disk, places, timeout=FREE_SPACE_SECONDS)
    except OSError as error:
        return {"failure": error.strerror or str(error)}
    return {"memtx_free_bytes": memtx, "wal_free_bytes": wal}


def _free_bytes(disk: Disk, places: Iterable[str]) -> list[int]:
    return [disk.free_space(place) for place in places]


def _size(disk: Disk, path: str) -> int:
    try:
        return disk.size(path)
    except FileNotFoundError:  # deleted by garbage collection in the meantime
        return 0


# --- for CALL ---


def box_stat(instance: Instance) -> dict[str, Any]:
    """Return the map that `box.stat()` shows, without rates: clients can compute them from two calls."""
    counters = instance.counters
    totals = {name: sum(counters.operations[kind] for kind in kinds) for name, kinds in OPERATIONS.items()}
    return {name: {"total": total} for name, total in (totals | {"ERROR": counters.errors}).items()}


def box_stat_net(instance: Instance) -> dict[str, Any]:
    """Return the map that `box.stat.net()` shows, without rates."""
    counters = instance.counters
    return {
        "SENT": {"total": counters.sent_bytes},
        "RECEIVED": {"total": counters.received_bytes},
        "CONNECTIONS": {"current": counters.connections, "total": counters.connections_total},
        "REQUESTS": {"current": counters.requests_in_progress, "total": sum(counters.operations)},
    }
