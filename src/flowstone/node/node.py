"""A running node: its parts started in order, one object to use them by, and stopped in the opposite order.

Public as `flowstone.Node`. Lock, recovery or birth, log, checkpoints, listener: each lives in its own module; here is
only what holds them together, and what a program that embeds a node calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

from flowstone.box import ddl
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.transaction import Transaction as BoxTransaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.node.changes import Trigger, listener
from flowstone.node.commits import Listener
from flowstone.node.configuration import OPTIONS, Configuration, NodeOptions, configure
from flowstone.node.info import box_info, replication_anon
from flowstone.node.instance import Function, Instance
from flowstone.node.option import incorrect
from flowstone.node.parts import Parts, Wishes, apply_options
from flowstone.node.spaces import Space
from flowstone.node.statistics import DiskUsage, Statistics, free_space, statistics_of
from flowstone.node.transactions import Transaction, View
from flowstone.node.waiting import wait_read_only
from flowstone.outside import Outside, production

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")


class Path(Protocol):
    """A path as `pathlib` has it."""

    def __fspath__(self) -> str: ...


class NotRunning(FlowstoneError):
    """Something was asked of a node that is not started, or has stopped."""


class Node:
    """A node with its data in `work_dir`: `async with Node("data", listen="127.0.0.1:3301") as node`.

    Options are those of `box.cfg` (docs/reference/configuration.md); without `listen` only this program reaches it.
    `user` is the name and password of a first user who may do everything; he is created with new data only.
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
        self._running: Parts | None = None
        self._reconfiguring = asyncio.Lock()
        self._stopping = asyncio.Lock()

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

    async def _start(self, stack: AsyncExitStack) -> Parts:
        wishes = Wishes(
            self._user,
            self._pid,
            self._functions,
            self._on_commit,
            self._on_rollback,
            self._on_election,
            self._reload,
        )
        parts = Parts(self._outside, self._configuration, wishes, stack)
        await parts.start()
        return parts

    async def stop(self) -> None:
        """Ends connections, writes what is left to write, and lets go of the directory. Whoever else stops it meanwhile
        waits for that, too."""
        async with self._stopping:
            if self._running is None:
                return
            try:
                await self._running.stack.aclose()  # until then functions that clients have called may use the node
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
    def _parts(self) -> Parts:
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

    def transaction(
        self, isolation: str = "default", *, is_sync: bool = False, timeout: float | None = None
    ) -> Transaction:
        """Statements that become true together: `async with node.transaction() as transaction`.

        `isolation="linearizable"`: it begins when this node has whatever was committed before, anywhere, and is for
        synchronous spaces only. `is_sync`: it waits for a quorum, as if its spaces were synchronous. `timeout`: the
        seconds that all of it may take, `txn_timeout` otherwise.
        """
        return Transaction(self._instance, isolation, is_sync=is_sync, timeout=timeout)

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

    def gc_info(self) -> dict[str, Any]:
        """What `box.info.gc()` shows."""
        return self._instance.files.gc_info()

    def replication_anon(self) -> dict[str, Any]:
        """What `box.info.replication_anon()` shows."""
        return replication_anon(self._instance)

    def statistics(self) -> Statistics:
        """What the node has done since its start, in numbers."""
        return statistics_of(self._instance, self._parts.relays.replicas)

    async def free_space(self) -> dict[str, Any]:
        """Free bytes of the file systems of the node's directories, or why they cannot be determined."""
        return await free_space(self._instance)

    async def disk_usage(self) -> DiskUsage:
        """What its directories hold, and how much more they can; OSError if the disk fails or does not answer."""
        return await self._parts.disk_usage()

    # --- who leads ---

    async def promote(self) -> None:
        """As `box.ctl.promote()`: stands for election, and returns when this node leads; it takes writes soon after
        (`wait_rw`), when the queue of synchronous transactions is its own.

        Without elections it just takes the queue over, as soon as a quorum has what waits in it.
        """
        self._check_has_terms("promote()")
        await self._instance.elections.promote()

    async def demote(self) -> None:
        """As `box.ctl.demote()`: gives back what `promote` has taken."""
        self._check_has_terms("demote()")
        await self._instance.elections.demote()

    async def clear_synchro_queue(self) -> None:
        """In dialect 2.6, which knows no promotion: decides about what a dead owner has left in the queue."""
        if self.box.dialect is Dialect.V2_6:
            await self._instance.queue.clear()
        else:
            await self.promote()

    async def wait_rw(self, timeout: float | None = None) -> None:
        """Returns when the node takes writes; ER_SYSTEM "timed out" after so many seconds."""
        await wait_read_only(self._instance, False, timeout)

    async def wait_ro(self, timeout: float | None = None) -> None:
        """Returns when the node takes no writes; ER_SYSTEM "timed out" after so many seconds."""
        await wait_read_only(self._instance, True, timeout)

    def _check_has_terms(self, what: str) -> None:
        if self.box.dialect is Dialect.V2_6:
            raise errors.Unsupported(f"Dialect 2.6 does not support {what}")

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

    def on_election(self, trigger: Callable[[], T]) -> Callable[[], T]:
        """From now on calls `trigger`, which may be async, after every change of what `info()["election"]` shows."""
        self._on_election.append(trigger)
        return trigger

    # --- options ---

    async def reconfigure(self, **options: Unpack[NodeOptions]) -> list[str]:
        """Sets options of the running node, as `box.cfg` does; the names of those that changed.

        An option that cannot change is error 58, a value that it cannot have error 59, and nothing is changed then.
        `replication`, also where it is what it was, connects anew to peers that are not followed, and waits until they
        have been caught up with.
        """
        parts = self._parts
        async with self._reconfiguring:  # opening an address takes time, and somebody else may ask meanwhile
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

    async def _replicate(self, parts: Parts, changed: Sequence[str], *, is_given: bool) -> None:
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
        """Who the node is may be said again, if it is true."""
        instance = self._instance
        names = {"instance_uuid": str(instance.uuid), "replicaset_uuid": str(instance.replicaset_uuid)}
        return {name: value for name, value in options.items() if name not in names or value not in (None, names[name])}
