"""`Node`, a node embedded in a program; public as `flowstone.Node`.

`node/components.py` starts the components (lock, recovery or bootstrap, log, checkpoints, listener), each of which has
a module of its own. This module only has the methods that programs call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.node.changes import Trigger, listener
from flowstone.node.components import Components, StartupHooks, apply_options
from flowstone.node.configuration import OPTIONS, Configuration, NodeOptions, configure
from flowstone.node.info import box_info, replication_anon
from flowstone.node.instance import Function, Instance
from flowstone.node.option import incorrect
from flowstone.node.server.mode_waiters import wait_read_only
from flowstone.node.spaces import Space
from flowstone.node.statistics import DiskUsage, Statistics, free_space, statistics_of
from flowstone.node.transactions import Transaction, View
from flowstone.node.wal.commits import Listener
from flowstone.outside import Outside, production

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")


class Path(Protocol):
    """A path such as those of `pathlib`."""

    def __fspath__(self) -> str: ...


class NotRunning(FlowstoneError):
    """A method was called on a node that is not running, or `start` on one that is."""


class Node:
    """A node with its data in `work_dir`. `async with` starts and stops it:

        async with Node("data", listen="127.0.0.1:3301", user=("app", "secret")) as node:
            orders = await node.create_space("orders", format=[("id", "unsigned"), ("item", "string")])
            await orders.create_index("primary")
            await orders.insert([1, "tea"])
            print(orders.get(1))

    Options are those of `box.cfg` (docs/reference/configuration.md). Without `listen` the node accepts no clients, and
    only this program can use it. `user` is name and password of a user with all rights, which is created together with
    new data and ignored otherwise. Methods must be called in the thread of the event loop that runs the node, and raise
    NotRunning while it is not running; functions and triggers may be registered before the start. A statement that
    fails raises the TarantoolError that a client would receive.
    """

    def __init__(
        self,
        work_dir: str | Path = "data",
        *,
        user: tuple[str, str] | None = None,
        outside: Outside | None = None,
        pid: int = 0,
        **options: Unpack[NodeOptions],
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
        self._on_election: list[Callable[[], object]] = []
        self._running: Components | None = None
        self._reconfiguring = asyncio.Lock()
        self._stopping = asyncio.Lock()

    # --- lifecycle ---

    async def start(self) -> None:
        """Lock the directory, recover or create its data, and listen.

        With peers in `replication`, return when the node is in sync with them, or has become an orphan after
        `replication_sync_timeout`. Raise NotRunning if the node is running already, and the error that prevents the
        start; everything that was started is stopped then.
        """
        if self._running is not None:
            raise NotRunning("the node is already running", hint="create another Node")
        stack = AsyncExitStack()
        try:
            self._running = await self._start(stack)
        except BaseException:
            await stack.aclose()
            raise

    async def _start(self, stack: AsyncExitStack) -> Components:
        wishes = StartupHooks(
            self._user,
            self._pid,
            self._functions,
            self._on_commit,
            self._on_rollback,
            self._on_election,
            self._reload,
        )
        parts = Components(self._outside, self._configuration, wishes, stack)
        await parts.start()
        return parts

    async def stop(self) -> None:
        """Close connections, write pending rows to the log, and release the directory.

        Do nothing if the node is not running. Concurrent calls all return when the node has stopped.
        """
        async with self._stopping:
            if self._running is None:
                return
            try:
                await self._running.stack.aclose()  # functions called by clients may use the node until then
            finally:
                self._running = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def box(self) -> Box:
        """The spaces in memory, for operations that this class does not offer."""
        return self._instance.box

    @property
    def configuration(self) -> Configuration:
        """The current options."""
        return self._configuration

    @property
    def address(self) -> str | None:
        """The address that the node listens on, with the chosen port instead of port 0; None if it does not listen."""
        return self._instance.listen

    @property
    def _parts(self) -> Components:
        if self._running is None:
            raise NotRunning("the node is not running", hint="use the node inside `async with`")
        return self._running

    @property
    def _instance(self) -> Instance:
        return self._parts.instance

    # --- data ---

    def space(self, space: str | int) -> Space:
        """Return the space with this name or id; raise NoSuchSpace if it does not exist."""
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
        """Create a space and return it.

        The options are those of `box.schema.space.create`. Fields of `format` are `("name", "type")` or
        `{"name": …, "type": …, "is_nullable": …}`. Raise SpaceExists if the name is taken, unless `if_not_exists`.
        """
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

    def transaction(
        self, isolation: str = "default", *, is_sync: bool = False, timeout: float | None = None
    ) -> Transaction:
        """Return a transaction for `async with node.transaction() as transaction`: it commits at the end of the block.

        With `isolation="linearizable"` it begins when this node has all transactions that were committed before on any
        member, and may use synchronous spaces only. With `is_sync` the commit waits for a quorum, as if the spaces were
        synchronous. After `timeout` seconds, by default `txn_timeout`, the transaction is aborted.
        """
        return Transaction(self._instance, isolation, is_sync=is_sync, timeout=timeout)

    def read_view(self) -> View:
        """Return a read view for `with node.read_view() as view`: all spaces in their present state."""
        return View(self._instance)

    async def write(self, statement: Callable[[BoxTransaction], T]) -> T:
        """Run `statement` in a transaction of its own, with the rights of admin, and return its result.

        Return when the transaction is committed. If `statement` raises an error, roll back and raise that error.
        """
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
        """Write a snapshot of the present state; writes of clients continue meanwhile."""
        await self._instance.files.snapshot()

    def info(self) -> dict[str, Any]:
        """Return the map that `box.info` shows."""
        return box_info(self._instance)

    def gc_info(self) -> dict[str, Any]:
        """Return the map that `box.info.gc()` shows."""
        return self._instance.files.gc_info()

    def replication_anon(self) -> dict[str, Any]:
        """Return the map that `box.info.replication_anon()` shows."""
        return replication_anon(self._instance)

    def statistics(self) -> Statistics:
        """Return the counters of the node since its start."""
        return statistics_of(self._instance, self._parts.relays.replicas)

    async def free_space(self) -> dict[str, Any]:
        """Return the free bytes of the file systems of the directories, or the reason why they are unknown."""
        return await free_space(self._instance)

    async def disk_usage(self) -> DiskUsage:
        """Return sizes and free space of the directories; raise OSError if the disk fails or does not answer."""
        return await self._parts.disk_usage()

    # --- leadership ---

    async def promote(self) -> None:
        """Make this node the leader, as `box.ctl.promote()` does.

        Start an election, and return when this node has won it. The node is writable soon after, when it owns the
        synchronous queue: use `wait_rw`. If elections are off, take over the queue, as soon as a quorum has
        acknowledged its transactions. Raise Unsupported in dialect 2.6, and a TarantoolError if the promotion fails.
        """
        self._check_has_terms("promote()")
        await self._instance.elections.promote()

    async def demote(self) -> None:
        """Resign as leader and owner of the synchronous queue, as `box.ctl.demote()` does."""
        self._check_has_terms("demote()")
        await self._instance.elections.demote()

    async def clear_synchro_queue(self) -> None:
        """Confirm or roll back the transactions that a dead owner has left in the synchronous queue.

        This is for dialect 2.6, which has no promotion; in later dialects it is the same as `promote`.
        """
        if self.box.dialect is Dialect.V2_6:
            await self._instance.queue.clear()
        else:
            await self.promote()

    async def wait_rw(self, timeout: float | None = None) -> None:
        """Wait until the node is writable; raise ER_SYSTEM "timed out" after `timeout` seconds."""
        await wait_read_only(self._instance, False, timeout)

    async def wait_ro(self, timeout: float | None = None) -> None:
        """Wait until the node is read-only; raise ER_SYSTEM "timed out" after `timeout` seconds."""
        await wait_read_only(self._instance, True, timeout)

    def _check_has_terms(self, what: str) -> None:
        if self.box.dialect is Dialect.V2_6:
            raise errors.Unsupported(f"Dialect 2.6 does not support {what}")

    # --- users ---

    async def create_user(self, name: str, password: str, *, if_not_exists: bool = False) -> None:
        """Create a user; raise UserExists if the name is taken, unless `if_not_exists`."""
        now = int(self._outside.clock.wall())
        await self.write(
            lambda txn: ddl.create_user(txn, name, password=password, if_not_exists=if_not_exists, time=now)
        )

    async def drop_user(self, name: str, *, if_exists: bool = False) -> None:
        """Drop a user and everything that it owns; raise NoSuchUser if it does not exist, unless `if_exists`."""
        await self.write(lambda txn: ddl.drop_user(txn, name, if_exists=if_exists))

    async def grant(
        self, user: str, privileges: str, object_type: str | None = None, object_name: str | None = None
    ) -> None:
        """Grant rights to a user, as `box.schema.user.grant` does.

        Examples: `grant("app", "read,write", "space", "orders")`; for a role, `grant("app", "super")`.
        """
        await self.write(lambda txn: ddl.grant(txn, user, privileges, object_type, object_name))

    async def revoke(
        self, user: str, privileges: str, object_type: str | None = None, object_name: str | None = None
    ) -> None:
        """Revoke rights of a user, with the arguments of `grant`."""
        await self.write(lambda txn: ddl.revoke(txn, user, privileges, object_type, object_name))

    # --- functions and triggers, which may be registered before the start ---

    def register(self, name: str, function: Function) -> None:
        """Let clients CALL `function`, which may be async, by this name.

        Its arguments are those of the CALL. A returned tuple stands for several results, None for no result.
        """
        self._functions[name] = function

    def function(self, name: str) -> Callable[[Function], Function]:
        """Return a decorator that calls `register` with this name."""

        def decorate(function: Function) -> Function:
            self.register(name, function)
            return function

        return decorate

    def on_commit(self, trigger: Trigger) -> Trigger:
        """Call `trigger` with the changes of every transaction that is committed from now on; return `trigger`."""
        self._on_commit.append(listener(trigger))
        return trigger

    def on_rollback(self, trigger: Trigger) -> Trigger:
        """Call `trigger` with the changes of every transaction that is rolled back from now on; return `trigger`."""
        self._on_rollback.append(listener(trigger))
        return trigger

    def on_election(self, trigger: Callable[[], T]) -> Callable[[], T]:
        """Call `trigger`, which may be async, after every change of `info()["election"]`; return `trigger`."""
        self._on_election.append(trigger)
        return trigger

    # --- options ---

    async def reconfigure(self, **options: Unpack[NodeOptions]) -> list[str]:
        """Set options of the running node, as `box.cfg` does; return the names of those that changed.

        Raise error 58 for an option that cannot change, and error 59 for a value that is not allowed; nothing is
        changed then. If `replication` is given, even unchanged, reconnect to peers that are not followed, and wait
        until the node is in sync with them.
        """
        parts = self._parts
        async with self._reconfiguring:  # opening an address takes time; another call may come meanwhile
            before = self._configuration
            wanted = before.changed(self._without_identity(options))
            wanted.check_dialect(parts.instance.box.dialect)
            changed = before.differences(wanted)
            if "replication_anon" in changed and wanted.replication_anon:
                raise incorrect("replication_anon", "cannot be turned on after bootstrap has finished")
            if "listen" in changed:
                await parts.listen(wanted)
            self._take(wanted, changed)
            try:
                await self._replicate(parts, changed, is_given="replication" in options)
            except BaseException:
                if "listen" in changed:
                    await parts.listen(before)
                self._take(before, changed)
                await parts.replication.resume_all()
                raise
        for name in changed:
            LOG.info("set '%s' configuration option to %r", name, OPTIONS[name].shown(getattr(wanted, name)))
        return changed

    def _take(self, configuration: Configuration, changed: Sequence[str]) -> None:
        parts = self._parts
        self._configuration = parts.instance.configuration = configuration
        apply_options(parts, changed)

    async def _replicate(self, parts: Components, changed: Sequence[str], *, is_given: bool) -> None:
        replication = parts.replication
        if "replication_anon" in changed:
            await replication.register()
            replication.follow()
            await replication.sync()
        elif is_given:
            await replication.restart()
        elif any(name.startswith("replication_") for name in changed):
            replication.reconfigure()

    async def _reload(self, options: dict[str, Any]) -> None:
        await self.reconfigure(**options)

    def _without_identity(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return `options` without the UUIDs of instance and replica set if they are unchanged."""
        instance = self._instance
        names = {"instance_uuid": str(instance.uuid), "replicaset_uuid": str(instance.replicaset_uuid)}
        return {name: value for name, value in options.items() if name not in names or value not in (None, names[name])}
