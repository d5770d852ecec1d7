"""Relays: all replicas that follow this node, or have followed it, and what they keep of its logs.

Requests of replicas are served here: refused by the rules of `replication/relay.py`, answered with data by
`relay_join.py`, and followed by one relay each (`relay_stream.py`); all of these feed from one `tail.py`.
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
from flowstone.node.gc import Consumer, GarbageCollector
from flowstone.node.info import members
from flowstone.node.instance import Instance
from flowstone.node.journal import WalMode
from flowstone.node.relay_join import Join
from flowstone.node.relay_stream import Downstream, Link, Relay
from flowstone.node.tail import Tail
from flowstone.rate_limit import RateLimit
from flowstone.replication.messages import (
    NIL_UUID,
    decode_fetch_snapshot,
    decode_join,
    decode_register,
    decode_subscribe,
    encode_vclock_reply,
)
from flowstone.replication.relay import Facts, RelayState, RequestOfReplica, refusal
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

REFUSAL_LINES_BURST: Final = 10
REFUSAL_LINE_SECONDS: Final = 1.0
"""Log lines about refused requests of replicas that are allowed at once, and the seconds until one more is allowed."""

_TOO_OLD: Final = (
    "replica %s says no version in JOIN, as Tarantool before 2.10: it cannot read a schema of dialect 2.11, "
    "and if it fails it has to be removed from _cluster; for replicas of that age, start the first node of a "
    "replica set with --dialect 2.6"
)


class Relays:
    """All replicas that follow, or have followed, this node; and what they keep of its logs."""

    def __init__(self, instance: Instance, collector: GarbageCollector) -> None:
        self.instance = instance
        self.on_ack: list[Callable[[int, VClock], None]] = []
        """Called with the id, 0 for an anonymous one, and the vclock of a replica that has written more."""
        self.on_answer: list[Callable[[int, int, VClock], None]] = []
        """Called with the id of a member, the number of a heartbeat, and the vclock that it has had since then."""
        self.on_lost: list[Callable[[int], None]] = []
        """Callbacks for the end of a member's connection; the argument is the id of the member."""
        self._collector = collector
        self._is_2_6 = instance.box.dialect is Dialect.V2_6
        self._downstreams: dict[UUID, Downstream] = {}
        self._followers: dict[Relay, None] = {}
        self._joining: dict[UUID, None] = {}
        """Who is being given data now."""
        self._tail: Tail | None = None
        self._is_pump_due = False
        self._last_refusal = ""
        self._refusal_lines = RateLimit(REFUSAL_LINES_BURST, REFUSAL_LINE_SECONDS)
        self._pause: asyncio.Task[None] | None = None
        instance.elections.on_broadcast.append(self.send_raft)
        self._wait_for_members()

    def _wait_for_members(self) -> None:
        """Nothing is deleted after a start until all members are back, or `wal_cleanup_delay` has passed.

        Real servers do so since 2.8. Those of 2.6 delete what members need that were away, who have to join anew.
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
        """`wal_cleanup_delay` has changed: members that are still away are waited for so long from now on."""
        if self._pause is not None and self._collector.is_paused:
            self._pause.cancel()
            delay = self.instance.configuration.wal_cleanup_delay
            self._pause = asyncio.get_running_loop().create_task(self._end_pause(delay))

    # --- what box.info shows ---

    def downstream(self, uuid: UUID) -> dict[str, Any] | None:
        replica = self._downstreams.get(uuid)
        return None if replica is None else self._shown(replica)

    def is_intact(self, uuid: UUID) -> bool:
        """As `Peers.is_intact`."""
        replica = self._downstreams.get(uuid)
        return replica is not None and replica.relay is not None and replica.relay.is_intact

    @property
    def replicas(self) -> list[Downstream]:
        """Who has followed since the start, or still does."""
        return list(self._downstreams.values())

    @property
    def anonymous(self) -> list[tuple[UUID, dict[str, Any]]]:
        """Who follows without being a member."""
        replicas = (replica for replica in self._downstreams.values() if not replica.id)
        return [(replica.uuid, shown) for replica in replicas if (shown := self._shown(replica)) is not None]

    def acked(self, uuid: UUID) -> VClock | None:
        """What the replica says it has; None if it is not connected."""
        replica = self._downstreams.get(uuid)
        return replica.relay.acked.vclock if replica is not None and replica.relay is not None else None

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

    # --- life ---

    def member_removed(self, uuid: UUID) -> None:
        """Ignore acknowledgements of an expelled member. Its relay runs until it has the row that expels it."""
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
        """Stop all relays: this instance is not a member any more."""
        for relay in list(self._followers):
            relay.stop("this instance was expelled from its replica set")
        self._collector.resume()

    def _release(self, replica: Downstream) -> None:
        """Stop keeping logs for an expelled replica."""
        self._set_consumer(replica, None)
        self._collector.collect_soon()

    async def close(self) -> None:
        """Ends all of them. Twice is harmless."""
        if self.send_raft in self.instance.elections.on_broadcast:
            self.instance.elections.on_broadcast.remove(self.send_raft)
        if self._pause is not None:
            self._pause.cancel()
        relays = list(self._followers)
        for relay in relays:
            relay.stop("the instance is stopped")
        for relay in relays:
            await relay.ended()

    # --- requests of replicas ---

    def serve(self, request: Request, link: Link) -> Coroutine[Any, Any, None]:
        """Serves a request of a replica; every refusal is raised, by the call itself or when the result is awaited."""
        if link.is_busy:
            raise errors.Protocol("Can't process join/subscribe while there are pending requests")
        link.hold()
        return self._serve(request, link)

    async def _serve(self, request: Request, link: Link) -> None:
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

    def _log_refusal(self, request: Request, link: Link, error: TarantoolError) -> None:
        """Log a refusal once: replicas retry every second and get the same answer.

        Any client can send such requests and vary them, so the rate of lines is limited, too.
        """
        text = f"{type_name(request.type)} of {link.peer.rpartition(':')[0]} is refused: {error.message}"
        level = logging.INFO if isinstance(error, errors.Loading) else logging.WARNING
        if text == self._last_refusal or self._refusal_lines.take(self.instance.outside.clock.monotonic()) is None:
            level = logging.DEBUG
        else:
            self._last_refusal = text
        LOG.log(level, "%s", text, extra={"peer": link.peer})

    def _check(self, asked: RequestOfReplica, link: Link) -> Downstream:
        """The replica that asks, unless it is refused."""
        uuid = asked.instance_uuid or NIL_UUID
        replica = self._downstreams.get(uuid) or Downstream(uuid)
        replica.id = next((number for number, member in members(self.instance) if UUID(member) == uuid), 0)
        error = refusal(asked, self._facts(replica, link.user))
        if error is not None:
            raise error
        return replica

    def _facts(self, replica: Downstream, user: int) -> Facts:
        instance = self.instance
        access, cluster = instance.box.access, instance.box.spaces[CLUSTER_ID]
        may_write = lambda: access.check(  # noqa: E731
            user, Privilege.WRITE, "space", CLUSTER_ID, cluster.definition.owner, cluster.name
        )
        return Facts(
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
        """Return True if the instance was a member, and its id is another member's now."""
        former = {number for number, member in self.instance.box.former_members if member == uuid}
        return any(number in former and UUID(member) != uuid for number, member in members(self.instance))

    def _read_only(self) -> TarantoolError | None:
        instance = self.instance
        if not instance.is_read_only:
            return None
        return instance.box.read_only_error()

    async def _join(self, request: Request, link: Link) -> None:
        asked = decode_join(request.body, is_2_6=self._is_2_6)
        replica = self._check(asked, link)
        join = Join(self.instance, self.wal_dir, link, request.sync, asked.version)
        # Before the view, so that no row between the view and the end of this is lost.
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

    async def _fetch_snapshot(self, request: Request, link: Link) -> None:
        asked = decode_fetch_snapshot(request.body, is_2_6=self._is_2_6)
        self._check(asked, link)
        LOG.info("sending read-view to replica at %s", link.peer)
        join = Join(self.instance, self.wal_dir, link, request.sync, asked.version)
        await join.send_snapshot()
        LOG.info("read-view sent.")
        join.send_position()

    async def _register(self, request: Request, link: Link) -> None:
        asked = decode_register(request.body, is_2_6=self._is_2_6)
        replica = self._check(asked, link)
        # 2.6 sends what comes from now on; newer servers all that the replica has not.
        start = self.instance.vclock if self._is_2_6 else asked.vclock
        consumer = self._collector.add_consumer(f"replica {asked.instance_uuid}", start)
        try:
            LOG.info("registering replica %s at %s", asked.instance_uuid, link.peer, extra={"peer": link.peer})
            join = Join(self.instance, self.wal_dir, link, request.sync)
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
        """The replica has everything up to `vclock`."""
        replica.id = next(number for number, uuid in members(self.instance) if UUID(uuid) == replica.uuid)
        self._downstreams[replica.uuid] = replica
        consumer.vclock = vclock
        self._set_consumer(replica, consumer)
        self._collector.came_back(replica.uuid)

    async def _subscribe(self, request: Request, link: Link) -> None:
        asked = decode_subscribe(request.body, is_2_6=self._is_2_6)
        replica = self._check(asked, link)
        self._downstreams[replica.uuid] = replica
        if replica.id:
            # Anew, because it may have lost some of what it had.
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
            # Only now: what this does to an election must not reach the replica before the answer to its request.
            self.instance.elections.connection(replica.id, downstream=True)
        relay.received(unread)

    # --- what relays call ---

    @property
    def wal_dir(self) -> str:
        return self._collector.wal_dir

    @property
    def tail(self) -> Tail:
        """What is written from the first look at it on, as long as anybody follows."""
        if self._tail is None:
            journal = self.instance.journal
            self._tail = Tail(journal.written_vclock, self._rows_written)
            journal.on_written.append(self._tail.append)
        return self._tail

    def forget(self, relay: Relay) -> None:
        """It is over."""
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
        """The replica, a member or anonymous, has written more."""
        if replica.consumer is not None:
            self._collector.advance(replica.consumer, vclock)
        for tell in self.on_ack:
            tell(replica.id, vclock)

    def answered(self, replica: Downstream, vclock_sync: int, vclock: VClock) -> None:
        """The replica has written so much, as it says after the heartbeat with this number."""
        if replica.id:
            for tell in list(self.on_answer):
                tell(replica.id, vclock_sync, vclock)

    def synchronize(self) -> dict[int, int]:
        """Asks all members for their vclocks; by id, the numbers from which on answers are newer than the question.

        Who does not follow now is asked when it does; one that is not known yet begins with number 1.
        """
        for relay in self._followers:
            if relay.replica.id:
                relay.synchronize()
        return {replica.id: replica.vclock_sync + 1 for replica in self._downstreams.values() if replica.id}

    def send_raft(self) -> None:
        """The state of elections has changed."""
        self._let_all(Relay.elections_changed)

    # --- the rest ---

    def _set_consumer(self, replica: Downstream, consumer: Consumer | None) -> None:
        before, replica.consumer = replica.consumer, consumer
        if before is not None:
            self._collector.remove_consumer(before)

    def _rows_written(self) -> None:
        """Whatever else is written before the loop comes round is sent together."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        tail = self._tail
        if tail is None:
            return
        tail.seal()
        self._let_all(Relay.push)
        numbers = [relay.number for relay in self._followers]
        # Who is behind will want the tail from wherever it meets it.
        tail.trim(0 if None in numbers else min((number for number in numbers if number is not None), default=tail.end))

    def _let_all(self, do: Callable[[Relay], None]) -> None:
        for relay in list(self._followers):
            try:
                do(relay)
            except Exception as error:
                LOG.exception("relaying to %s failed", relay.replica.uuid)
                relay.stop(str(error))


def _refused(check: Callable[[], None]) -> TarantoolError | None:
    try:
        check()
    except TarantoolError as error:
        return error
    return None
