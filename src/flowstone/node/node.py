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
    """A path, such as a path of `pathlib`."""

    def __fspath__(self) -> str: ...


class NotRunning(FlowstoneError):
    """A method was called on a node that is not running, or `start` on one that is."""


class Node:
    """A node with its data in `work_dir`, for `async with`, or `start` and `stop`.

    Methods must be called in the thread of the event loop that runs the node, and raise NotRunning while it is not
    running; functions and triggers may be registered before the start. A statement that fails raises the TarantoolError
    that a client would receive.

    Args:
        work_dir: Directory of the data; created if missing.
        user: Name and password of a user with all rights, which is created together with new data and ignored
            otherwise.
        outside: The door to disk, network and clock; for tests.
        pid: Process id that the node reports.
        options: Options of `box.cfg` (docs/reference/configuration.md). Without `listen` the node accepts no clients,
            and only this program can use it.

    Raises:
        TarantoolError: An option does not exist, or has a value that is not allowed (error 59, ER_CFG).

    Example:
        async with flowstone.Node("data", listen="127.0.0.1:3301", user=("app", "secret")) as node:
            orders = await node.create_space("orders", format=[("id", "unsigned"), ("item", "string")])
            await orders.create_index("primary")
            await orders.insert([1, "tea"])
            print(orders.get(1))
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
        self._on_reconfigure: list[Callable[[list[str]], object]] = []
        self._running: Components | None = None
        self._reconfiguring = asyncio.Lock()
        self._stopping = asyncio.Lock()

    # --- lifecycle ---

    async def start(self) -> None:
        """Lock the directory, recover or create its data, and listen.

        With peers in `replication`, return when the node is in sync with them, or has become an orphan after
        `replication_sync_timeout`. If the start fails, everything that was started is stopped.

        Raises:
            NotRunning: The node is running already.
            AlreadyLocked: Another process uses the directory.
            CannotListen: The address is in use, or not an address of this machine.
            RecoveryError: A row of the log cannot be applied.
            JoinRefused: The snapshot from a peer cannot be used.
            XlogError: A file is damaged.
            FlowstoneError: Another error prevents the start.
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
        """Return the space with this name or id.

        Raises:
            TarantoolError: The space does not exist (error 36, ER_NO_SUCH_SPACE).
        """
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
        """Create a space and return it. Takes the options of `box.schema.space.create`.

        Args:
            name: Name of the space.
            format: Fields as `("name", "type")` or `{"name": …, "type": …, "is_nullable": …}`.
            if_not_exists: Return the space of this name if there is one.
            is_sync: Make its transactions synchronous.
            is_local: Do not replicate the space.
            temporary: Do not write its tuples to the log.
            engine: Storage engine.
            field_count: Number of fields that each tuple must have; 0: any.
            id: Id of the space. By default, the next free one.
            user: Owner of the space.

        Raises:
            TarantoolError: The name is taken (error 10, ER_SPACE_EXISTS), or an option is invalid.
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
        """Return a transaction for `async with`: it commits at the end of the block.

        Args:
            isolation: With `linearizable`, the transaction begins when this node has all transactions that were
                committed before on any member, and may use synchronous spaces only.
            is_sync: Wait for a quorum at the commit, as if the spaces were synchronous.
            timeout: Seconds until the transaction is aborted. By default, `txn_timeout`.

        Example:
            async with node.transaction() as transaction:
                transaction.space("orders").insert((42, "new"))
        """
        return Transaction(self._instance, isolation, is_sync=is_sync, timeout=timeout)

    def read_view(self) -> View:
        """Return a read view for `with`: all spaces in their present state.

        Example:
            with node.read_view() as view:
                print(len(view.space("orders")))
        """
        return View(self._instance)

    async def write(self, statement: Callable[[BoxTransaction], T]) -> T:
        """Run `statement` in a transaction of its own, with the rights of admin. Return when it is committed.

        Returns:
            The result of `statement`. If it raises an error, the transaction is rolled back and the error is raised.
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
        """Return sizes and free space of the directories.

        Raises:
            OSError: The disk fails or does not answer.
        """
        return await self._parts.disk_usage()

    # --- leadership ---

    async def promote(self) -> None:
        """Make this node the leader, as `box.ctl.promote()` does.

        Start an election, and return when this node has won it. The node is writable soon after, when it owns the
        synchronous queue: use `wait_rw`. If elections are off, take over the queue as soon as a quorum has acknowledged
        its transactions.

        Raises:
            TarantoolError: The promotion fails, or the dialect is 2.6, which has none.
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
        """Wait until the node is writable.

        Raises:
            TarantoolError: The node is not writable after `timeout` seconds (ER_SYSTEM, "timed out").
        """
        await wait_read_only(self._instance, False, timeout)

    async def wait_ro(self, timeout: float | None = None) -> None:
        """Wait until the node is read-only.

        Raises:
            TarantoolError: The node is not read-only after `timeout` seconds (ER_SYSTEM, "timed out").
        """
        await wait_read_only(self._instance, True, timeout)

    def _check_has_terms(self, what: str) -> None:
        if self.box.dialect is Dialect.V2_6:
            raise errors.Unsupported(f"Dialect 2.6 does not support {what}")

    # --- users ---

    async def create_user(self, name: str, password: str, *, if_not_exists: bool = False) -> None:
        """Create a user.

        Raises:
            TarantoolError: The name is taken (error 46, ER_USER_EXISTS), and `if_not_exists` is off.
        """
        now = int(self._outside.clock.wall())
        await self.write(
            lambda txn: ddl.create_user(txn, name, password=password, if_not_exists=if_not_exists, time=now)
        )

    async def drop_user(self, name: str, *, if_exists: bool = False) -> None:
        """Drop a user and everything that it owns.

        Raises:
            TarantoolError: The user does not exist (error 45, ER_NO_SUCH_USER), and `if_exists` is off.
        """
        await self.write(lambda txn: ddl.drop_user(txn, name, if_exists=if_exists))

    async def grant(
        self, user: str, privileges: str, object_type: str | None = None, object_name: str | None = None
    ) -> None:
        """Grant rights to a user, as `box.schema.user.grant` does.

        Args:
            user: Name of the user.
            privileges: Names of rights, separated by commas, or of a role.
            object_type: Kind of the object, such as `space` or `universe`. None for a role.
            object_name: Name of the object. None for all objects of the kind.

        Raises:
            TarantoolError: User, right or object does not exist, or the user has the right already.

        Example:
            await node.grant("app", "read,write", "space", "orders")
            await node.grant("app", "super")
        """
        await self.write(lambda txn: ddl.grant(txn, user, privileges, object_type, object_name))

    async def revoke(
        self, user: str, privileges: str, object_type: str | None = None, object_name: str | None = None
    ) -> None:
        """Revoke rights of a user, with the arguments of `grant`."""
        await self.write(lambda txn: ddl.revoke(txn, user, privileges, object_type, object_name))

    # --- functions and triggers, which may be registered before the start ---

    def register(self, name: str, function: Function) -> None:
        """Let clients CALL `function` by this name.

        Args:
            name: Name of the function.
            function: Called with the arguments of the CALL; may be async. A returned tuple stands for several results,
                None for no result.
        """
        self._functions[name] = function

    def function(self, name: str) -> Callable[[Function], Function]:
        """Return a decorator that calls `register` with this name.

        Example:
            @node.function("add")
            def add(a, b):
                return a + b
        """

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

    def on_reconfigure(self, trigger: Callable[[list[str]], T]) -> Callable[[list[str]], T]:
        """Call `trigger` with the names of the options that changed, after every change; return `trigger`.

        Options change by `reconfigure`, and by clients that CALL `box.cfg`.
        """
        self._on_reconfigure.append(trigger)
        return trigger

    # --- options ---

    async def reconfigure(self, **options: Unpack[NodeOptions]) -> list[str]:
        """Set options of the running node, as `box.cfg` does.

        If `replication` is given, even unchanged, reconnect to peers that are not followed, and wait until the node is
        in sync with them.

        Returns:
            The names of the options that changed.

        Raises:
            TarantoolError: An option cannot change (error 58) or has a value that is not allowed (error 59); nothing is
                changed then.
        """
        parts = self._parts
        async with self._reconfiguring:  # opening an address takes time, in which another call may start
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
        for trigger in self._on_reconfigure if changed else ():
            try:
                trigger(list(changed))
            except Exception:
                LOG.exception("reconfiguration trigger failed")
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
