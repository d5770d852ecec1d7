"""A running node: its parts started in order, one object to use them by, and stopped in the opposite order.

Public as `flowstone.Node`. Lock, recovery or birth, log, checkpoints, listener: each lives in its own module; here is
only what holds them together, and what a program that embeds a node calls.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar
from uuid import UUID

from flowstone.box import ddl
from flowstone.box.bootstrap import FirstUser
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.transaction import Transaction as BoxTransaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.auth import hash_of_hash
from flowstone.node.changes import Trigger, listener
from flowstone.node.checkpoint import Checkpointer
from flowstone.node.commits import Commits, Listener
from flowstone.node.configuration import Configuration, configure, incorrect, listen_uri
from flowstone.node.gc import GarbageCollector
from flowstone.node.info import box_info
from flowstone.node.instance import Function, Instance
from flowstone.node.journal import Journal, WalMode
from flowstone.node.recovery import Recovered, bootstrap, dialect_of, find_files, is_empty, lock_directory, recover
from flowstone.node.server import Server, limits_of
from flowstone.node.spaces import Space
from flowstone.node.transactions import Transaction, View
from flowstone.node.warm_up import warm_up
from flowstone.outside import Outside, Tls, production

LOG = logging.getLogger("flowstone.node")
DEFAULT_DIALECT: Final = "2.11"

T = TypeVar("T")


class Path(Protocol):
    """A path as `pathlib` has it."""

    def __fspath__(self) -> str: ...


class NotRunning(FlowstoneError):
    """Something was asked of a node that is not started, or has stopped."""


class CannotListen(FlowstoneError):
    """The address is taken, or not ours, or a certificate cannot be read."""


class Node:
    """A node with its data in `work_dir`: `async with Node("data", listen="127.0.0.1:3301") as node`.

    Options are those of `box.cfg` (see docs/configuration.md); without `listen` nobody but this program reaches it.
    `user` is the name and password of a first user who may do everything; he is created with new data only.
    """

    def __init__(
        self,
        work_dir: str | Path = "data",
        *,
        user: tuple[str, str] | None = None,
        outside: Outside | None = None,
        pid: int = 0,
        **options: Any,
    ) -> None:
        self._configuration = configure(
            {"work_dir": work_dir if isinstance(work_dir, str) else work_dir.__fspath__(), **options}
        )
        self._user = user
        self._outside = outside if outside is not None else production()
        self._pid = pid
        self._functions: dict[str, Function] = {}
        self._on_commit: list[Listener] = []
        self._on_rollback: list[Listener] = []
        self._running: _Running | None = None
        self._reconfiguring = asyncio.Lock()

    # --- life ---

    async def start(self) -> None:
        """Locks the directory, recovers or creates its data, and listens. What keeps it from that is raised."""
        if self._running is not None:
            raise NotRunning("the node has been started already", hint="make another Node")
        stack = AsyncExitStack()
        try:
            self._running = await self._start(stack)
        except BaseException:
            await stack.aclose()
            raise

    async def stop(self) -> None:
        """Ends connections, writes what is left to write, and lets go of the directory."""
        running, self._running = self._running, None
        if running is not None:
            await running.stack.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def box(self) -> Box:
        """The spaces in memory, for who needs more than this class offers."""
        return self._instance.box

    @property
    def configuration(self) -> Configuration:
        """The options as they are now."""
        return self._configuration

    @property
    def address(self) -> str | None:
        """Where clients reach the node, with the port that was chosen for port 0; None while it does not listen."""
        return self._instance.listen

    @property
    def _parts(self) -> _Running:
        if self._running is None:
            raise NotRunning("the node is not running", hint="use it inside `async with`")
        return self._running

    @property
    def _instance(self) -> Instance:
        return self._parts.instance

    # --- data ---

    def space(self, space: str | int) -> Space:
        """The space with this name or id."""
        return Space(self, self.box.space(space).id)

    async def create_space(
        self,
        name: str,
        *,
        format: Sequence[Any] | None = None,
        if_not_exists: bool = False,
        is_sync: bool | None = None,
        is_local: bool = False,
        temporary: bool = False,
        engine: str = "memtx",
        field_count: int = 0,
        id: int | None = None,
        user: str | None = None,
    ) -> Space:
        """Makes a space; fields of `format` are `("name", "type")` or `{"name": …, "type": …, "is_nullable": …}`."""
        options = {
            "format": format,
            "if_not_exists": if_not_exists,
            "is_sync": is_sync,
            "is_local": is_local,
            "temporary": temporary,
            "engine": engine,
            "field_count": field_count,
            "id": id,
            "user": user,
        }
        made, _ = await self.write(lambda transaction: ddl.create_space(transaction, name, **options))
        return self.space(made.id)

    def transaction(self, isolation: str = "default") -> Transaction:
        """Statements that become true together: `async with node.transaction() as transaction`."""
        return Transaction(self._instance, isolation)

    def read_view(self) -> View:
        """All spaces as they are now, whatever is written later: `with node.read_view() as view`."""
        return View(self._instance)

    async def write(self, statement: Callable[[BoxTransaction], T]) -> T:
        """Runs `statement` in a transaction of its own, as admin, and returns its result when that is in the log."""
        instance = self._instance
        transaction = instance.box.begin()
        try:
            result = statement(transaction)
        except BaseException:
            transaction.rollback()
            raise
        await instance.commits.commit(transaction)
        return result

    async def snapshot(self) -> None:
        """Returns when there is a snapshot of now; writing goes on meanwhile."""
        await self._instance.files.snapshot()

    def info(self) -> dict[str, Any]:
        """What `box.info` shows."""
        return box_info(self._instance)

    # --- users ---

    async def create_user(self, name: str, password: str, *, if_not_exists: bool = False) -> None:
        now = int(self._outside.clock.wall())
        await self.write(
            lambda txn: ddl.create_user(txn, name, password=password, if_not_exists=if_not_exists, time=now)
        )

    async def drop_user(self, name: str, *, if_exists: bool = False) -> None:
        """Drops the user with all that it owns."""
        await self.write(lambda txn: ddl.drop_user(txn, name, if_exists=if_exists))

    async def grant(
        self, user: str, privileges: str, object_type: str | None = None, object_name: str | None = None
    ) -> None:
        """As `box.schema.user.grant`: `("app", "read,write", "space", "orders")`; a role alone: `("app", "super")`."""
        await self.write(lambda txn: ddl.grant(txn, user, privileges, object_type, object_name))

    async def revoke(
        self, user: str, privileges: str, object_type: str | None = None, object_name: str | None = None
    ) -> None:
        await self.write(lambda txn: ddl.revoke(txn, user, privileges, object_type, object_name))

    # --- functions and triggers; they may be set before the node starts ---

    def register(self, name: str, function: Function) -> None:
        """Lets clients CALL `function` by this name; it may be async. A tuple that it returns is several results."""
        self._functions[name] = function

    def function(self, name: str) -> Callable[[Function], Function]:
        """`register`, as a decorator."""

        def decorate(function: Function) -> Function:
            self.register(name, function)
            return function

        return decorate

    def on_commit(self, trigger: Trigger) -> Trigger:
        """From now on calls `trigger` with the changes of every transaction that is in the log."""
        self._on_commit.append(listener(trigger))
        return trigger

    def on_rollback(self, trigger: Trigger) -> Trigger:
        """From now on calls `trigger` with the changes of every transaction that the log could not take."""
        self._on_rollback.append(listener(trigger))
        return trigger

    # --- options ---

    async def reconfigure(self, **options: Any) -> list[str]:
        """Sets options of the running node, as `box.cfg` does; the names of those that changed.

        An option that cannot change is error 58, a value that it cannot have error 59, and nothing is changed then.
        """
        running = self._parts
        async with self._reconfiguring:  # opening an address takes time, and somebody else may ask meanwhile
            wanted = self._configuration.changed(self._without_identity(options))
            changed = self._configuration.differences(wanted)
            if "listen" in changed:
                await self._listen(running, wanted)
            self._configuration = running.instance.configuration = wanted
            self._apply(running, changed)
        for name in changed:
            LOG.info("set '%s' configuration option to %r", name, getattr(wanted, name))
        return changed

    async def _reload(self, options: dict[str, Any]) -> None:
        await self.reconfigure(**options)

    def _without_identity(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Who the node is may be said again, if it is true."""
        instance = self._instance
        names = {"instance_uuid": str(instance.uuid), "replicaset_uuid": str(instance.replicaset_uuid)}
        return {name: value for name, value in options.items() if name not in names or value not in (None, names[name])}

    def _apply(self, running: _Running, changed: Sequence[str]) -> None:
        """Tells the parts that do not look for themselves."""
        configuration = self._configuration
        _limit(running.instance)
        due = {name: getattr(configuration, name) for name in changed if name.startswith("checkpoint_")}
        running.checkpointer.reconfigure(**due)
        running.server.limits = limits_of(running.instance)

    # --- the parts ---

    async def _start(self, stack: AsyncExitStack) -> _Running:
        outside, configuration = self._outside, self._configuration
        work_dir = configuration.work_dir
        wal_dir = posixpath.normpath(posixpath.join(work_dir, configuration.wal_dir))
        memtx_dir = posixpath.normpath(posixpath.join(work_dir, configuration.memtx_dir))
        stack.enter_context(lock_directory(outside.disk, wal_dir))
        outside.disk.make_directory(memtx_dir)
        box, recovered = await self._load(memtx_dir, wal_dir)
        box.replica_id = recovered.replica_id
        journal = Journal(
            outside,
            wal_dir,
            instance_uuid=str(recovered.instance_uuid),
            vclock=recovered.vclock,
            replica_id=recovered.replica_id,
            mode=WalMode(configuration.wal_mode),
            wal_max_size=configuration.wal_max_size,
            version=box.dialect.version_text,
            last=recovered.last,
        )
        stack.push_async_callback(journal.close)
        checkpointer = Checkpointer(
            outside,
            box,
            journal,
            GarbageCollector(outside, memtx_dir, wal_dir, checkpoint_count=configuration.checkpoint_count),
            memtx_dir=memtx_dir,
            instance_uuid=str(recovered.instance_uuid),
            synchro=recovered.synchro,
            checkpoint_interval=configuration.checkpoint_interval,
            checkpoint_wal_threshold=configuration.checkpoint_wal_threshold,
        )
        checkpointer.start()
        stack.push_async_callback(checkpointer.stop)
        instance = self._make_instance(box, journal, recovered, checkpointer)
        server = Server(instance)
        stack.push_async_callback(server.close)
        running = _Running(stack, instance, checkpointer, server)
        instance.status = "running"
        await self._listen(running, configuration)
        return running

    async def _listen(self, running: _Running, configuration: Configuration) -> None:
        """Opens the address that is configured, and only then closes the one before; connections stay."""
        server, instance = running.server, running.instance
        if configuration.listen is None:
            await server.stop_listening()
            instance.listen = None
            return
        uri = listen_uri(configuration.listen)
        if instance.listen is None:
            await self._outside.blocking(warm_up, self._outside)
        try:
            await server.listen(uri.host, uri.port, tls=_tls(configuration))
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "see who has it, or choose another address with listen"
            raise CannotListen(f"cannot listen on {uri.address}: {reason}", hint=hint) from error
        instance.listen = replace(uri, port=server.port).address
        LOG.info("listening on %s%s", instance.listen, " with TLS" if configuration.ssl_cert_file else "")

    async def _load(self, memtx_dir: str, wal_dir: str) -> tuple[Box, Recovered]:
        """The data that is there, or new data."""
        configuration = self._configuration
        files = find_files(self._outside.disk, memtx_dir, wal_dir)
        if is_empty(files):
            return await self._give_birth(memtx_dir)
        found = dialect_of(files)
        assert found is not None, "whoever wrote these files has a dialect"
        if configuration.dialect not in (None, found.value):
            raise incorrect("dialect", f"{memtx_dir} has data of dialect {found.value}")
        if self._user is not None:
            LOG.warning("the user %s is not created: that is done for new data only", self._user[0])
        box = Box(found)
        recovered = await recover(self._outside, files, box, force=configuration.force_recovery)
        self._check_identity(recovered)
        return box, recovered

    async def _give_birth(self, memtx_dir: str) -> tuple[Box, Recovered]:
        configuration = self._configuration
        box = Box(Dialect(configuration.dialect or DEFAULT_DIALECT))
        user = FirstUser(self._user[0], hash_of_hash(self._user[1])) if self._user is not None else None
        recovered = await bootstrap(
            self._outside,
            memtx_dir,
            box,
            instance_uuid=_uuid(configuration.instance_uuid),
            replicaset_uuid=_uuid(configuration.replicaset_uuid),
            first_user=user,
        )
        LOG.info("new data in %s, dialect %s", memtx_dir, box.dialect.value)
        if user is None and configuration.listen:
            LOG.warning(
                "only guest can log in, who may do little; start new data with --user to have one who may do everything"
            )
        return box, recovered

    def _check_identity(self, recovered: Recovered) -> None:
        wanted, found = _uuid(self._configuration.instance_uuid), recovered.instance_uuid
        if wanted not in (None, found):
            raise errors.InstanceUuidMismatch(f"Instance UUID mismatch: expected {wanted}, got {found}")
        wanted, replicaset = _uuid(self._configuration.replicaset_uuid), recovered.replicaset_uuid
        if wanted not in (None, replicaset):
            raise errors.ReplicasetUuidMismatch(f"Replica set UUID mismatch: expected {wanted}, got {replicaset}")

    def _make_instance(self, box: Box, journal: Journal, recovered: Recovered, checkpointer: Checkpointer) -> Instance:
        outside = self._outside
        commits = Commits(box, journal, outside.clock)
        commits.on_commit = self._on_commit
        commits.on_rollback = self._on_rollback
        instance = Instance(
            outside,
            box,
            journal,
            commits,
            recovered.instance_uuid,
            recovered.replicaset_uuid or UUID(int=0),
            self._configuration,
            files=checkpointer,
            functions=self._functions,
            pid=self._pid,
            synchro=recovered.synchro,
            reload=self._reload,
            started=outside.clock.monotonic(),
        )
        _limit(instance)
        if recovered.synchro.pending:
            LOG.warning(
                "%d transactions in the synchronous queue of replica %d wait for a verdict:"
                " until they have one nothing can be changed, and no snapshot made",
                len(recovered.synchro.pending),
                recovered.synchro.queue_owner_id,
            )
        return instance


class _Running(NamedTuple):
    """The parts of a node between its start and its stop; `stack` knows how to end them."""

    stack: AsyncExitStack
    instance: Instance
    checkpointer: Checkpointer
    server: Server


def _tls(configuration: Configuration) -> Tls | None:
    if configuration.ssl_cert_file is None:
        return None
    return Tls(
        cert_file=configuration.ssl_cert_file,
        key_file=configuration.ssl_key_file,
        password=configuration.ssl_password,
        ca_file=configuration.ssl_ca_file,
        ciphers=configuration.ssl_ciphers,
    )


def _limit(instance: Instance) -> None:
    instance.settle_read_only()
    instance.box.tuple_size_max = instance.configuration.memtx_max_tuple_size


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)
