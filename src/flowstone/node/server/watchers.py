"""Watchers: notify clients of changes of the keys that they watch (`docs/spec/iproto.md#watchers`).

Values of the built-in keys are computed on demand and compared with the value that a watcher got last, so code that
changes them sends no notification. `check`, called once per turn, compares only the few built-in keys and the keys that
were broadcast. A watcher that has not acknowledged an event gets no further event; when it acknowledges, it gets the
newest value, not the values in between.
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
from flowstone.node.info import members
from flowstone.node.instance import Instance
from flowstone.node.synchro.elections import MAY_LEAD
from flowstone.replication.raft.election import ElectionMode
from flowstone.replication.vclock import VClock

BALLOT = "internal.ballot"

KEY_SIZE_MAX: Final = 1024
"""Bytes of a watched key, which is kept until its watcher is removed. Real servers have no limit."""

Source = Callable[[], Any]
"""Returns the present value of a key."""

Send = Callable[[bytes], None]
"""Sends a packet to one client."""


@dataclass(slots=True)
class _Watch:
    """One key of one client. `seen` is the value sent last: None before the first event, b"" for a key without a
    value."""

    send: Send
    sync: int
    seen: bytes | None = None
    is_waiting: bool = False
    """True if an event was sent and not acknowledged."""


class Watchers:
    """The watchers of one node. An object such as its session identifies a client."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)
        self._values: dict[str, bytes] = {}
        self._watches: dict[str, dict[object, _Watch]] = {}
        self._keys: dict[object, dict[str, None]] = {}
        self._told: dict[str, bytes | None] = {}
        """Values of the built-in keys that all their watchers have got, or get with their next acknowledgement."""
        self._broadcast: dict[str, None] = {}

    def watch(self, client: object, send: Send, key: str, sync: int) -> None:
        """Register a watch and send the value at once; if the watch exists, acknowledge its last event.

        Raise Unsupported if the key is too long.
        """
        if len(key.encode("utf-8", "surrogateescape")) > KEY_SIZE_MAX:
            raise errors.Unsupported(f"WATCH does not support keys longer than {KEY_SIZE_MAX} bytes")
        watch = self._watches.setdefault(key, {}).get(client)
        if watch is None:
            watch = self._watches[key][client] = _Watch(send, sync)
            self._keys.setdefault(client, {})[key] = None
        watch.sync = sync
        watch.is_waiting = False
        value = self.value(key)
        if self._told.get(key) != value:
            self._told.pop(key, None)  # the key may have its old value again at the next check
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
        """Remove all watches of a client."""
        for key in list(self._keys.get(client, ())):
            self.unwatch(client, key)

    def value(self, key: str) -> bytes | None:
        """Return the present value of the key as MessagePack; None without a value."""
        source = self._sources.get(key)
        return pack(source()) if source is not None else self._values.get(key)

    def broadcast(self, key: str, value: Any) -> None:
        """Set the value of a user key, for the next `check`; None removes it."""
        self._values.pop(key, None)
        if value is not None:
            self._values[key] = pack(value)
        self._broadcast[key] = None

    def check(self, *, vclock_counts: bool = False) -> None:
        """Send changed values. The ballot is checked only with `vclock_counts`: its vclock changes with every write."""
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
    """Return the built-in keys and their sources."""
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
    """Return the value of `box.election`. Its term is the persisted one, unlike in `box.info.election`."""
    elections = instance.elections
    role, leader = elections.raft.state.name.lower(), elections.raft.leader
    return {"term": elections.term, "role": role, "is_ro": instance.is_read_only, "leader": leader}


def ballot(instance: Instance) -> dict[int, Any]:
    """Return the ballot, with the keys of the dialect in their order (`docs/spec/replication.md#ballot`)."""
    vclock, gc_vclock = _shown(instance.vclock), _shown(instance.files.gc_vclock)
    # No instance may join or register through an expelled one.
    read_only, is_loading = instance.configuration.read_only or instance.is_expelled, instance.status == "loading"
    if instance.box.dialect is Dialect.V2_6:
        return {
            BallotKey.IS_RO_CFG.value: read_only,
            BallotKey.IS_RO.value: is_loading or read_only,  # IS_LOADING in 2.6, which also sets it if read-only
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
        BallotKey.CAN_LEAD.value: ElectionMode(instance.configuration.election_mode) in MAY_LEAD,
        BallotKey.BOOTSTRAP_LEADER_UUID.value: str(instance.bootstrap_leader_uuid or UUID(int=0)),
        BallotKey.REGISTERED_REPLICA_UUIDS.value: []
        if instance.is_expelled
        else [uuid for _, uuid in members(instance)],
    }


def _shown(vclock: VClock) -> dict[int, int]:
    """Return the vclock without local rows, which peers do not see."""
    return {replica_id: lsn for replica_id, lsn in vclock if replica_id}
