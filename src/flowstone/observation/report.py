"""The report of one server: `box.info` of any version, in one form.

Pure: `report_of` converts the answers of a server to a `Report`. Versions differ: 2.6.0 has no election and no queue,
`lag` of a downstream came with 2.10, the replica set's UUID moved in 3.0. A value that a server does not report, or
reports with the wrong type, is None here. The fields have the names of `box.info`, because people search for these
names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.replication.membership import quorum

VClock = dict[int, int]
"""LSN by replica id, without component 0 (local rows)."""

TEXT_MAX: Final = 1000
"""Limit of a server's text, in characters: more than twice the longest message of a real server."""

_NO_LAG: Final = 1e9
"""Larger values of a reported lag, in seconds, are not real lags. A follower that has received no row since it
connected reports 100 years; 2.6, to which newer masters send heartbeats without a timestamp, reports the years since
1970."""

_PLAIN: Final = (str, bool, int, float)

_OF_USERS: Final = re.compile(r"""in space ['"]_v?user['"]""")


class ReportedUpstream(msgspec.Struct, frozen=True, kw_only=True):
    """The server as a follower of a peer. `lag` and `idle` are in seconds."""

    status: str
    peer: str | None = None
    lag: float | None = None
    idle: float | None = None
    message: str | None = None
    system_message: str | None = None


class ReportedDownstream(msgspec.Struct, frozen=True, kw_only=True):
    """A peer as a follower of the server: the position it has acknowledged, and the delay of acknowledgements."""

    status: str
    vclock: VClock = {}
    lag: float | None = None
    idle: float | None = None
    message: str | None = None
    system_message: str | None = None


class ReportedPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the replica set as the server sees it, including itself. Anonymous replicas have the id 0."""

    id: int
    uuid: str
    name: str | None = None
    lsn: int = 0
    upstream: ReportedUpstream | None = None
    downstream: ReportedDownstream | None = None


class Election(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is follower, candidate or leader; `leader` and `vote` are replica ids, 0 for none."""

    state: str
    term: int = 1
    leader: int = 0
    vote: int = 0
    leader_name: str | None = None
    leader_idle: float | None = None


class ReportedQueue(msgspec.Struct, frozen=True, kw_only=True):
    """Pending synchronous transactions; `age` is that of the oldest one, in seconds, `size` is in bytes."""

    len: int = 0
    owner: int = 0
    term: int = 0
    busy: bool = False
    age: float | None = None
    size: int | None = None
    confirm_lag: float | None = None
    quorum: int | None = None
    rollback_count: int | None = None


class ReportedConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer of the log, usually a replica: logs from `vclock` on are kept for it."""

    name: str
    vclock: VClock = {}
    signature: int = 0

    @property
    def replica_uuid(self) -> str | None:
        """UUID of the replica, taken from the consumer's name; None if the consumer is not a replica."""
        return self.name.removeprefix("replica ") if self.name.startswith("replica ") else None


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """The start of the oldest log, the consumers that logs are kept for, and the snapshots."""

    vclock: VClock = {}
    signature: int = 0
    is_paused: bool = False
    checkpoint_is_in_progress: bool = False
    checkpoints: tuple[VClock, ...] = ()
    consumers: tuple[ReportedConsumer, ...] = ()

    @property
    def slowest(self) -> ReportedConsumer | None:
        """The consumer that needs the oldest log; None if there are no consumers."""
        return min(self.consumers, key=lambda consumer: consumer.signature, default=None)


class ReportedWal(msgspec.Struct, frozen=True, kw_only=True):
    """Failed log writes of a node whose last write failed: the reason, and the number of failures since the start."""

    failure: str
    failures: int = 1


class ReportedDisk(msgspec.Struct, frozen=True, kw_only=True):
    """Free bytes of the file systems of a node's directories; `failure` if they cannot be determined."""

    wal_free_bytes: int | None = None
    memtx_free_bytes: int | None = None
    failure: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one server at one moment."""

    address: str
    """The address at which it was queried, without a password."""

    package: str
    version: str
    id: int
    uuid: str
    name: str | None = None
    replicaset_uuid: str | None = None
    replicaset_name: str | None = None
    status: str
    ro: bool
    ro_reason: str | None = None
    listen: str | None = None
    pid: int | None = None
    uptime: float = 0
    lsn: int = 0
    vclock: VClock = {}
    replication: tuple[ReportedPeer, ...] = ()
    anonymous: tuple[ReportedPeer, ...] = ()
    election: Election | None = None
    queue: ReportedQueue | None = None
    gc: Retention | None = None
    cfg: dict[str, Any] | None = None
    """Options of `box.cfg` that cannot contain a secret; None if the user may not read them."""

    upstreams_configured: int | None = None
    """Number of servers in `replication`, without the server itself if `listen` identifies it; None if unknown."""

    wal: ReportedWal | None = None
    """Set for a node whose last write to the log failed; real servers do not show it."""

    disk: ReportedDisk | None = None
    """Set for a node, if the user may query it."""

    @property
    def signature(self) -> int:
        return sum(self.vclock.values())

    @property
    def is_flowstone(self) -> bool:
        return self.package == "Flowstone"

    @property
    def why_read_only(self) -> str | None:
        """`ro_reason`, derived from status and options for servers before 2.10, which lack it; None if writable."""
        if not self.ro or self.ro_reason is not None:
            return self.ro_reason
        if self.status in ("orphan", "loading", "hot_standby"):
            return self.status
        if (self.cfg or {}).get("read_only"):
            return "config"
        return "unknown"

    def quorum_of(self, members: int) -> int | None:
        """Return the quorum of a set of `members` by the server's options; None if they are unknown."""
        option = (self.cfg or {}).get(quorum.OPTION)
        try:
            return quorum.Quorum(option).of(members) if isinstance(option, int | str) else None
        except FlowstoneError:  # a formula that cannot be evaluated here, such as one with `math.random`
            return None


class Unreachable(msgspec.Struct, frozen=True, kw_only=True):
    """A server that could not be queried, and why. `is_denied`: it answers, but denies the user access."""

    address: str
    reason: str
    hint: str | None = None
    is_denied: bool = False
    uuid: str | None = None
    """UUID of the instance that last greeted at this address, now or in an earlier survey, or that is expected there;
    None if it is unknown."""


def report_of(
    address: str,
    info: Mapping[str, Any],
    *,
    gc: Any = None,
    anonymous: Any = None,
    cfg: Any = None,
    upstreams_configured: int | None = None,
    disk: Any = None,
) -> Report:
    """Convert the results of `box.info`, `box.info.gc()`, `box.info.replication_anon()`, `box.cfg` and
    `flowstone.disk_usage` to a report."""
    replicaset, cluster = _table(info.get("replicaset")), _table(info.get("cluster"))
    return Report(
        address=address,
        package=_text(info.get("package")) or "Tarantool",
        version=_text(info.get("version")) or "",
        id=_integer(info.get("id")),
        uuid=_text(info.get("uuid")) or "",
        name=_text(info.get("name")),
        replicaset_uuid=_text(replicaset.get("uuid", cluster.get("uuid"))),
        replicaset_name=_text(replicaset.get("name")),
        status=_text(info.get("status")) or "unknown",
        ro=bool(info.get("ro")),
        ro_reason=_text(info.get("ro_reason")),
        listen=_listen(info.get("listen")),
        pid=_count(info.get("pid")),
        uptime=_number(info.get("uptime")) or 0.0,
        lsn=_integer(info.get("lsn")),
        vclock=vclock_of(info.get("vclock")),
        replication=_peers(info.get("replication")),
        anonymous=_peers(anonymous),
        election=_election(_table(info.get("election"))),
        queue=_queue(_table(info.get("synchro"))),
        gc=_retention(_table(gc)),
        cfg=_options(cfg),
        upstreams_configured=upstreams_configured,
        wal=_wal(_table(info.get("wal"))),
        disk=_disk(_table(disk)),
    )


def vclock_of(value: Any) -> VClock:
    """Convert a vclock, which Lua sends as an array if its keys are 1, 2, …; drop component 0 (local rows)."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value, 1))
    found = {_count(replica_id): _count(lsn) for replica_id, lsn in _table(value).items()}
    return dict(sorted((replica_id, lsn) for replica_id, lsn in found.items() if replica_id and lsn is not None))


def _peers(value: Any) -> tuple[ReportedPeer, ...]:
    peers = [_peer(row) for row in _rows(value) if isinstance(row, Mapping)]
    return tuple(sorted(peers, key=lambda peer: (peer.id, peer.uuid)))


def _peer(row: Mapping[str, Any]) -> ReportedPeer:
    upstream, downstream = _table(row.get("upstream")), _table(row.get("downstream"))
    return ReportedPeer(
        id=_integer(row.get("id")),
        uuid=_text(row.get("uuid")) or "",
        name=_text(row.get("name")),
        lsn=_integer(row.get("lsn")),
        upstream=ReportedUpstream(peer=_text(upstream.get("peer")), **_link(upstream)) if upstream else None,
        downstream=ReportedDownstream(vclock=vclock_of(downstream.get("vclock")), **_link(downstream))
        if downstream
        else None,
    )


def _link(side: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": _text(side.get("status")) or "unknown",
        "lag": _lag(side.get("lag")),
        "idle": _number(side.get("idle")),
        "message": _message(side.get("message")),
        "system_message": _message(side.get("system_message")),
    }


def _election(table: Mapping[str, Any]) -> Election | None:
    if not table:
        return None
    return Election(
        state=_text(table.get("state")) or "follower",
        term=_integer(table.get("term")),
        leader=_integer(table.get("leader")),
        vote=_integer(table.get("vote")),
        leader_name=_text(table.get("leader_name")),
        leader_idle=_number(table.get("leader_idle")),
    )


def _queue(synchro: Mapping[str, Any]) -> ReportedQueue | None:
    table = _table(synchro.get("queue"))
    if not table:
        return None
    return ReportedQueue(
        len=_integer(table.get("len")),
        owner=_integer(table.get("owner")),
        term=_integer(table.get("term")),
        busy=bool(table.get("busy")),
        age=_number(table.get("age")),
        size=_count(table.get("size")),
        confirm_lag=_number(table.get("confirm_lag")),
        quorum=_count(synchro.get("quorum")),
        rollback_count=_count(table.get("rollback_count")),
    )


def _retention(table: Mapping[str, Any]) -> Retention | None:
    if not table:
        return None
    consumers = [
        ReportedConsumer(
            name=_text(row.get("name")) or "",
            vclock=vclock_of(row.get("vclock")),
            signature=_integer(row.get("signature")),
        )
        for row in map(_table, _rows(table.get("consumers")))
    ]
    return Retention(
        vclock=vclock_of(table.get("vclock")),
        signature=_integer(table.get("signature")),
        is_paused=bool(table.get("is_paused")),
        checkpoint_is_in_progress=bool(table.get("checkpoint_is_in_progress")),
        checkpoints=tuple(vclock_of(_table(row).get("vclock")) for row in _rows(table.get("checkpoints"))),
        consumers=tuple(consumers),
    )


def _wal(table: Mapping[str, Any]) -> ReportedWal | None:
    failure = _text(table.get("failure"))
    return ReportedWal(failure=failure, failures=_integer(table.get("failures"))) if failure is not None else None


def _disk(table: Mapping[str, Any]) -> ReportedDisk | None:
    if not table:
        return None
    return ReportedDisk(
        wal_free_bytes=_count(table.get("wal_free_bytes")),
        memtx_free_bytes=_count(table.get("memtx_free_bytes")),
        failure=_text(table.get("failure")),
    )


def _options(value: Any) -> dict[str, Any] | None:
    """Return the options with plain values that JSON can hold; None if there are none."""
    found = {
        printable(str(name)): printable(option) if isinstance(option, str) else option
        for name, option in _table(value).items()
        if isinstance(option, _PLAIN) and not (isinstance(option, float) and not math.isfinite(option))
    }
    return found or None


def _table(value: Any) -> Mapping[Any, Any]:
    """Return a mapping; anything else, such as the array that Lua sends for an empty table, becomes an empty one."""
    return value if isinstance(value, Mapping) else {}


def _rows(value: Any) -> Iterable[Any]:
    """Return the values of a Lua table, sent as an array or as a mapping."""
    return value if isinstance(value, list | tuple) else _table(value).values()


def _count(value: Any) -> int | None:
    """Convert a number, which Lua may send as a double, to an integer; None if it is out of range."""
    return int(value) if isinstance(value, int | float) and abs(value) < 2**64 else None


def _integer(value: Any) -> int:
    return _count(value) or 0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _lag(value: Any) -> float | None:
    lag = _number(value)
    return None if lag is None or lag >= _NO_LAG else lag


def _text(value: Any) -> str | None:
    return printable(str(value)) if value is not None and value != "" else None


def _message(value: Any) -> str | None:
    """Return the message of a link without tuples of `_user`: they contain password hashes, which are secrets."""
    text = _text(value)
    return text.partition(" with old tuple - ")[0] if text is not None and _OF_USERS.search(text) else text


def _listen(value: Any) -> str | None:
    """Return `listen` as text; several addresses come as an array."""
    return _text(", ".join(map(str, value))) if isinstance(value, list | tuple) else _text(value)


def printable(text: str) -> str:
    """Return a server's text made safe for a terminal: one line of limited length, without control characters.

    Backquotes are replaced, too: our sentences use them to mark commands.
    """
    line = " ".join(text[:TEXT_MAX].replace("`", "'").split())
    return "".join(char if char.isprintable() else "�" for char in line)
