"""What one server says of itself: `box.info` of any version, in one shape.

Pure: `report_of` takes what was answered and gives a `Report`. Versions differ in what they show: 2.6.0 has no election
and no queue, `lag` of a downstream came with 2.10, the replica set's UUID moved in 3.0; what a server does not show, or
shows in a type that it cannot have, is None here. The names are `box.info`'s own, because they are what people search
for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.replication import quorum

VClock = dict[int, int]
"""LSN by replica id, without the component of local rows."""

TEXT_MAX: Final = 1000
"""Characters of a text that are kept: the longest message of a real server has less than half of them."""

_NO_LAG: Final = 1e9
"""Seconds. Who has got no row since it connected shows a hundred years, and 2.6, to which newer masters send heartbeats
without a time, the years since 1970."""

_PLAIN: Final = (str, bool, int, float)

_OF_USERS: Final = re.compile(r"""in space ['"]_v?user['"]""")


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """How the server follows a peer. `lag` and `idle` are in seconds."""

    status: str
    peer: str | None = None
    lag: float | None = None
    idle: float | None = None
    message: str | None = None
    system_message: str | None = None


class Downstream(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer follows the server: what it has acknowledged, and how long that takes."""

    status: str
    vclock: VClock = {}
    lag: float | None = None
    idle: float | None = None
    message: str | None = None
    system_message: str | None = None


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the replica set, as the server sees it; itself, too. Anonymous ones have the id 0."""

    id: int
    uuid: str
    name: str | None = None
    lsn: int = 0
    upstream: Upstream | None = None
    downstream: Downstream | None = None


class Election(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is follower, candidate or leader; `leader` and `vote` are replica ids, 0 for nobody."""

    state: str
    term: int = 1
    leader: int = 0
    vote: int = 0
    leader_name: str | None = None
    leader_idle: float | None = None


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Synchronous transactions that wait for their quorum; `age` is that of the first, in seconds, `size` in bytes."""

    len: int = 0
    owner: int = 0
    term: int = 0
    busy: bool = False
    age: float | None = None
    size: int | None = None
    confirm_lag: float | None = None
    quorum: int | None = None
    rollback_count: int | None = None


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody for whom logs are kept, from `vclock` on."""

    name: str
    vclock: VClock = {}
    signature: int = 0

    @property
    def replica_uuid(self) -> str | None:
        """Of the replica that it is, which its name tells."""
        return self.name.removeprefix("replica ") if self.name.startswith("replica ") else None


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Where the oldest log begins that is kept, for whom, and what snapshots there are."""

    vclock: VClock = {}
    signature: int = 0
    is_paused: bool = False
    checkpoint_is_in_progress: bool = False
    checkpoints: tuple[VClock, ...] = ()
    consumers: tuple[Consumer, ...] = ()

    @property
    def slowest(self) -> Consumer | None:
        """For whom the oldest log is kept; None where nobody needs one."""
        return min(self.consumers, key=lambda consumer: consumer.signature, default=None)


class Wal(msgspec.Struct, frozen=True, kw_only=True):
    """Failed log writes of a node whose last write failed: the reason, and the number of failures since the start."""

    failure: str
    failures: int = 1


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """Free bytes of the file systems of a node's directories; `failure` if they cannot be determined."""

    wal_free_bytes: int | None = None
    memtx_free_bytes: int | None = None
    failure: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one moment."""

    address: str
    """Where it was asked; never with a password."""

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
    replication: tuple[Peer, ...] = ()
    anonymous: tuple[Peer, ...] = ()
    election: Election | None = None
    queue: Queue | None = None
    gc: Retention | None = None
    cfg: dict[str, Any] | None = None
    """`box.cfg` where it may be read, without what could hold a secret."""

    upstreams_configured: int | None = None
    """How many other servers `replication` lists, or all where `listen` does not tell; None if options are unknown."""

    wal: Wal | None = None
    """Set for a node whose last write to the log failed; real servers do not show it."""

    disk: Disk | None = None
    """Set for a node whose user may query it."""

    @property
    def signature(self) -> int:
        return sum(self.vclock.values())

    @property
    def is_flowstone(self) -> bool:
        return self.package == "Flowstone"

    @property
    def why_read_only(self) -> str | None:
        """`ro_reason`, and for servers before 2.10, which do not tell, what explains it; None where it is writable."""
        if not self.ro or self.ro_reason is not None:
            return self.ro_reason
        if self.status in ("orphan", "loading", "hot_standby"):
            return self.status
        if (self.cfg or {}).get("read_only"):
            return "config"
        return "unknown"

    def quorum_of(self, members: int) -> int | None:
        """How many of so many members must have a synchronous transaction, by its options; None: they do not tell."""
        option = (self.cfg or {}).get(quorum.OPTION)
        try:
            return quorum.Quorum(option).of(members) if isinstance(option, int | str) else None
        except FlowstoneError:  # a formula with a dice in it
            return None


class Unreachable(msgspec.Struct, frozen=True, kw_only=True):
    """A server that could not be asked, and why. `is_denied`: it is there, but its user may not look."""

    address: str
    reason: str
    hint: str | None = None
    is_denied: bool = False


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
    """The report that `box.info`, `box.info.gc()`, `box.info.replication_anon()`, `box.cfg` and
    `flowstone.disk_usage` make."""
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
    """Lua shows a table that counts from 1 as an array; component 0 is local to a server and no position."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value, 1))
    found = {_count(replica_id): _count(lsn) for replica_id, lsn in _table(value).items()}
    return dict(sorted((replica_id, lsn) for replica_id, lsn in found.items() if replica_id and lsn is not None))


def _peers(value: Any) -> tuple[Peer, ...]:
    peers = [_peer(row) for row in _rows(value) if isinstance(row, Mapping)]
    return tuple(sorted(peers, key=lambda peer: (peer.id, peer.uuid)))


def _peer(row: Mapping[str, Any]) -> Peer:
    upstream, downstream = _table(row.get("upstream")), _table(row.get("downstream"))
    return Peer(
        id=_integer(row.get("id")),
        uuid=_text(row.get("uuid")) or "",
        name=_text(row.get("name")),
        lsn=_integer(row.get("lsn")),
        upstream=Upstream(peer=_text(upstream.get("peer")), **_link(upstream)) if upstream else None,
        downstream=Downstream(vclock=vclock_of(downstream.get("vclock")), **_link(downstream)) if downstream else None,
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


def _queue(synchro: Mapping[str, Any]) -> Queue | None:
    table = _table(synchro.get("queue"))
    if not table:
        return None
    return Queue(
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
        Consumer(
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


def _wal(table: Mapping[str, Any]) -> Wal | None:
    failure = _text(table.get("failure"))
    return Wal(failure=failure, failures=_integer(table.get("failures"))) if failure is not None else None


def _disk(table: Mapping[str, Any]) -> Disk | None:
    if not table:
        return None
    return Disk(
        wal_free_bytes=_count(table.get("wal_free_bytes")),
        memtx_free_bytes=_count(table.get("memtx_free_bytes")),
        failure=_text(table.get("failure")),
    )


def _options(value: Any) -> dict[str, Any] | None:
    """Without what is no plain value; None where nothing is known."""
    found = {
        printable(str(name)): printable(option) if isinstance(option, str) else option
        for name, option in _table(value).items()
        if isinstance(option, _PLAIN)
    }
    return found or None


def _table(value: Any) -> Mapping[Any, Any]:
    """An empty table of Lua comes as an empty array."""
    return value if isinstance(value, Mapping) else {}


def _rows(value: Any) -> Iterable[Any]:
    """A table whose keys count, or are of no interest."""
    return value if isinstance(value, list | tuple) else _table(value).values()


def _count(value: Any) -> int | None:
    """Lua's numbers may come as doubles; none of ours is as large as a double can be."""
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
    """What a link says, without tuples of users: the hash of a password is as good as the password."""
    text = _text(value)
    return text.partition(" with old tuple - ")[0] if text is not None and _OF_USERS.search(text) else text


def _listen(value: Any) -> str | None:
    """Several addresses are an array."""
    return _text(", ".join(map(str, value))) if isinstance(value, list | tuple) else _text(value)


def printable(text: str) -> str:
    """Text of a server as a terminal may show it: one line of bounded length, without what moves cursors.

    Backquotes go, too: in sentences of ours they are around commands.
    """
    line = " ".join(text[:TEXT_MAX].replace("`", "'").split())
    return "".join(char if char.isprintable() else "�" for char in line)
