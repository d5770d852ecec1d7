"""Whom a node follows: its appliers, connected and resumed together, and what their progress means for the node.

At a start all peers are tried first, and none is followed before it is decided where the data comes from: appliers
pause when they are connected. Then they are resumed, and the node is an orphan, read-only, until it has caught up with
enough of them. The rules are in `replication/`; one connection is `node/applier.py`'s part, what rows do `member.py`'s.
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
from flowstone.node.applier import Applier
from flowstone.node.elections import MAY_LEAD
from flowstone.node.info import members
from flowstone.node.instance import Instance
from flowstone.node.member import Member
from flowstone.replication import bootstrap_leader, replica_set
from flowstone.replication.applier import DOES_NOT_KNOW_US, ENDED, ApplierState, code_of, other_replica_set, reaction
from flowstone.replication.bootstrap_leader import Candidate
from flowstone.replication.election import Mode, State
from flowstone.replication.membership import NotAMember, expelled
from flowstone.replication.messages import Ballot
from flowstone.replication.replica_set import DuplicateConnection, Progress, ReplicaSet, Upstream
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

_State = ApplierState
_JOIN: Final = (_State.READY, _State.INITIAL_JOIN, _State.FINAL_JOIN, _State.JOINED, _State.READY)
_FETCH: Final = (_State.READY, _State.FETCH_SNAPSHOT, _State.FETCHED_SNAPSHOT, _State.READY)
_REGISTER: Final = (_State.REGISTERED, _State.READY)
_FOLLOWING: Final = (_State.SYNC, _State.FOLLOW)
_NO_LOGIN: Final = (errors.AccessDenied.code, errors.NoSuchUser.code, errors.CredsMismatch.code)
"""A peer that says this may be put right, but not by waiting for it alone."""


class ReplicationClosed(FlowstoneError):
    """The node is being stopped: nobody is connected to any more."""


class Replication:
    """The upstreams of a node. `connect`, then `join` if there is no data, then `follow` and `sync`."""

    def __init__(self, instance: Instance, member: Member) -> None:
        self.replica_set = ReplicaSet()
        self._instance = instance
        self._member = member
        self._appliers: dict[Upstream, Applier] = {}
        self._ended: dict[Applier, None] = {}
        """Those that do not try any more."""
        self._changed = asyncio.Event()
        self._is_at_birth = False
        self._is_connecting = False
        self._is_closed = False
        self._last_refusal = ""

    # --- what box.info shows ---

    def upstream(self, uuid: UUID) -> dict[str, Any] | None:
        found = self.replica_set.upstream_of(uuid)
        applier = self._appliers.get(found) if found is not None else None
        return None if applier is None or applier.state is _State.OFF else applier.info()

    # --- what appliers ask: `replication.membership.Members` ---

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
        """Tries all peers that are configured and leaves those that answer paused.

        `at_birth`: an instance without data needs enough of them (error 59); one that has data goes on with fewer.
        `keep_followed`: connections to peers that stay configured are left as they are.
        """
        self._is_at_birth = at_birth
        self._is_connecting = True
        try:
            self._check_open()
            stopped = await self._make_appliers(keep_followed=keep_followed)
            if not self._appliers:
                return
            LOG.info("connecting to %d replicas", len(self._appliers))
            for applier in stopped:
                applier.start(pause_at=(_State.CONNECTED,))
            await self._until(self._has_connected, self._instance.configuration.replication_connect_timeout)
            self._check_open()
            await self._take_stock()
        finally:
            self._is_connecting = False

    async def _make_appliers(self, *, keep_followed: bool = False) -> list[Applier]:
        """One for each URI that is configured; gives those that do not run now. An applier that was there for it is
        used again, for what it has seen; one that had stopped for good is not: whoever sets `replication` again has
        decided to go on.
        """
        applying = self._member.applying
        if applying is not None and not applying.is_sound:
            keep_followed = False  # who is about to hear of a failed write may still be in the middle of something
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
        await asyncio.gather(*(applier.stop() for applier in (*gone, *anew)))
        self._ended = {}
        self._check_open()
        self.replica_set.set_upstreams(self._appliers)
        # How many there are to catch up with turns out when they have been tried. Until then it is all of them.
        for upstream in self._appliers:
            upstream.is_awaited = True
        self._set_quorum_max()
        if pairs:
            self._member.watch_log()
        if applying is not None:
            applying.start_anew()
        return anew

    def _check_open(self) -> None:
        if self._is_closed:
            raise ReplicationClosed("the node is being stopped", hint="start it again")
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
        """Everybody has answered or given up; later starts need not wait for more than the quorum."""
        if self._is_at_birth and self._has_named_leader():
            return True
        connected = len(self._connected())
        given_up = sum(applier in self._ended and not self._is_self(applier) for applier in self._appliers.values())
        if connected + given_up >= len(self._appliers):
            return True
        return self._goes_by_quorum and not self._is_at_birth and connected >= self._connect_quorum

    def _has_named_leader(self) -> bool:
        """Who is named to begin has answered: nobody else matters then."""
        configuration = self._instance.configuration
        if self._goes_by_quorum or configuration.bootstrap_strategy == "auto":
            return False
        if configuration.bootstrap_strategy == "supervised":
            return bootstrap_leader.supervised_rule(self._candidates()) is not None
        return bootstrap_leader.named_leader(self._candidates(), configuration.bootstrap_leader or "") is not None

    @property
    def _goes_by_quorum(self) -> bool:
        """`replication_connect_quorum` counts: up to 2.10, and where it is asked for."""
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
        """Stops who has not answered, to be tried again by `follow`, and sees whether enough have."""
        connected, total = self._connected(), len(self._appliers)
        reasons = "; ".join(_failure(applier) for applier in self._appliers.values() if applier not in connected)
        if len(connected) < total:
            LOG.error("failed to connect to %d out of %d replicas: %s", total - len(connected), total, reasons)
        else:
            LOG.info("connected to %d replicas", total)
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
        """Let the quorum be the upstreams that have data to catch up with, and ourselves."""
        booted = {peer.uuid for peer in self._candidates() if peer.ballot.is_booted} | {self._instance.uuid}
        connected = self._connected()
        for upstream, applier in self._appliers.items():
            upstream.is_awaited = applier in connected and applier.uuid in booted

    def _check_duplicates(self) -> None:
        uuids = [applier.uuid for applier in self._connected()]
        if len(uuids) != len(dict.fromkeys(uuids)):
            raise errors.Cfg("Incorrect value for option 'replication': duplicate connection to the same replica")

    def _connected(self) -> list[Applier]:
        """Those that are connected, and the one that has found that its peer is ourselves."""
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
        can_lead = Mode(configuration.election_mode) in MAY_LEAD
        return Ballot(is_ro_cfg=configuration.read_only, is_ro=True, is_booted=False, can_lead=can_lead)

    def _peers(self) -> list[Candidate]:
        return [candidate for candidate in self._candidates() if candidate.uuid != self._instance.uuid]

    # --- where the data comes from ---

    async def find_data(self) -> bool:
        """Joins the bootstrap leader; False if that is this instance itself, which then has to begin a replica set."""
        clock, configuration = self._instance.outside.clock, self._instance.configuration
        deadline = clock.monotonic() + configuration.replication_connect_timeout
        while True:
            await self.connect(at_birth=True)
            leader = self._choose_leader()
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
            assert configuration.bootstrap_leader is not None, "configure sees to that"
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
        """Since 2.11 who joins must be able to reach all members."""
        configuration = self._instance.configuration
        if self._goes_by_quorum or configuration.bootstrap_strategy != "auto" or configuration.replication_anon:
            return
        missing = bootstrap_leader.unlisted_members(self._candidates(), len(configuration.replication), leader)
        if missing:
            raise errors.BootstrapConnectionNotToAll(
                "Bootstrap failed: replication doesn't list all members of the replica set",
                hint=f"add those that are missing: {', '.join(map(str, missing))}",
            )

    async def _check_unanimity(self) -> None:
        """Since 2.11 a replica set is born when all who are there agree on who begins."""
        if self._goes_by_quorum or self._instance.configuration.bootstrap_strategy != "auto":
            return
        uuid = self._instance.uuid
        nobody = UUID(int=0)

        def has_chosen() -> bool:
            return all(peer.ballot.bootstrap_leader_uuid not in (None, nobody) for peer in self._peers())

        if any(peer.ballot.bootstrap_leader_uuid is not None for peer in self._peers()):
            await self._until(has_chosen, self._instance.configuration.replication_connect_timeout)
        other = bootstrap_leader.dissenter(self._peers(), uuid)
        if other is not None:
            raise errors.BootstrapNotUnanimous(
                f"Replica {other.uuid} chose a different bootstrap leader {other.ballot.bootstrap_leader_uuid}"
            )

    async def _join(self, leader: Candidate, *, is_last_try: bool = True) -> bool:
        """Takes the leader's data; False if it is worth another try, with nothing taken yet.

        A login that is refused is tried again while somebody may be about to put it right, and a leader that cannot
        write while another may be elected, but not for ever.
        """
        applier = next(applier for applier in self._connected() if applier.uuid == leader.uuid)
        LOG.info("bootstrapping replica from %s at %s", leader.uuid, leader.address)
        try:
            for state in _FETCH if self._instance.configuration.replication_anon else _JOIN:
                await applier.resume_to(state, is_patient=False)
        except FlowstoneError as error:
            if is_last_try and code_of(error) in (*_NO_LOGIN, errors.Readonly.code):
                raise
            after = reaction(error, is_2_6=self._instance.box.dialect is Dialect.V2_6, has_data=False)
            if self._member.is_joining or after not in (_State.LOADING, _State.DISCONNECTED):
                raise
            if error.message != self._last_refusal:
                self._last_refusal = error.message
                seconds = self._instance.configuration.replication_timeout
                LOG.warning("cannot join %s: %s; trying again every %g s", leader.address, error, seconds)
            return False
        return True

    async def rejoin(self, forget: Callable[[], None]) -> bool:
        """Joins anew where no peer has the logs any more that we need, after `forget`; True if all is well then.

        False: who has the data went away, or gave nothing of it. What was forgotten has to be loaded again: the source
        may be waiting for a quorum that it has only with us, and others, whom we can follow, may be there by now.
        """
        peers = [peer for peer in self._peers() if not self._instance.id or not peer.ballot.is_anon]
        peers = bootstrap_leader.followable(peers, [UUID(text) for _, text in members(self._instance)])
        source = bootstrap_leader.rejoin_source(peers, self._instance.vclock)
        if source is None:
            return True
        LOG.error("replica is too old, initiating rebootstrap from %s at %s", source.uuid, source.address)
        self._instance.bootstrap_leader_uuid = source.uuid
        forget()
        return await self._join(source)

    def peers_to_register(self) -> list[UUID]:
        """Whom the first instance registers with itself: 2.6.0 all who are connected, later ones nobody."""
        if self._instance.box.dialect is not Dialect.V2_6:
            return []
        return sorted(peer.uuid for peer in self._peers())

    # --- following ---

    def follow(self) -> None:
        """Resumes who waits and tries again who had not answered."""
        for applier in self._appliers.values():
            if applier.state is _State.OFF and not self._is_self(applier):
                applier.start()
            else:
                applier.resume()

    async def sync(self) -> None:
        """Returns when enough peers have been caught up with, or this is not to be had: then we are an orphan."""
        known, configuration = self.replica_set, self._instance.configuration
        if not self._appliers or known.quorum == 0:
            self.set_orphan(False)
            return
        LOG.info("synchronizing with %d replicas", known.quorum)
        await self._until(lambda: self._is_synced or not known.may_sync, configuration.replication_sync_timeout)
        if self._is_synced:
            LOG.info("replica set sync complete")
        else:
            behind = (
                _failure(applier)
                for upstream, applier in self._appliers.items()
                if upstream.progress is not Progress.SYNCED and not upstream.is_stranger
            )
            LOG.error("failed to synchronize with enough replicas, entering orphan mode: %s", "; ".join(behind))
        self.set_orphan(not self._is_synced)

    @property
    def _is_synced(self) -> bool:
        """Enough peers have been caught up with, none of them has rows of ours that we have lost, and all know us."""
        return self.replica_set.is_synced and not self._lacks_own_rows() and not self._is_disowned

    @property
    def _is_disowned(self) -> bool:
        """True if a peer that has all rows of others that we have does not know us: we were expelled while stopped."""
        return any(applier.is_disowned for applier in self._appliers.values())

    def _lacks_own_rows(self) -> bool:
        own = self._instance.vclock.get(self._instance.id)
        return self._instance.id != 0 and any(applier.own_lsn_seen > own for applier in self._appliers.values())

    def begin_orphan(self) -> None:
        """Nothing is written before it is known that nobody has more of our own rows than we do."""
        if self._instance.configuration.replication:
            self.set_orphan(True)

    def set_orphan(self, is_orphan: bool) -> None:
        instance = self._instance
        if instance.is_orphan and not is_orphan and instance.status == "orphan":
            LOG.info("leaving orphan mode")
        instance.is_orphan = is_orphan
        instance.settle_read_only()
        if not is_orphan:
            instance.queue.resume()

    def elected(self) -> None:
        """Who leads was voted for by a quorum, as it has what they have: it need not wait for who is away. Only
        somebody who can write may strike those off.
        """
        instance = self._instance
        if instance.status == "orphan" and instance.elections.raft.state is State.LEADER and not self._lacks_own_rows():
            self.set_orphan(False)

    def reconfigure(self) -> None:
        """Options other than `replication` have changed."""
        configuration = self._instance.configuration
        for applier in self._appliers.values():
            applier.replication_timeout = configuration.replication_timeout
            applier.sync_lag = configuration.replication_sync_lag
        if self._goes_by_quorum:
            self._set_quorum_max()
            if self._is_synced:
                self.set_orphan(False)

    async def restart(self) -> None:
        """`replication` has been set, to the same or to something else: who is not followed is connected to anew."""
        self.begin_orphan()
        await self.connect(at_birth=False, keep_followed=True)
        self.follow()
        await self.sync()

    async def resume_all(self) -> None:
        """Follows what is configured, without waiting for anybody: a change of it has failed."""
        if not self._is_closed and not self._instance.is_expelled:
            await self._make_appliers()
            self.follow()

    async def register(self) -> None:
        """An anonymous replica becomes a member: one of its peers gives it an id (error 208 if none can)."""
        await self.connect(at_birth=False)
        master = self._choose_leader()
        chosen = master.uuid if master is not None else None
        applier = next((applier for applier in self._connected() if applier.uuid == chosen), None)
        if applier is None or applier.state is not _State.CONNECTED:
            raise errors.CannotRegister("Can't register an anonymous replica: no suitable master")
        for state in _REGISTER:
            await applier.resume_to(state)
        # From 2.6 the id comes only with the rows that follow. Until it is there, others must not be asked for one.
        applier.resume()
        seconds = self._instance.configuration.replication_connect_timeout
        await self._until(lambda: self._instance.id != 0 or applier.state in ENDED, seconds)
        if self._instance.id == 0:
            raise errors.CannotRegister(f"Can't register an anonymous replica: no id from {_failure(applier)}")

    def got_id(self) -> None:
        """This instance is a member now."""
        self._changed.set()

    def expelled(self) -> None:
        """Stop all appliers, whatever `replication` says: this instance is not a member any more."""
        self.stop_all(expelled(self._instance.expelled_id))
        self._changed.set()

    async def close(self) -> None:
        """Ends all connections, for good."""
        self._is_closed = True
        self._changed.set()
        await self._drop_appliers()

    async def _drop_appliers(self) -> None:
        appliers, self._appliers, self._ended = self._appliers, {}, {}
        await asyncio.gather(*(applier.stop() for applier in appliers.values()))

    # --- what appliers report ---

    def _applier_changed(self, upstream: Upstream, applier: Applier) -> None:
        self._instance.elections.connection(applier.standing.member_id, upstream=applier.state is _State.FOLLOW)
        if upstream not in self._appliers:
            return
        state = applier.state
        if state is _State.LOADING and applier.error is not None and code_of(applier.error) in _NO_LOGIN:
            state = _State.DISCONNECTED  # it has its data; what is missing is not worth waiting for
        if applier.state in (_State.LOADING, _State.STOPPED, _State.FOLLOW):
            upstream.is_stranger = self._is_stranger(applier)
        try:
            self.replica_set.follow(upstream, state, applier.uuid, self._instance.uuid)
        except DuplicateConnection as error:
            LOG.error("%s", error)
            applier.fail(error)
        if applier.state in ENDED:
            self._ended[applier] = None
        if self._lacks_own_rows() or self._is_disowned:
            self.set_orphan(True)
        elif self._instance.status == "orphan" and self._is_synced and not self._is_connecting:
            self.set_orphan(False)
        self._changed.set()

    def _is_stranger(self, applier: Applier) -> bool:
        """True if the peer is not in our `_cluster` and refuses us, or we refuse it: not worth waiting for.

        The same if we have caught up with it: the row that registers it would have come before.
        """
        if applier.state is _State.FOLLOW:
            return not applier.standing.is_member
        error = applier.error
        if not isinstance(error, (NotAMember, errors.Unsupported, *DOES_NOT_KNOW_US)):
            return False
        is_of_set = other_replica_set(error, self._instance.replicaset_uuid) is None
        return is_of_set and applier.uuid is not None and applier.uuid not in self.replica_set.ids

    def peer_acknowledged(self, replica_id: int, vclock: VClock) -> None:
        """One who follows us has written all of `vclock`; appliers want to know whether lost rows are among it."""
        for applier in self._appliers.values():
            applier.peer_acknowledged(replica_id, vclock)

    def stop_all(self, error: FlowstoneError) -> None:
        """What was applied could not be written: everybody stops, as what comes next would build on it."""
        for applier in self._appliers.values():
            applier.fail(error)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Returns when `condition`, about states and ballots of appliers, holds, or time is up."""
        timer = asyncio.get_running_loop().create_task(self._instance.outside.clock.sleep(seconds))
        timer.add_done_callback(lambda _: self._changed.set())
        try:
            while not condition() and not timer.done() and not self._is_closed:
                self._changed.clear()
                await self._changed.wait()
        finally:
            timer.cancel()


def _failure(applier: Applier) -> str:
    """Why it is not followed, with its address, which most messages have already."""
    address = applier.uri.address
    reason = applier.error.message if applier.error is not None else f"{address} does not answer"
    return reason if address in reason else f"{address}: {reason}"
