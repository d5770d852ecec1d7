"""All relays of a node, the requests of replicas, and the logs kept for replicas.

`replication/relay/relay_logic.py` has the rules by which requests are rejected. `join_server.py` sends snapshots and
registers replicas; each subscription has a relay (`relay_stream.py`). All relays share one tail of the log
(`node/wal/log_tail.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final
from uuid import UUID

from flowstone.box.access import Privilege
from flowstone.box.dialect import Dialect
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType, type_name
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.requests import Request
from flowstone.node.downstream.join_server import JoinServer
from flowstone.node.downstream.relay_stream import Downstream, Relay, RelayLink
from flowstone.node.info import members
from flowstone.node.instance import Instance
from flowstone.node.wal.gc import Consumer, GarbageCollector
from flowstone.node.wal.journal import WalMode
from flowstone.node.wal.log_tail import LogTail
from flowstone.rate_limit import RateLimit
from flowstone.replication.messages import (
    NIL_UUID,
    decode_fetch_snapshot,
    decode_join,
    decode_register,
    decode_subscribe,
    encode_vclock_reply,
)
from flowstone.replication.relay.relay_logic import RelayFacts, RelayState, RequestOfReplica, refusal
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

REFUSAL_LINES_BURST: Final = 10
REFUSAL_LINE_SECONDS: Final = 1.0
"""Rate limit of log messages about rejected requests: size of a burst, and seconds until one more is allowed."""

_TOO_OLD: Final = (
    "replica %s sent no version in JOIN, like Tarantool before 2.10, which cannot read a schema of dialect 2.11; "
    "if the join fails, delete the replica from _cluster; for such replicas, start the first node of a replica set "
    "with --dialect 2.6"
)


class Relays:
    """The replicas that have subscribed or joined since the start, and their log consumers."""

    def __init__(self, instance: Instance, collector: GarbageCollector) -> None:
        self.instance = instance
        self.on_subscribed: list[Callable[[UUID], None]] = []
        """Called with the UUID of a replica that has subscribed."""
        self.on_ack: list[Callable[[int, VClock], None]] = []
        """Called with the id (0 if anonymous) and the vclock of a replica whose ACK has advanced its vclock."""
        self.on_answer: list[Callable[[int, int, VClock], None]] = []
        """Called with the id of a member, the number of the heartbeat that it answers, and its vclock."""
        self.on_lost: list[Callable[[int], None]] = []
        """Called with the id of a member whose relay has ended."""
        self._collector = collector
        self._is_2_6 = instance.box.dialect is Dialect.V2_6
        self._downstreams: dict[UUID, Downstream] = {}
        self._followers: dict[Relay, None] = {}
        self._joining: dict[UUID, None] = {}
        """Replicas whose JOIN is being served."""
        self._tail: LogTail | None = None
        self._is_pump_due = False
        self._last_refusal = ""
        self._refusal_lines = RateLimit(REFUSAL_LINES_BURST, REFUSAL_LINE_SECONDS)
        self._pause: asyncio.Task[None] | None = None
        instance.elections.on_broadcast.append(self.send_raft)
        self._wait_for_members()

    def _wait_for_members(self) -> None:
        """Pause the collector after a start until all members have reconnected, or for `wal_cleanup_delay`.

        Real servers do the same since 2.8. Servers of 2.6 delete logs that disconnected members need, which then have
        to rejoin.
        """
        others = [uuid for _, text in members(self.instance) if (uuid := UUID(text)) != self.instance.uuid]
        delay = self.instance.configuration.wal_cleanup_delay
        is_awaiting = delay > 0 and not self.instance.is_anonymous
        self._collector.pause(others if is_awaiting else ())
        if self._collector.is_paused:
            self._pause = asyncio.get_running_loop().create_task(self._end_pause(delay))

    async def _end_pause(self, delay: float) -> None:
        await self.instance.outside.clock.sleep(delay)
        self._collector.resume()

    def reconfigure(self) -> None:
        """Apply a changed `wal_cleanup_delay`: restart the pause of the collector, if there is one."""
        if self._pause is not None and self._collector.is_paused:
            self._pause.cancel()
            delay = self.instance.configuration.wal_cleanup_delay
            self._pause = asyncio.get_running_loop().create_task(self._end_pause(delay))

    # --- box.info ---

    def downstream(self, uuid: UUID) -> dict[str, Any] | None:
        replica = self._downstreams.get(uuid)
        return None if replica is None else self._shown(replica)

    def is_intact(self, uuid: UUID) -> bool:
        """Implement `Peers.is_intact`."""
        replica = self._downstreams.get(uuid)
        return replica is not None and replica.relay is not None and replica.relay.is_intact

    @property
    def replicas(self) -> list[Downstream]:
        """Replicas that have subscribed or joined since the start; anonymous ones only while they are connected."""
        return list(self._downstreams.values())

    @property
    def anonymous(self) -> list[tuple[UUID, dict[str, Any]]]:
        """Anonymous replicas, with their `downstream` for `box.info`."""
        replicas = (replica for replica in self._downstreams.values() if not replica.id)
        return [(replica.uuid, shown) for replica in replicas if (shown := self._shown(replica)) is not None]

    def acked(self, uuid: UUID) -> VClock | None:
        """Return the vclock that the replica has acknowledged; None if it is not connected."""
        replica = self._downstreams.get(uuid)
        return replica.relay.acked.vclock if replica is not None and replica.relay is not None else None

    def count_having(self, vclock: VClock) -> int:
        """Return the number of connected members that have acknowledged all rows up to `vclock`."""
        return sum(1 for relay in self._followers if relay.replica.id and vclock <= relay.acked.vclock)

    def _shown(self, replica: Downstream) -> dict[str, Any] | None:
        relay = replica.relay
        if relay is not None:
            idle = self.instance.outside.clock.monotonic() - relay.pulse.row_time
            shown = {"status": replica.state.value, "idle": idle, "vclock": relay.acked.vclock.to_mapping()}
            return shown if self._is_2_6 else shown | {"lag": relay.acked.lag}
        if replica.state is RelayState.OFF:
            return None
        shown = {"status": replica.state.value, "message": replica.message}
        return shown if replica.system_message is None else shown | {"system_message": replica.system_message}

    # --- lifecycle ---

    def member_removed(self, uuid: UUID) -> None:
        """Ignore further ACKs of an expelled member. Its relay runs until the member has the row that expels it."""
        self._collector.came_back(uuid)
        replica = self._downstreams.pop(uuid, None)
        if replica is None:
            return
        replica.id = 0
        if replica.relay is not None:
            replica.relay.expel()
        else:
            self._release(replica)

    def expelled(self) -> None:
        """Stop all relays: this instance is no longer a member."""
        for relay in list(self._followers):
            relay.stop("this instance was expelled from its replica set")
        self._collector.resume()

    def _release(self, replica: Downstream) -> None:
        """Stop keeping logs for an expelled replica."""
        self._set_consumer(replica, None)
        self._collector.collect_soon()

    async def close(self) -> None:
        """Stop all relays. Calling it again has no effect."""
        if self.send_raft in self.instance.elections.on_broadcast:
            self.instance.elections.on_broadcast.remove(self.send_raft)
        if self._pause is not None:
            self._pause.cancel()
        relays = list(self._followers)
        for relay in relays:
            relay.stop("instance is stopping")
        for relay in relays:
            await relay.ended()

    # --- requests of replicas ---

    def serve(self, request: Request, link: RelayLink) -> Coroutine[Any, Any, None]:
        """Serve a request of a replica. A rejection is raised by the call itself, or when the result is awaited."""
        if link.is_busy:
            raise errors.Protocol("Can't process join/subscribe while there are pending requests")
        link.hold()
        return self._serve(request, link)

    async def _serve(self, request: Request, link: RelayLink) -> None:
        handlers = {
            RequestType.JOIN: self._join,
            RequestType.FETCH_SNAPSHOT: self._fetch_snapshot,
            RequestType.REGISTER: self._register,
            RequestType.SUBSCRIBE: self._subscribe,
        }
        try:
            await handlers[RequestType(request.type)](request, link)
        except TarantoolError as error:
            self._log_refusal(request, link, error)
            raise
        finally:
            link.release()

    def _log_refusal(self, request: Request, link: RelayLink, error: TarantoolError) -> None:
        """Log a rejection, unless it repeats the last one: replicas retry every second.

        The rate is limited, too, because any client can send different requests that are rejected.
        """
        text = f"{type_name(request.type)} from {link.peer.rpartition(':')[0]} rejected: {error.message}"
        level = logging.INFO if isinstance(error, errors.Loading) else logging.WARNING
        if text == self._last_refusal or self._refusal_lines.take(self.instance.outside.clock.monotonic()) is None:
            level = logging.DEBUG
        else:
            self._last_refusal = text
        LOG.log(level, "%s", text, extra={"peer": link.peer})

    def _check(self, asked: RequestOfReplica, link: RelayLink) -> Downstream:
        """Return the replica that sent the request; raise an error if the request is rejected."""
        uuid = asked.instance_uuid or NIL_UUID
        replica = self._downstreams.get(uuid) or Downstream(uuid)
        replica.id = next((number for number, member in members(self.instance) if UUID(member) == uuid), 0)
        error = refusal(asked, self._facts(replica, link.user))
        if error is not None:
            raise error
        return replica

    def _facts(self, replica: Downstream, user: int) -> RelayFacts:
        instance = self.instance
        access, cluster = instance.box.access, instance.box.spaces[CLUSTER_ID]
        may_write = lambda: access.check(  # noqa: E731
            user, Privilege.WRITE, "space", CLUSTER_ID, cluster.definition.owner, cluster.name
        )
        return RelayFacts(
            self._is_2_6,
            instance.uuid,
            instance.replicaset_uuid,
            replica_id=replica.id,
            is_replaced=self._is_replaced(replica.uuid),
            is_followed=replica.relay is not None,
            is_joining=replica.uuid in self._joining,
            is_loading=instance.status == "loading",
            is_anonymous=instance.is_anonymous,
            is_expelled=instance.is_expelled,
            has_log=instance.journal.mode is not WalMode.NONE,
            read_only=self._read_only(),
            no_read=_refused(lambda: access.check_universe(user, Privilege.READ)),
            no_write=_refused(may_write),
        )

    def _is_replaced(self, uuid: UUID) -> bool:
        """Return True if the instance was a member, and its id now belongs to another member."""
        former = {number for number, member in self.instance.box.former_members if member == uuid}
        return any(number in former and UUID(member) != uuid for number, member in members(self.instance))

    def _read_only(self) -> TarantoolError | None:
        instance = self.instance
        if not instance.is_read_only:
            return None
        return instance.box.read_only_error()

    async def _join(self, request: Request, link: RelayLink) -> None:
        asked = decode_join(request.body, is_2_6=self._is_2_6)
        replica = self._check(asked, link)
        join = JoinServer(self.instance, self.wal_dir, link, request.sync, asked.version)
        # Created before the read view, so that logs written after the view are kept.
        consumer = self._collector.add_consumer(f"replica {asked.instance_uuid}", self.instance.vclock)
        self._joining[asked.instance_uuid] = None
        try:
            LOG.info("joining replica %s at %s", asked.instance_uuid, link.peer, extra={"peer": link.peer})
            if not asked.version and not self._is_2_6:
                LOG.warning(_TOO_OLD, asked.instance_uuid)
            start = await join.send_snapshot()
            LOG.info("initial data sent.")
            error = self._read_only() if not replica.id else None
            if error is not None:
                raise error
            await join.register(asked.instance_uuid, asked.instance_name)
            stop = self.instance.vclock
            link.write(encode_vclock_reply(stop, request.sync))
            await join.send_log(start, stop)
            LOG.info("final data sent.")
        except BaseException:
            self._collector.remove_consumer(consumer)
            raise
        finally:
            self._joining.pop(asked.instance_uuid, None)
        join.send_position()
        self._registered(replica, consumer, stop)

    async def _fetch_snapshot(self, request: Request, link: RelayLink) -> None:
        asked = decode_fetch_snapshot(request.body, is_2_6=self._is_2_6)
        self._check(asked, link)
        LOG.info("sending read-view to replica at %s", link.peer)
        join = JoinServer(self.instance, self.wal_dir, link, request.sync, asked.version)
        await join.send_snapshot()
        LOG.info("read-view sent.")
        join.send_position()

    async def _register(self, request: Request, link: RelayLink) -> None:
        asked = decode_register(request.body, is_2_6=self._is_2_6)
        replica = self._check(asked, link)
        # 2.6 sends the rows written from now on; newer servers send all rows that the replica does not have.
        start = self.instance.vclock if self._is_2_6 else asked.vclock
        consumer = self._collector.add_consumer(f"replica {asked.instance_uuid}", start)
        try:
            LOG.info("registering replica %s at %s", asked.instance_uuid, link.peer, extra={"peer": link.peer})
            join = JoinServer(self.instance, self.wal_dir, link, request.sync)
            await join.register(asked.instance_uuid, asked.instance_name)
            stop = self.instance.vclock
            await join.send_log(start, stop)
            LOG.info("final data sent.")
        except BaseException:
            self._collector.remove_consumer(consumer)
            raise
        join.send_position()
        self._registered(replica, consumer, stop)

    def _registered(self, replica: Downstream, consumer: Consumer, vclock: VClock) -> None:
        """Record a joined or registered replica, which has all rows up to `vclock`."""
        replica.id = next(number for number, uuid in members(self.instance) if UUID(uuid) == replica.uuid)
        self._downstreams[replica.uuid] = replica
        consumer.vclock = vclock
        self._set_consumer(replica, consumer)
        self._collector.came_back(replica.uuid)

    async def _subscribe(self, request: Request, link: RelayLink) -> None:
        asked = decode_subscribe(request.body, is_2_6=self._is_2_6)
        replica = self._check(asked, link)
        self._downstreams[replica.uuid] = replica
        if replica.id:
            # A new consumer: the replica may have lost rows that it had acknowledged.
            consumer = self._collector.add_consumer(f"replica {replica.uuid}", asked.vclock)
            self._set_consumer(replica, consumer)
            self._collector.came_back(replica.uuid)
        whom = {"peer": link.peer, "replica_id": replica.id, "replica": str(replica.uuid)}
        LOG.info("subscribed replica %s at %s", replica.uuid, link.peer, extra=whom)
        LOG.info("remote vclock %s local vclock %s", asked.vclock, self.instance.vclock)
        relay = replica.relay = Relay(self, replica, link, asked, request.sync)
        replica.become(RelayState.FOLLOW)
        self._followers[relay] = None
        unread = link.hand_over(relay)
        relay.start()
        if relay in self._followers:
            # After the start: this may change the election state, which must not be sent before the reply to SUBSCRIBE.
            self.instance.elections.connection(replica.id, downstream=True)
            for tell in self.on_subscribed:
                tell(replica.uuid)
        relay.received(unread)

    # --- `Following`, for relays ---

    @property
    def wal_dir(self) -> str:
        return self._collector.wal_dir

    @property
    def tail(self) -> LogTail:
        """The tail of the log, kept from the first access on while a replica follows."""
        if self._tail is None:
            journal = self.instance.journal
            self._tail = LogTail(journal.written_vclock, self._rows_written)
            journal.on_written.append(self._tail.append)
        return self._tail

    def forget(self, relay: Relay) -> None:
        """Remove a relay that has ended."""
        replica = relay.replica
        self._followers.pop(relay, None)
        self.instance.elections.connection(replica.id, downstream=False)
        for tell in self.on_lost if replica.id else ():
            tell(replica.id)
        if relay.is_expelled:
            self._release(replica)
        elif not replica.id:
            self._downstreams.pop(replica.uuid, None)  # nothing else removes an anonymous replica
        if not self._followers and self._tail is not None:
            self.instance.journal.on_written.remove(self._tail.append)
            self._tail = None

    def acknowledged(self, replica: Downstream, vclock: VClock) -> None:
        """Record that an ACK has advanced the vclock of the replica."""
        if replica.consumer is not None:
            self._collector.advance(replica.consumer, vclock)
        for tell in self.on_ack:
            tell(replica.id, vclock)

    def answered(self, replica: Downstream, vclock_sync: int, vclock: VClock) -> None:
        """Pass on the vclock of the replica, from its answer to the heartbeat with number `vclock_sync`."""
        if replica.id:
            for tell in list(self.on_answer):
                tell(replica.id, vclock_sync, vclock)

    def synchronize(self) -> dict[int, int]:
        """Send a heartbeat to all members; return, by id, the first number whose answers are newer than this call.

        A member that does not follow now gets the heartbeat when it subscribes. An unknown one begins with number 1.
        """
        for relay in self._followers:
            if relay.replica.id:
                relay.synchronize()
        return {replica.id: replica.vclock_sync + 1 for replica in self._downstreams.values() if replica.id}

    def send_raft(self) -> None:
        """Send the election state to all replicas."""
        self._let_all(Relay.elections_changed)

    # --- log consumers and the tail ---

    def _set_consumer(self, replica: Downstream, consumer: Consumer | None) -> None:
        before, replica.consumer = replica.consumer, consumer
        if before is not None:
            self._collector.remove_consumer(before)

    def _rows_written(self) -> None:
        """Schedule the relays. All writes of one iteration of the event loop are sent together."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send the sealed tail to all relays, and trim it."""
        self._is_pump_due = False
        tail = self._tail
        if tail is None:
            return
        tail.seal()
        self._let_all(Relay.push)
        numbers = [relay.number for relay in self._followers]
        # A relay that reads files may join the tail at any chunk, so all are kept, up to the size limit.
        tail.trim(0 if None in numbers else min((number for number in numbers if number is not None), default=tail.end))

    def _let_all(self, do: Callable[[Relay], None]) -> None:
        for relay in list(self._followers):
            try:
                do(relay)
            except Exception as error:
                LOG.exception("relay to %s failed", relay.replica.uuid)
                relay.stop(str(error))


def _refused(check: Callable[[], None]) -> TarantoolError | None:
    """Return the error that `check` raises; None if it succeeds."""
    try:
        check()
    except TarantoolError as error:
        return error
    return None
