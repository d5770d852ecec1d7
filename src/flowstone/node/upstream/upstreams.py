"""The upstreams of a node: connects, joins and follows them, and decides whether the node is an orphan.

At a start the node connects to all upstreams; their appliers pause in CONNECTED until the source of the data is chosen.
Then they are resumed. The node is an orphan, and read-only, until it is in sync with enough of them. The rules are in
`replication/`. `node/upstream/applier.py` handles a single connection, and `node/upstream/node_sink.py` the received
rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node.info import members
from flowstone.node.instance import Instance
from flowstone.node.synchro.elections import MAY_LEAD
from flowstone.node.upstream.applier import Applier
from flowstone.node.upstream.membership_query import is_registered
from flowstone.node.upstream.node_sink import NodeSink
from flowstone.replication.applier.states import (
    DOES_NOT_KNOW_US,
    ENDED,
    ApplierState,
    ConnectionLost,
    code_of,
    other_replica_set,
    reaction,
)
from flowstone.replication.membership import bootstrap_leader, replica_set
from flowstone.replication.membership.bootstrap_leader import Candidate
from flowstone.replication.membership.membership import REJOIN, NotAMember, expelled
from flowstone.replication.membership.replica_set import DuplicateConnection, MemberSet, SyncProgress, Upstream
from flowstone.replication.messages import Ballot
from flowstone.replication.raft.election import ElectionMode, ElectionState
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

_State = ApplierState
_JOIN: Final = (_State.READY, _State.INITIAL_JOIN, _State.FINAL_JOIN, _State.JOINED, _State.READY)
_FETCH: Final = (_State.READY, _State.FETCH_SNAPSHOT, _State.FETCHED_SNAPSHOT, _State.READY)
_REGISTER: Final = (_State.REGISTERED, _State.READY)
_FOLLOWING: Final = (_State.SYNC, _State.FOLLOW)
_NO_LOGIN: Final = (errors.AccessDenied.code, errors.NoSuchUser.code, errors.CredsMismatch.code)
"""Errors about a login or a right that is missing on the peer: an operator has to correct them."""


class ReplicationClosed(FlowstoneError):
    """The node is stopping and no longer connects to upstreams."""


class Replication:
    """The upstreams of a node. Call `find_data` if there is no data, else `connect`; then `follow` and `sync`."""

    def __init__(self, instance: Instance, member: NodeSink) -> None:
        self.replica_set = MemberSet()
        self._instance = instance
        self._member = member
        self._appliers: dict[Upstream, Applier] = {}
        self._ended: dict[Applier, None] = {}
        """Appliers that no longer retry."""
        self._changed = asyncio.Event()
        self._is_at_birth = False
        self._is_connecting = False
        self._is_closed = False
        self._last_refusal = ""

    # --- box.info ---

    def upstream(self, uuid: UUID) -> dict[str, Any] | None:
        found = self.replica_set.upstream_of(uuid)
        applier = self._appliers.get(found) if found is not None else None
        return None if applier is None or applier.state is _State.OFF else applier.info()

    # --- `replication.membership.Members`, for appliers ---

    def has(self, replica_id: int, uuid: UUID) -> bool:
        if self.replica_set.members.get(replica_id) == uuid:
            return True
        return any(number == replica_id and UUID(text) == uuid for number, text in members(self._instance))

    def has_id(self, replica_id: int) -> bool:
        return replica_id in self.replica_set.members or any(
            number == replica_id for number, _ in members(self._instance)
        )

    def is_intact(self, uuid: UUID) -> bool:
        return self._instance.peers.is_intact(uuid)

    # --- connecting ---

    async def connect(self, *, at_birth: bool, keep_followed: bool = False) -> None:
        """Connect to all configured upstreams, and pause the appliers of the peers that answer.

        `at_birth`: the instance has no data, and needs a quorum of upstreams, else ER_CFG is raised; an instance with
        data continues with fewer. `keep_followed`: keep the connections of upstreams that are already followed.
        """
        self._is_at_birth = at_birth
        # While connecting, a single synced upstream must not end the orphan mode: `sync` decides after all were tried.
        self._is_connecting = True
        try:
            self._check_open()
            stopped = await self._make_appliers(keep_followed=keep_followed)
            if not self._appliers:
                return
            LOG.info("connecting to %d replicas", len(self._appliers))
            # Pause in CONNECTED: the bootstrap leader is chosen when all ballots are known.
            for applier in stopped:
                applier.start(pause_at=(_State.CONNECTED,))
            await self._until(self._has_connected, self._instance.configuration.replication_connect_timeout)
            self._check_open()
            await self._take_stock()
        finally:
            self._is_connecting = False

    async def _make_appliers(self, *, keep_followed: bool = False) -> list[Applier]:
        """Create an applier for each configured URI; return the appliers that must be started.

        An existing applier of a URI is reused, with what it knows of the peer, unless it is STOPPED: setting
        `replication` again is the request to retry.
        """
        applying = self._member.applying
        if applying is not None and not applying.is_sound:
            keep_followed = False  # appliers that have not handled the failed write yet may be in any state
        before = {
            applier.uri: (upstream, applier)
            for upstream, applier in self._appliers.items()
            if applier.state is not _State.STOPPED
        }
        wanted = [parse_uri(text) for text in self._instance.configuration.replication]
        pairs = [before.pop(uri) if uri in before else self._make_applier(uri) for uri in wanted]
        kept = [applier for _, applier in pairs]
        gone = [applier for applier in self._appliers.values() if applier not in kept]
        anew = [applier for _, applier in pairs if not (keep_followed and applier.state in _FOLLOWING)]
        self._appliers = dict(pairs)
        # All are stopped before any is started: two connections to one peer would be rejected as duplicates.
        await asyncio.gather(*(applier.stop() for applier in (*gone, *anew)))
        self._ended = {}
        self._check_open()
        self.replica_set.set_upstreams(self._appliers)
        # Wait for all upstreams until the attempts to connect show which of them have data.
        for upstream in self._appliers:
            upstream.is_awaited = True
        self._set_quorum_max()
        if pairs:
            self._member.watch_log()
        if applying is not None:
            # Safe only here: all appliers then subscribe again from the end of the log, so no row is skipped.
            applying.start_anew()
        return anew

    def _check_open(self) -> None:
        if self._is_closed:
            raise ReplicationClosed("node is stopping", hint="start it again")
        if self._instance.is_expelled:
            raise expelled(self._instance.expelled_id)

    def _make_applier(self, uri: Uri) -> tuple[Upstream, Applier]:
        configuration, upstream = self._instance.configuration, Upstream(uri.address)
        applier = Applier(
            self._instance.outside,
            uri,
            self._member,
            replication_timeout=configuration.replication_timeout,
            sync_lag=configuration.replication_sync_lag,
            on_state=lambda applier: self._applier_changed(upstream, applier),
            on_ballot=lambda applier: self._changed.set(),
            on_alive=lambda applier: self._instance.elections.heartbeat(applier.standing.member_id),
            may_regain=lambda uuid: self._instance.peers.downstream(uuid) is not None,
            members=self,
            silence_max=lambda: self._instance.elections.disconnect_timeout,
        )
        return upstream, applier

    def _has_connected(self) -> bool:
        """Return True if all appliers are connected or have ended. With a connect quorum, a restart needs only this
        quorum."""
        if self._is_at_birth and self._has_named_leader():
            return True
        connected = len(self._connected())
        given_up = sum(applier in self._ended and not self._is_self(applier) for applier in self._appliers.values())
        if connected + given_up >= len(self._appliers):
            return True
        return self._goes_by_quorum and not self._is_at_birth and connected >= self._connect_quorum

    def _has_named_leader(self) -> bool:
        """Return True if the configured bootstrap leader has answered, so that no other peer is needed."""
        configuration = self._instance.configuration
        # These strategies compare the ballots of all peers.
        if self._goes_by_quorum or configuration.bootstrap_strategy == "auto":
            return False
        if configuration.bootstrap_strategy == "supervised":
            return bootstrap_leader.supervised_rule(self._candidates()) is not None
        return bootstrap_leader.named_leader(self._candidates(), configuration.bootstrap_leader or "") is not None

    @property
    def _goes_by_quorum(self) -> bool:
        """True if `replication_connect_quorum` is used: in dialect 2.6, and with `bootstrap_strategy` "legacy"."""
        instance = self._instance
        return instance.box.dialect is Dialect.V2_6 or instance.configuration.bootstrap_strategy == "legacy"

    @property
    def _connect_quorum(self) -> int:
        total, configuration = len(self._appliers), self._instance.configuration
        if self._goes_by_quorum:
            return replica_set.connect_quorum(total, configuration.replication_connect_quorum)
        if not self._is_at_birth or configuration.bootstrap_strategy != "auto":
            return 0
        return replica_set.connect_quorum_of_birth(total, any(peer.ballot.is_booted for peer in self._candidates()))

    async def _take_stock(self) -> None:
        """Stop appliers that are not connected, until `follow` retries them; raise ER_CFG if too few are connected."""
        connected, total = self._connected(), len(self._appliers)
        reasons = "; ".join(_failure(applier) for applier in self._appliers.values() if applier not in connected)
        if len(connected) < total:
            LOG.error("failed to connect to %d out of %d replicas: %s", total - len(connected), total, reasons)
        else:
            LOG.info("connected to %d replicas", total)
        # An instance with data starts with what it has; without data it could join or create the wrong replica set.
        if len(connected) < self._connect_quorum and self._is_at_birth:
            await self._drop_appliers()
            raise errors.Cfg(
                "Incorrect value for option 'replication': failed to connect to one or more replicas",
                hint=reasons or None,
            )
        if not self._goes_by_quorum:
            self._await_booted()
        for applier in self._appliers.values():
            if applier not in connected:
                await applier.stop()
        self._check_duplicates()

    def _set_quorum_max(self) -> None:
        configured = self._instance.configuration.replication_connect_quorum
        self.replica_set.quorum_max = configured if self._goes_by_quorum else None

    def _await_booted(self) -> None:
        """Limit the sync quorum to the connected upstreams that have data, and this instance."""
        booted = {peer.uuid for peer in self._candidates() if peer.ballot.is_booted} | {self._instance.uuid}
        connected = self._connected()
        for upstream, applier in self._appliers.items():
            upstream.is_awaited = applier in connected and applier.uuid in booted

    def _check_duplicates(self) -> None:
        uuids = [applier.uuid for applier in self._connected()]
        if len(uuids) != len(dict.fromkeys(uuids)):
            raise errors.Cfg("Incorrect value for option 'replication': duplicate connection to the same replica")

    def _connected(self) -> list[Applier]:
        """Return the connected appliers, including the one whose peer turned out to be this instance."""
        return [
            applier
            for applier in self._appliers.values()
            if applier.state in (_State.CONNECTED, *_FOLLOWING)
            or (applier.state is _State.OFF and self._is_self(applier))
        ]

    def _is_self(self, applier: Applier) -> bool:
        return applier.uuid == self._instance.uuid

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(applier.uuid, applier.ballot or self._own_ballot(), applier.uri.address)
            for applier in self._connected()
            if applier.uuid is not None and (applier.ballot is not None or self._is_self(applier))
        ]

    def _own_ballot(self) -> Ballot:
        configuration = self._instance.configuration
        can_lead = ElectionMode(configuration.election_mode) in MAY_LEAD
        return Ballot(is_ro_cfg=configuration.read_only, is_ro=True, is_booted=False, can_lead=can_lead)

    def _peers(self) -> list[Candidate]:
        return [candidate for candidate in self._candidates() if candidate.uuid != self._instance.uuid]

    # --- bootstrap and rejoin ---

    async def find_data(self) -> bool:
        """Join the bootstrap leader; return False if that is this instance, which must then create the replica set."""
        clock, configuration = self._instance.outside.clock, self._instance.configuration
        deadline = clock.monotonic() + configuration.replication_connect_timeout
        while True:
            await self.connect(at_birth=True)
            leader = self._choose_leader()
            # Show the choice in our ballot before creating anything: peers compare the choices
            # (docs/spec/replication.md#unanimous-choice).
            self._instance.bootstrap_leader_uuid = leader.uuid if leader is not None else self._instance.uuid
            if leader is None or leader.uuid == self._instance.uuid:
                await self._check_unanimity()
                return False
            self._check_listed(leader)
            if await self._join(leader, is_last_try=clock.monotonic() >= deadline):
                return True
            await clock.sleep(configuration.replication_timeout)

    def _choose_leader(self) -> Candidate | None:
        configuration = self._instance.configuration
        candidates = self._candidates()
        if not configuration.replication_anon:  # an instance without an id cannot register others
            candidates = [candidate for candidate in candidates if not candidate.ballot.is_anon] or candidates
        if self._instance.box.dialect is Dialect.V2_6:
            return bootstrap_leader.oldest_rule(candidates)
        if configuration.bootstrap_strategy == "config":
            assert configuration.bootstrap_leader is not None, "checked by configure()"
            return bootstrap_leader.configured_rule(configuration.bootstrap_leader)(candidates)
        if configuration.bootstrap_strategy == "supervised":
            leader = bootstrap_leader.supervised_rule(candidates)
            if leader is None:
                raise errors.Cfg(
                    "Incorrect value for option 'bootstrap_strategy': no peer has been made the bootstrap leader"
                )
            return leader
        return bootstrap_leader.score_rule(candidates)

    def _check_listed(self, leader: Candidate) -> None:
        """Raise if `replication` does not list all members, which a joining instance must reach since 2.11."""
        configuration = self._instance.configuration
        if self._goes_by_quorum or configuration.bootstrap_strategy != "auto" or configuration.replication_anon:
            return
        missing = bootstrap_leader.unlisted_members(self._candidates(), len(configuration.replication), leader)
        if missing:
            raise errors.BootstrapConnectionNotToAll(
                "Bootstrap failed: replication doesn't list all members of the replica set",
                hint=f"add the missing members: {', '.join(map(str, missing))}",
            )

    async def _check_unanimity(self) -> None:
        """Raise if a peer has chosen another bootstrap leader: since 2.11 all must agree to create a replica set."""
        if self._goes_by_quorum or self._instance.configuration.bootstrap_strategy != "auto":
            return
        uuid = self._instance.uuid
        nobody = UUID(int=0)

        def has_chosen() -> bool:
            return all(peer.ballot.bootstrap_leader_uuid not in (None, nobody) for peer in self._peers())

        # Peers before 2.11 lack this key; waiting for it would never end.
        if any(peer.ballot.bootstrap_leader_uuid is not None for peer in self._peers()):
            await self._until(has_chosen, self._instance.configuration.replication_connect_timeout)
        other = bootstrap_leader.dissenter(self._peers(), uuid)
        if other is not None:
            raise errors.BootstrapNotUnanimous(
                f"Replica {other.uuid} chose a different bootstrap leader {other.ballot.bootstrap_leader_uuid}"
            )

    async def _join(self, leader: Candidate, *, is_last_try: bool = True) -> bool:
        """Join the leader; return False if a retry may succeed, and no data has been received yet.

        A rejected login may be corrected, and another leader may replace a read-only one; in these cases, the error is
        raised if `is_last_try`.
        """
        LOG.info("bootstrapping replica from %s at %s", leader.uuid, leader.address)
        try:
            applier = self._applier_of(leader)
            for state in _FETCH if self._instance.configuration.replication_anon else _JOIN:
                await applier.resume_to(state, is_patient=False)
        except FlowstoneError as error:
            self._check_retry(leader, error, is_last_try=is_last_try)
            return False
        return True

    def _applier_of(self, candidate: Candidate) -> Applier:
        """Return the applier that is connected to the candidate; raise ConnectionLost if there is none any more."""
        for applier in self._connected():
            if applier.uuid == candidate.uuid:
                return applier
        raise ConnectionLost(f"{candidate.address} closed the connection")

    def _check_retry(self, leader: Candidate, error: FlowstoneError, *, is_last_try: bool) -> None:
        """Log the error of a join if a retry may succeed, else raise it."""
        if is_last_try and code_of(error) in (*_NO_LOGIN, errors.Readonly.code):
            raise error
        after = reaction(error, is_2_6=self._instance.box.dialect is Dialect.V2_6, has_data=False)
        # Once a snapshot has begun, the box is not empty, and a retry on top of it is not possible.
        if self._member.is_joining or after not in (_State.LOADING, _State.DISCONNECTED):
            raise error
        if error.message != self._last_refusal:
            self._last_refusal = error.message
            seconds = self._instance.configuration.replication_timeout
            LOG.warning("cannot join %s: %s; retrying every %g s", leader.address, error, seconds)

    async def rejoin(self, forget: Callable[[], None]) -> bool:
        """Rejoin, after calling `forget`, if no peer has the logs that we need; return True if the data is usable.

        Return False if the source disconnected or rejected the join before it sent any data. The caller must then load
        the local data again: the source may wait for a quorum that includes us, or other peers may be followable now.

        If the source does not know this member, the member was expelled: the source has all our rows, including the row
        that registered us. Then the local data is kept, because a JOIN would register us again, against the operator's
        will; no peer accepts us, and the node stays an orphan.
        """
        # A member cannot join an anonymous replica, which cannot register it.
        peers = [peer for peer in self._peers() if not self._instance.id or not peer.ballot.is_anon]
        peers = bootstrap_leader.followable(peers, [UUID(text) for _, text in members(self._instance)])
        source = bootstrap_leader.rejoin_source(peers, self._instance.vclock)
        if source is None:
            return True
        try:
            is_expelled = self._instance.id != 0 and not await self._knows_us(source)
        except FlowstoneError as error:
            forget()
            self._check_retry(source, error, is_last_try=True)
            return False
        if is_expelled:
            LOG.error("replica is too old, but not rejoining %s at %s: %s", source.uuid, source.address, REJOIN)
            return True
        LOG.error("replica is too old, initiating rebootstrap from %s at %s", source.uuid, source.address)
        self._instance.bootstrap_leader_uuid = source.uuid
        forget()
        return await self._join(source)

    async def _knows_us(self, peer: Candidate) -> bool:
        """Return True if this instance is a member according to the peer."""
        uri = self._applier_of(peer).uri
        return await is_registered(self._instance.outside, uri, peer.uuid, self._instance.uuid)

    def peers_to_register(self) -> list[UUID]:
        """Return the peers that the first instance registers: in 2.6.0, all connected ones; later, none."""
        if self._instance.box.dialect is not Dialect.V2_6:
            return []
        return sorted(peer.uuid for peer in self._peers())

    # --- following ---

    def follow(self) -> None:
        """Resume paused appliers, and restart appliers that could not connect."""
        for applier in self._appliers.values():
            if applier.state is _State.OFF and not self._is_self(applier):
                applier.start()
            else:
                applier.resume()

    async def sync(self) -> None:
        """Wait until the node is in sync with a quorum of upstreams; if that fails or times out, it stays an orphan."""
        known, configuration = self.replica_set, self._instance.configuration
        if not self._appliers or known.quorum == 0:
            self.set_orphan(False)
            return
        LOG.info("synchronizing with %d replicas", known.quorum)
        await self._until(lambda: self._is_synced or not known.may_sync, configuration.replication_sync_timeout)
        if self._is_synced:
            LOG.info("replica set sync complete")
        else:
            lagging = (
                _failure(applier)
                for upstream, applier in self._appliers.items()
                if upstream.progress is not SyncProgress.SYNCED and not upstream.is_stranger
            )
            LOG.error("failed to synchronize with enough replicas, entering orphan mode: %s", "; ".join(lagging))
        self.set_orphan(not self._is_synced)

    @property
    def _is_synced(self) -> bool:
        """True if in sync with a quorum of upstreams, no upstream has own rows that we lost, and none disowns us."""
        return self.replica_set.is_synced and not self._lacks_own_rows() and not self._is_disowned

    @property
    def _is_disowned(self) -> bool:
        """True if a peer that has all rows of others that we have does not know us: we were expelled while stopped."""
        return any(applier.is_disowned for applier in self._appliers.values())

    def _lacks_own_rows(self) -> bool:
        """Return True if an upstream has rows of this instance that are missing here."""
        own = self._instance.vclock.get(self._instance.id)
        return self._instance.id != 0 and any(
            applier.standing.own_lsn_seen > own for applier in self._appliers.values()
        )

    def begin_orphan(self) -> None:
        """Make the node an orphan if it has upstreams: they may have rows of its own that it has lost."""
        if self._instance.configuration.replication:
            self.set_orphan(True)

    def set_orphan(self, is_orphan: bool) -> None:
        instance = self._instance
        if instance.is_orphan and not is_orphan and instance.status == "orphan":
            LOG.info("leaving orphan mode")
        instance.is_orphan = is_orphan
        instance.settle_read_only()
        if not is_orphan:
            # Only 2.6 waits for this: verdicts of peers may arrive until the node is in sync.
            instance.queue.resume()

    def elected(self) -> None:
        """Leave orphan mode if this instance is the leader.

        A leader has all rows of the quorum that elected it, so it need not wait for other upstreams. It must be
        writable, because only a writable instance can expel members that are gone.
        """
        instance = self._instance
        if (
            instance.status == "orphan"
            and instance.elections.raft.state is ElectionState.LEADER
            and not self._lacks_own_rows()
        ):
            self.set_orphan(False)

    def reconfigure(self) -> None:
        """Apply changed options other than `replication`."""
        configuration = self._instance.configuration
        for applier in self._appliers.values():
            applier.replication_timeout = configuration.replication_timeout
            applier.sync_lag = configuration.replication_sync_lag
        if self._goes_by_quorum:
            self._set_quorum_max()
            if self._is_synced:
                self.set_orphan(False)

    async def restart(self) -> None:
        """Apply `replication` after it was set, even to the same value: reconnect upstreams that are not followed."""
        self.begin_orphan()
        await self.connect(at_birth=False, keep_followed=True)
        self.follow()
        await self.sync()

    async def resume_all(self) -> None:
        """Follow the configured upstreams without waiting for them, after a change of `replication` has failed."""
        if not self._is_closed and not self._instance.is_expelled:
            await self._make_appliers()
            self.follow()

    async def register(self) -> None:
        """Register this anonymous replica as a member at one of its upstreams; raise ER_CANNOT_REGISTER on failure."""
        await self.connect(at_birth=False)
        master = self._choose_leader()
        chosen = master.uuid if master is not None else None
        applier = next((applier for applier in self._connected() if applier.uuid == chosen), None)
        if applier is None or applier.state is not _State.CONNECTED:
            raise errors.CannotRegister("Can't register an anonymous replica: no suitable master")
        for state in _REGISTER:
            await applier.resume_to(state)
        # A 2.6 master sends the id only after the registration. Until then, no other upstream may be asked for an id.
        applier.resume()
        seconds = self._instance.configuration.replication_connect_timeout
        await self._until(lambda: self._instance.id != 0 or applier.state in ENDED, seconds)
        if self._instance.id == 0:
            raise errors.CannotRegister(f"Can't register an anonymous replica: no id received: {_failure(applier)}")

    def got_id(self) -> None:
        """Wake up `register`: this instance has become a member."""
        self._changed.set()

    def expelled(self) -> None:
        """Stop all appliers, because this instance is no longer a member."""
        self.stop_all(expelled(self._instance.expelled_id))
        self._changed.set()

    async def close(self) -> None:
        """Close all connections permanently."""
        self._is_closed = True
        self._changed.set()
        await self._drop_appliers()

    async def _drop_appliers(self) -> None:
        appliers, self._appliers, self._ended = self._appliers, {}, {}
        await asyncio.gather(*(applier.stop() for applier in appliers.values()))

    # --- reports of appliers ---

    def _applier_changed(self, upstream: Upstream, applier: Applier) -> None:
        # Notify elections before the check below: they must learn of a lost connection even if the applier was
        # replaced.
        self._instance.elections.connection(applier.standing.member_id, upstream=applier.state is _State.FOLLOW)
        # A late report of an applier that `_make_appliers` has removed.
        if upstream not in self._appliers:
            return
        state = applier.state
        if state is _State.LOADING and applier.error is not None and code_of(applier.error) in _NO_LOGIN:
            state = _State.DISCONNECTED  # the peer is not loading, and `sync` does not wait for an operator
        if applier.state in (_State.LOADING, _State.STOPPED, _State.FOLLOW):
            upstream.is_stranger = self._is_stranger(applier)
        try:
            self.replica_set.follow(upstream, state, applier.uuid, self._instance.uuid)
        except DuplicateConnection as error:
            LOG.error("%s", error)
            # The second connection loses: the first one is followed already.
            applier.fail(error)
        if applier.state in ENDED:
            self._ended[applier] = None
        if self._lacks_own_rows() or self._is_disowned:
            self.set_orphan(True)
        elif self._instance.status == "orphan" and self._is_synced and not self._is_connecting:
            self.set_orphan(False)
        self._changed.set()

    def _is_stranger(self, applier: Applier) -> bool:
        """Return True if `sync` must not wait for the peer, because it is not in our `_cluster` and one side rejects
        the other.

        This also applies if we are in sync with a peer that is not in `_cluster`, because the row that registers the
        peer would have arrived.
        """
        if applier.state is _State.FOLLOW:
            return not applier.standing.is_member
        error = applier.error
        if not isinstance(error, (NotAMember, errors.Unsupported, *DOES_NOT_KNOW_US)):
            return False
        is_of_set = other_replica_set(error, self._instance.replicaset_uuid) is None
        return is_of_set and applier.uuid is not None and applier.uuid not in self.replica_set.ids

    def peer_subscribed(self, uuid: UUID) -> None:
        """Tell the applier of a member that this member follows us now."""
        for applier in self._appliers.values():
            if applier.uuid == uuid:
                applier.peer_subscribed()

    def peer_acknowledged(self, replica_id: int, vclock: VClock) -> None:
        """Tell appliers that a member that follows us has written all rows up to `vclock`, perhaps also rows that it
        had lost."""
        for applier in self._appliers.values():
            applier.peer_acknowledged(replica_id, vclock)

    def stop_all(self, error: FlowstoneError) -> None:
        """Stop all appliers with `error`, such as a failed write: later rows would depend on the missing ones."""
        for applier in self._appliers.values():
            applier.fail(error)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until `condition`, which reads states and ballots of appliers, is true, or until the timeout."""
        timer = asyncio.get_running_loop().create_task(self._instance.outside.clock.sleep(seconds))
        timer.add_done_callback(lambda _: self._changed.set())
        try:
            while not condition() and not timer.done() and not self._is_closed:
                self._changed.clear()
                await self._changed.wait()
        finally:
            timer.cancel()


def _failure(applier: Applier) -> str:
    """Return why the upstream is not followed, with its address unless the message contains it."""
    address = applier.uri.address
    reason = applier.error.message if applier.error is not None else f"{address} does not answer"
    return reason if address in reason else f"{address}: {reason}"
