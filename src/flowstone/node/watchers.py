"""Watchers: telling clients of a change of what they asked to be told about (reference section 4.6).

Values of the node's own keys are computed when somebody looks, and compared with what a watcher saw last: whoever
changes something has nothing to announce. `check` is called once per turn and looks at those few keys and at what was
broadcast, however many are watched. A watcher that has not yet answered an event gets no other; when it answers, it
gets the newest value, not the ones between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.iproto.constants import BallotKey, Key
from flowstone.iproto.msgpack import pack
from flowstone.iproto.replies import encode_event
from flowstone.node.elections import MAY_LEAD
from flowstone.node.info import members
from flowstone.node.instance import Instance
from flowstone.replication.election import Mode
from flowstone.replication.vclock import VClock

BALLOT = "internal.ballot"

KEY_SIZE_MAX: Final = 1024
"""Bytes of a watched key. Real servers have no bound; a key is kept for as long as its watcher likes."""

Source = Callable[[], Any]
"""The present value of a key."""

Send = Callable[[bytes], None]
"""Takes a whole packet to one client."""


@dataclass(slots=True)
class _Watch:
    """One key of one client. `seen`: the value sent last; None before any, b"" for a key without a value."""

    send: Send
    sync: int
    seen: bytes | None = None
    is_waiting: bool = False
    """An event was sent and not answered."""


class Watchers:
    """Who watches what on one node. Clients are told apart by any object of theirs, such as their session."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)
        self._values: dict[str, bytes] = {}
        self._watches: dict[str, dict[object, _Watch]] = {}
        self._keys: dict[object, dict[str, None]] = {}
        self._told: dict[str, bytes | None] = {}
        """What the node's own keys stood at when all who watch them knew."""
        self._broadcast: dict[str, None] = {}

    def watch(self, client: object, send: Send, key: str, sync: int) -> None:
        """Registers a watch, and sends the value at once; for one that exists it is the answer to the last event."""
        if len(key.encode("utf-8", "surrogateescape")) > KEY_SIZE_MAX:
            raise errors.Unsupported(f"WATCH does not support keys of more than {KEY_SIZE_MAX} bytes")
        watch = self._watches.setdefault(key, {}).get(client)
        if watch is None:
            watch = self._watches[key][client] = _Watch(send, sync)
            self._keys.setdefault(client, {})[key] = None
        watch.sync = sync
        watch.is_waiting = False
        value = self.value(key)
        if self._told.get(key) != value:
            self._told.pop(key, None)  # by the next check it may be back at what the others know
        self._tell(key, watch, value)

    def unwatch(self, client: object, key: str) -> None:
        keys, watches = self._keys.get(client, {}), self._watches.get(key, {})
        keys.pop(key, None)
        watches.pop(client, None)
        if not keys:
            self._keys.pop(client, None)
        if not watches:
            self._watches.pop(key, None)
            self._told.pop(key, None)

    def forget(self, client: object) -> None:
        """The client is gone."""
        for key in list(self._keys.get(client, ())):
            self.unwatch(client, key)

    def value(self, key: str) -> bytes | None:
        """What the key stands at, as MessagePack; None without a value."""
        source = self._sources.get(key)
        return pack(source()) if source is not None else self._values.get(key)

    def broadcast(self, key: str, value: Any) -> None:
        """Gives a key of the user's own a value; None takes it away."""
        self._values.pop(key, None)
        if value is not None:
            self._values[key] = pack(value)
        self._broadcast[key] = None

    def check(self, *, vclock_counts: bool = False) -> None:
        """Sends what has changed. The ballot holds the vclock, which always moves: that alone counts now and then."""
        for key in self._sources:
            if key in self._watches and (key != BALLOT or vclock_counts):
                value = self.value(key)
                if self._told.get(key) != value:
                    self._told[key] = value
                    self._tell_all(key, value)
        if self._broadcast:
            keys, self._broadcast = self._broadcast, {}
            for key in keys:
                self._tell_all(key, self.value(key))

    def _tell_all(self, key: str, value: bytes | None) -> None:
        for watch in self._watches.get(key, {}).values():
            if not watch.is_waiting:
                self._tell(key, watch, value)

    def _tell(self, key: str, watch: _Watch, value: bytes | None) -> None:
        if watch.seen != (value or b""):
            watch.seen = value or b""
            watch.is_waiting = True
            watch.send(encode_event(watch.sync, pack(key), value))


def sources_of(instance: Instance) -> dict[str, Source]:
    """The keys that every node has."""
    return {
        "box.id": lambda: _id(instance),
        "box.status": lambda: _status(instance),
        "box.election": lambda: _election(instance),
        "box.schema": lambda: {"version": instance.box.schema_version},
        BALLOT: lambda: {Key.BALLOT.value: ballot(instance)},
    }


def _id(instance: Instance) -> dict[str, Any]:
    return {"id": instance.id, "instance_uuid": instance.uuid, "replicaset_uuid": instance.replicaset_uuid}


def _status(instance: Instance) -> dict[str, Any]:
    read_only = instance.configuration.read_only
    return {"is_ro": instance.is_read_only, "is_ro_cfg": read_only, "status": instance.status}


def _election(instance: Instance) -> dict[str, Any]:
    """The term is the one on disk, unlike in `box.info.election`."""
    elections = instance.elections
    role, leader = elections.raft.state.name.lower(), elections.raft.leader
    return {"term": elections.term, "role": role, "is_ro": instance.is_read_only, "leader": leader}


def ballot(instance: Instance) -> dict[int, Any]:
    """What is answered to VOTE, by the keys of the dialect and in their order (reference section 4.3)."""
    vclock, gc_vclock = _shown(instance.vclock), _shown(instance.files.gc_vclock)
    # No instance may join or register through an expelled one.
    read_only, is_loading = instance.configuration.read_only or instance.is_expelled, instance.status == "loading"
    if instance.box.dialect is Dialect.V2_6:
        return {
            BallotKey.IS_RO_CFG.value: read_only,
            BallotKey.IS_RO.value: is_loading or read_only,  # in 2.6 "loading", which it says of read-only ones, too
            BallotKey.VCLOCK.value: vclock,
            BallotKey.GC_VCLOCK.value: gc_vclock,
        }
    return {
        BallotKey.IS_RO_CFG.value: read_only,
        BallotKey.IS_RO.value: is_loading or instance.is_read_only,
        BallotKey.IS_ANON.value: instance.is_anonymous or instance.is_expelled,
        BallotKey.IS_BOOTED.value: not is_loading,
        BallotKey.VCLOCK.value: vclock,
        BallotKey.GC_VCLOCK.value: gc_vclock,
        BallotKey.CAN_LEAD.value: Mode(instance.configuration.election_mode) in MAY_LEAD,
        BallotKey.BOOTSTRAP_LEADER_UUID.value: str(instance.bootstrap_leader_uuid or UUID(int=0)),
        BallotKey.REGISTERED_REPLICA_UUIDS.value: []
        if instance.is_expelled
        else [uuid for _, uuid in members(instance)],
    }


def _shown(vclock: VClock) -> dict[int, int]:
    """Peers see no local rows."""
    return {replica_id: lsn for replica_id, lsn in vclock if replica_id}
