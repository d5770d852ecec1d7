"""The components of a running node, started in order: lock, data, log, server, appliers, checkpoints.

The data comes from the directory or from a peer, or is created. An instance with peers listens before it has data:
peers need its ballot to choose the bootstrap leader (`docs/spec/replication.md#bootstrap-leader`). Every component that
is started is pushed on an exit stack, which stops them in reverse order.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

from flowstone.box.bootstrap import FirstUser
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect, from_greeting
from flowstone.box.engine.index import WHOLE
from flowstone.box.system import CLUSTER_ID
from flowstone.client.connection import greeting_of
from flowstone.errors import CannotListen, FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.auth import hash_of_hash
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.uri import parse_uri
from flowstone.node.configuration import Configuration, listen_uri
from flowstone.node.disk_query import USAGE_SECONDS, DiskQuery
from flowstone.node.downstream.relays import Relays
from flowstone.node.instance import Function, Instance, NoFiles
from flowstone.node.option import incorrect
from flowstone.node.server.server import Server
from flowstone.node.statistics import DiskUsage, disk_usage
from flowstone.node.synchro.elections import MAY_LEAD, Elections
from flowstone.node.synchro.leadership_transfer import transfer_leadership
from flowstone.node.synchro.limbo_driver import Revocable
from flowstone.node.upstream.node_sink import NOBODY, NodeSink
from flowstone.node.upstream.row_applier import Applying
from flowstone.node.upstream.upstreams import Replication
from flowstone.node.wal.checkpoint import SLICE_WHILE_LOADING, Checkpointer, SynchroStates, write_snapshot
from flowstone.node.wal.commits import Commits, Listener
from flowstone.node.wal.gc import GarbageCollector
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.node.wal.membership_check import check_membership
from flowstone.node.wal.recovery import (
    RecoveredBox,
    bootstrap,
    dialect_of,
    find_files,
    is_empty,
    lock_directory,
    make_durable,
    recover,
)
from flowstone.outside import Outside, Tls
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.limbo.queue import Pending
from flowstone.replication.limbo.tenures import Tenures
from flowstone.replication.membership.membership import NO_SNAPSHOTS, REJOIN
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import LogDirectory

LOG = logging.getLogger("flowstone.node")
DEFAULT_DIALECT: Final = "2.11"


@dataclass(frozen=True, slots=True)
class StartupHooks:
    """Settings of a node besides its options: first user, functions, triggers, reload callback."""

    user: tuple[str, str] | None
    pid: int
    functions: dict[str, Function]
    on_commit: list[Listener]
    on_rollback: list[Listener]
    on_election: list[Callable[[], object]]
    reload: Callable[[dict[str, Any]], Awaitable[None]]


class Components:
    """The components of a node between start and stop; closing `stack` stops them."""

    def __init__(
        self, outside: Outside, configuration: Configuration, hooks: StartupHooks, stack: AsyncExitStack
    ) -> None:
        self.stack = stack
        self._outside = outside
        self._hooks = hooks
        self._memtx_dir, self._wal_dir = configuration.directories
        self._usage_query = DiskQuery[DiskUsage]()
        self._configuration = configuration
        self.instance: Instance
        self.server: Server
        self.checkpointer: Checkpointer
        self.replication: Replication
        self.relays: Relays
        self._member: NodeSink

    async def start(self) -> None:
        """Start all components. If an error is raised, the caller must close the stack."""
        outside = self._outside
        self.stack.enter_context(lock_directory(outside.disk, self._wal_dir))
        outside.disk.make_directory(self._memtx_dir)
        files = self._find_files()
        self._make_parts(await self._dialect(files), self._uuid_of(files))
        is_leader = await self._load(files)
        self._keep_files()
        self._apply_rows()
        if is_leader:
            self.replication.set_orphan(False)
            await self._lead_from_birth()  # before clients are served: a join needs a writable master
        instance = self.instance
        instance.status = "running"
        _limit(instance)
        if instance.listen is None:
            await self.listen(self._configuration)
        self.replication.follow()
        self.stack.push_async_callback(self._transfer_leadership)  # before any component is stopped
        if not is_leader:
            await self.replication.sync()

    async def _transfer_leadership(self) -> None:
        timeout = self.instance.configuration.election_transfer_timeout
        await transfer_leadership(self.instance, self.relays, timeout)

    async def _lead_from_birth(self) -> None:
        """Promote the founder of a replica set at once: it is the only member, so no other leader can appear.

        The promotion fails only if the log cannot be written. The timeout is needed because peers wait for this node.
        """
        if self.instance.elections.mode not in MAY_LEAD:
            return
        seconds = self._configuration.replication_connect_timeout
        try:
            async with asyncio.timeout(seconds):
                await self.instance.elections.promote()
        except TimeoutError:
            reason = self.instance.journal.counters.failure or "the write has not completed"
            hint = "repair the disk, and start the node again"
            raise FlowstoneError(f"first term not written within {seconds:g} s: {reason}", hint=hint) from None

    # --- before there is data ---

    def _find_files(self) -> LogDirectory:
        return find_files(self._outside.disk, self._memtx_dir, self._wal_dir)

    async def _dialect(self, files: LogDirectory) -> Dialect:
        """Return the dialect of the files; for new data the dialect of the options, or of the first peer that
        answers."""
        wanted = self._configuration.dialect
        found = dialect_of(files)
        if found is not None:
            if wanted not in (None, found.value):
                raise incorrect("dialect", f"{self._memtx_dir} has data of dialect {found.value}")
            return found
        if wanted is not None:
            return Dialect(wanted)
        for text in self._configuration.replication:
            greeting = await greeting_of(self._outside, parse_uri(text))
            if greeting is not None:
                return from_greeting(greeting.version)
        return Dialect(DEFAULT_DIALECT)

    def _uuid_of(self, files: LogDirectory) -> UUID:
        newest = files.newest_snapshot()
        if newest is not None:
            return UUID(newest.meta.instance_uuid)
        return _uuid(self._configuration.instance_uuid) or self._outside.random.uuid()

    def _make_parts(self, dialect: Dialect, uuid: UUID) -> None:
        outside, configuration, hooks = self._outside, self._configuration, self._hooks
        box = Box(dialect)
        journal = Journal(
            outside,
            self._wal_dir,
            instance_uuid=str(uuid),
            vclock=VClock(),
            mode=WalMode(configuration.wal_mode),
            wal_max_size=configuration.wal_max_size,
            version=dialect.version_text,
        )
        self.stack.push_async_callback(journal.close)
        commits = Commits(box, journal, outside.clock)
        commits.on_commit = hooks.on_commit
        commits.on_rollback = hooks.on_rollback
        commits.on_members = self._members_changed
        self.stack.callback(commits.queue.close)
        elections = Elections(outside, journal, commits.queue)
        elections.configure(configuration.election(dialect))  # appliers use its timeout before there is data
        elections.on_election = hooks.on_election
        self.stack.push_async_callback(elections.close)
        self.instance = instance = Instance(
            outside,
            box,
            journal,
            commits,
            uuid,
            NOBODY,
            configuration,
            elections,
            functions=hooks.functions,
            pid=hooks.pid,
            reload=hooks.reload,
            started=outside.clock.monotonic(),
        )
        commits.queue.on_change.append(instance.settle_read_only)
        elections.on_change.append(instance.settle_read_only)
        self._member = NodeSink(instance, self._adopt_joined)
        self.server = Server(instance)
        self.stack.push_async_callback(self.server.close)
        self.replication = Replication(instance, self._member)
        self.stack.push_async_callback(self.replication.close)
        elections.on_change.append(self.replication.elected)

    # --- data ---

    async def _load(self, files: LogDirectory) -> bool:
        """Recover the files, join a peer, or create a replica set. Return True if a replica set was created."""
        has_peers = bool(self._configuration.replication)
        if not is_empty(files):
            await self._recover(files)
            # Peers that start at the same time use it to decide whether they can follow us, or have to rejoin.
            self.instance.files = NoFiles(_log_start(files))
            if has_peers:
                await self.listen(self._configuration)
                self.replication.begin_orphan()
                await self.replication.connect(at_birth=False)
                while not await self.replication.rejoin(self._forget):
                    await self.replication.connect(at_birth=False)  # first, so that no peer sends rows during recovery
                    await self._recover(self._find_files())
                    await self._outside.clock.sleep(self._configuration.replication_timeout)
            return False
        await self.listen(self._configuration)  # first: if the address is in use, no files may be left
        if has_peers and await self.replication.find_data():
            if self._hooks.user is not None:
                LOG.warning("user %s not created: the data comes from peers", self._hooks.user[0])
            self.replication.begin_orphan()
            return False
        await self._bootstrap()
        return True

    async def _recover(self, files: LogDirectory) -> None:
        if self._hooks.user is not None:
            LOG.warning("user %s not created: the data directory is already initialized", self._hooks.user[0])
        force = self._configuration.force_recovery
        recovered = await recover(self._outside, files, self.instance.box, force=force)
        await self._outside.blocking(make_durable, self._outside.disk, files, recovered.last)
        self._check_identity(recovered)
        check_membership(self.instance.box, recovered, is_anonymous=self._configuration.replication_anon)
        self._adopt(recovered)
        if recovered.synchro.pending:
            LOG.warning(
                "%d transactions are pending in the synchronous queue of replica %d",
                len(recovered.synchro.pending),
                recovered.synchro.queue_owner_id,
            )

    async def _bootstrap(self) -> None:
        configuration, hooks, box = self._configuration, self._hooks, self.instance.box
        if configuration.read_only:
            raise errors.BootstrapReadonly("Trying to bootstrap a local read-only instance as master")
        user = FirstUser(hooks.user[0], hash_of_hash(hooks.user[1])) if hooks.user is not None else None
        recovered = await bootstrap(
            self._outside,
            self._memtx_dir,
            box,
            instance_uuid=self.instance.uuid,
            replicaset_uuid=_uuid(configuration.replicaset_uuid),
            first_user=user,
            peers=self.replication.peers_to_register(),
        )
        self._adopt(recovered)
        LOG.info("new data in %s, dialect %s", self._memtx_dir, box.dialect.value)
        if user is None and configuration.listen:
            LOG.warning(
                "only guest can log in, and guest has few rights; create data with --user to add a user with all rights"
            )

    async def _adopt_joined(self, recovered: RecoveredBox) -> None:
        """Write the data of a join to a snapshot, and continue the log after it."""
        self._check_identity(recovered)
        instance, synchro = self.instance, recovered.synchro
        synchro.raft = instance.elections.kept_beside(synchro.raft)
        with instance.box.open_view() as view:
            path = await write_snapshot(
                self._outside,
                self._memtx_dir,
                view,
                instance.box.dialect,
                str(instance.uuid),
                recovered.vclock,
                SynchroStates(synchro.raft, synchro.promote()),
                slice_size=SLICE_WHILE_LOADING,
            )
        LOG.info("joined as replica %d at %s, snapshot %s", recovered.replica_id, recovered.vclock, path)
        self._adopt(recovered)

    def _adopt(self, recovered: RecoveredBox) -> None:
        instance = self.instance
        instance.journal.continue_at(recovered.vclock, recovered.last)
        instance.replicaset_uuid = recovered.replicaset_uuid or NOBODY
        self._set_id(recovered.replica_id)
        synchro = recovered.synchro
        pending: list[Pending[Revocable]] = [
            Pending(each.effect, each.lsn, each.is_synchronous) for each in synchro.pending
        ]
        # The queue decides nothing before ACKs of peers or a promotion; from then on the quorum of the members counts.
        instance.queue.start(instance.id, synchro.promote(), synchro.tenures, pending)
        self.replication.replica_set.set_members(_members(instance))
        self.decide_anew()
        instance.elections.start(synchro.raft, instance.id)
        _limit(instance)

    def decide_anew(self) -> None:
        """Apply changed options of synchronous replication and elections, or a changed number of members."""
        instance, configuration = self.instance, self.instance.configuration
        dialect, ids = instance.box.dialect, list(self.replication.replica_set.members)
        quorum = configuration.synchro_quorum(dialect, len(ids))
        instance.queue.configure(
            quorum=quorum,
            timeout=configuration.replication_synchro_timeout,
            max_size=configuration.replication_synchro_queue_max_size,
            member_count=len(ids),
        )
        instance.elections.set_quorum(quorum, ids)
        instance.elections.configure(configuration.election(dialect))

    def _forget(self) -> None:
        instance = self.instance
        instance.box.clear()
        instance.box.in_flight.clear()
        instance.queue.start(0, Promote(0, 0, 0), Tenures({}, (), {}), ())
        instance.journal.continue_at(instance.journal.vclock)
        instance.replicaset_uuid = NOBODY
        self._set_id(0)

    def _set_id(self, replica_id: int) -> None:
        self.instance.journal.replica_id = self.instance.box.replica_id = replica_id

    def _check_identity(self, recovered: RecoveredBox) -> None:
        wanted, found = _uuid(self._configuration.instance_uuid), recovered.instance_uuid
        if wanted not in (None, found):
            raise errors.InstanceUuidMismatch(f"Instance UUID mismatch: expected {wanted}, got {found}")
        wanted, replicaset = _uuid(self._configuration.replicaset_uuid), recovered.replicaset_uuid
        if wanted not in (None, replicaset):
            raise errors.ReplicasetUuidMismatch(f"Replica set UUID mismatch: expected {wanted}, got {replicaset}")

    # --- once there is data ---

    def _keep_files(self) -> None:
        """Start checkpoints, garbage collection and relays."""
        outside, configuration, instance = self._outside, self._configuration, self.instance
        collector = GarbageCollector(
            outside, self._memtx_dir, self._wal_dir, checkpoint_count=configuration.checkpoint_count
        )
        self.stack.push_async_callback(collector.close)
        self.checkpointer = instance.files = Checkpointer(
            outside,
            instance.box,
            instance.journal,
            collector,
            memtx_dir=self._memtx_dir,
            instance_uuid=str(instance.uuid),
            queue=instance.queue,
            raft=lambda: instance.elections.persisted,
            checkpoint_interval=configuration.checkpoint_interval,
            checkpoint_wal_threshold=configuration.checkpoint_wal_threshold,
            refusal=lambda: errors.Unsupported(NO_SNAPSHOTS, hint=REJOIN) if instance.is_expelled else None,
        )
        self.checkpointer.start()
        self.stack.push_async_callback(self.checkpointer.stop)
        self.relays = self.server.relays = Relays(instance, collector)
        self.stack.push_async_callback(self.relays.close)
        self.relays.on_subscribed.append(self.replication.peer_subscribed)
        self.relays.on_ack.append(self.replication.peer_acknowledged)
        self.relays.on_ack.append(instance.queue.ack)
        # A lost member may lose its data before it reconnects; after that it acknowledges its rows again.
        self.relays.on_lost.append(instance.queue.forget)
        instance.peers = _Peers(self.replication, self.relays)
        instance.followers = self.relays

    def _apply_rows(self) -> None:
        """Let appliers apply the rows of peers from now on."""
        instance = self.instance
        self._member.applying = Applying(
            instance.box,
            instance.journal,
            instance.commits,
            self._outside.clock,
            skip_conflict=lambda: instance.configuration.replication_skip_conflict,
        )
        self._member.applying.on_failure.append(self.replication.stop_all)
        if instance.box.dialect is not Dialect.V2_6:
            self._member.applying.on_term = instance.elections.heard_term

    def _members_changed(self) -> None:
        """Handle a change of `_cluster`: members were added or removed, or this instance has got its id."""
        instance = self.instance
        removed = self.replication.replica_set.set_members(_members(instance))
        own = self.replication.replica_set.ids.get(instance.uuid, 0)
        if instance.is_expelled:
            return
        if instance.id and own != instance.id:
            self._expelled()
            return
        if own != instance.id:
            LOG.info("registered as replica %d", own)
            self._set_id(own)
            instance.queue.registered(own)
            instance.elections.registered(own)
            instance.settle_read_only()
            self.replication.got_id()
        for uuid, replica_id in removed.items():
            LOG.info("%s is no longer a member", uuid)
            self.relays.member_removed(uuid)
            instance.queue.forget(replica_id)
        self.decide_anew()
        for replica_id in removed.values():  # last: with the old quorum a leader could lose its quorum and resign
            instance.elections.connection(replica_id, upstream=False, downstream=False)

    def _expelled(self) -> None:
        """Stop writing, replicating and voting: our own row was deleted from `_cluster`."""
        instance = self.instance
        instance.expelled_id = instance.id
        LOG.error("expelled as replica %d: read-only, no replication, no elections; %s", instance.id, REJOIN)
        self._set_id(0)
        instance.queue.expelled()
        instance.elections.expelled()
        self.replication.expelled()
        self.relays.expelled()
        instance.settle_read_only()

    async def disk_usage(self) -> DiskUsage:
        """Return sizes and free space of the directories; raise OSError if the disk fails or does not answer."""
        outside, places = self._outside, (self._memtx_dir, self._wal_dir)
        return await self._usage_query.get(outside, disk_usage, outside.disk, *places, timeout=USAGE_SECONDS)

    # --- address ---

    async def listen(self, configuration: Configuration) -> None:
        """Listen on the configured address, then close the previous listener. Connections stay open.

        Raise CannotListen if the address cannot be used; in that case the previous listener stays open.
        """
        server, instance = self.server, self.instance
        if configuration.listen is None:
            await server.stop_listening()
            instance.listen = None
            return
        uri = listen_uri(configuration.listen)
        try:
            await server.listen(uri.host, uri.port, tls=tls_of(configuration))
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotListen(f"cannot listen on {uri.address}: {reason}", hint=listen_hint(error)) from error
        instance.listen = replace(uri, port=server.port).address
        LOG.info("listening on %s%s", instance.listen, " with TLS" if configuration.ssl_cert_file else "")


def listen_hint(error: OSError) -> str:
    """Return advice for an address that cannot be listened on."""
    match error.errno:
        case errno.EADDRINUSE:
            return "find the process that uses it, or choose another address with listen"
        case errno.EACCES:
            return "ports below 1024 require a privilege; choose another address with listen"
    return "check that it is an address of this machine, or choose another address with listen"


class _Peers:
    """Upstreams and downstreams for `box.info`; implements `node.instance.Peers`."""

    def __init__(self, replication: Replication, relays: Relays) -> None:
        self.upstream = replication.upstream
        self.downstream = relays.downstream
        self.is_intact = relays.is_intact
        self._relays = relays

    def anonymous(self) -> list[tuple[UUID, dict[str, Any]]]:
        return self._relays.anonymous


def apply_options(parts: Components, changed: Sequence[str]) -> None:
    """Pass the options `changed` to the components that do not read the configuration on each use."""
    configuration = parts.instance.configuration
    _limit(parts.instance)
    due = {name: getattr(configuration, name) for name in changed if name.startswith("checkpoint_")}
    parts.checkpointer.reconfigure(**due)
    parts.server.reconfigure()
    if any(name.startswith(("replication_synchro", "election_")) or name == "replication_timeout" for name in changed):
        parts.decide_anew()
    if "wal_cleanup_delay" in changed:
        parts.relays.reconfigure()


def _members(instance: Instance) -> list[tuple[int, UUID]]:
    """Return the confirmed members: a pending change of `_cluster` must not change the quorum that decides on it."""
    box = instance.box
    cluster = box.spaces.get(CLUSTER_ID)
    if cluster is None or cluster.primary is None:
        return []
    with box.open_view(confirmed=True) as view:
        rows = [unpack(raw) for _, raw in view.source(cluster.primary).scan(WHOLE)]
    return [(row[0], UUID(row[1])) for row in rows]


def _limit(instance: Instance) -> None:
    instance.settle_read_only()
    instance.box.tuple_size_max = instance.configuration.memtx_max_tuple_size
    instance.journal.too_long_threshold = instance.configuration.too_long_threshold


def tls_of(configuration: Configuration) -> Tls | None:
    """Return the TLS settings of the listener; None without TLS."""
    if configuration.ssl_cert_file is None:
        return None
    return Tls(
        cert_file=configuration.ssl_cert_file,
        key_file=configuration.ssl_key_file,
        password=configuration.ssl_password,
        ca_file=configuration.ssl_ca_file,
        ciphers=configuration.ssl_ciphers,
    )


def _log_start(files: LogDirectory) -> VClock:
    """Return the start of the oldest log; without logs, the vclock of the newest snapshot."""
    oldest = files.logs[0] if files.logs else files.newest_snapshot()
    return VClock(oldest.meta.vclock) if oldest is not None else VClock()


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)
