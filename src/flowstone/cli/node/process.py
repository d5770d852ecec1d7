"""The process of `flowstone serve`: its signals, its log, and reloading its configuration.

The node itself is `flowstone.Node`, as in any other program; this module only tells it when to start, stop, reload and
take a snapshot.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

from flowstone.cli import service
from flowstone.cli.console import OK, UsageError, say
from flowstone.cli.log import PLAIN, set_format, set_level, start_log
from flowstone.cli.node import settings
from flowstone.cli.node.node_web import NodeWeb
from flowstone.cli.node.procedure_module import load_procedures
from flowstone.cli.node.serve_data import DataPlace
from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import InstanceUuidMismatch, ReplicasetUuidMismatch
from flowstone.node.configuration import OPTIONS, configure
from flowstone.node.node import Node
from flowstone.xlog.errors import XlogError

GC_THRESHOLD: Final = 50_000
"""New objects between two garbage collections; with Python's default, 700, a few requests in flight trigger one."""


class Process:
    """Runs a node, and handles the signals of its process.

    `arguments` are the options of the command line, `defaults` replace the defaults of options.
    """

    def __init__(self, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._defaults = defaults
        try:
            self._settings = self._read()
        except FlowstoneError:  # report the error in the log format that was requested
            set_format(settings.log_format_of(arguments, os.environ) or PLAIN)
            raise
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._log = logging.getLogger("flowstone")

    def _read(self) -> settings.NodeSettings:
        return settings.read_settings(self._arguments, os.environ, self._defaults)

    async def run(self) -> int:
        """Run the node until a signal stops it, and return the exit code."""
        start_log(self._settings.options.get("log_format", PLAIN))
        set_level(self._settings.options)
        for name in self._settings.strangers:
            self._log.warning("unknown option in environment: %s", name)
        _check_data(self._settings)
        node = Node(**self._settings.options, user=self._settings.user, pid=os.getpid())
        self._register_procedures(node)
        node.on_reconfigure(lambda changed: _configure_log(node))
        web = NodeWeb(node, self._settings.process, self._settings.user)
        self._listen_to_signals(node)
        try:
            await web.start()
            await self._start_node(node)
            if not self._stopping.is_set():
                _collect_seldom()
                self._ready.set()
                say("ready")
                service.tell(service.READY)
            await self._stopping.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await web.stop()
            await node.stop()
        self._log.info("stopped")
        return OK

    def _register_procedures(self, node: Node) -> None:
        module = self._settings.process.procedures
        if module is None:
            return
        procedures = load_procedures(module)
        for procedure in procedures:
            node.register(procedure.name, procedure)
        self._log.info("procedures: %s", ", ".join(procedure.name for procedure in procedures))

    async def _start_node(self, node: Node) -> None:
        """Start the node, and return when it runs or must stop: waiting for peers may never end."""
        if self._stopping.is_set():  # a signal came while HTTP was starting
            return
        self._starting = asyncio.get_running_loop().create_task(node.start())
        try:
            await self._starting
        except (InstanceUuidMismatch, ReplicasetUuidMismatch) as error:
            # Only a mismatch with an option is a usage error: a peer may be corrected, and the next start succeed.
            option = "instance_uuid" if isinstance(error, InstanceUuidMismatch) else "replicaset_uuid"
            if self._settings.options.get(option) is None:
                raise
            raise UsageError(error.message, hint=f"unset {option}, or choose another work_dir") from error
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise

    def _listen_to_signals(self, node: Node) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._start, self._reload, node)
        loop.add_signal_handler(signal.SIGUSR1, self._start, self._snapshot, node)

    def _stop(self, number: signal.Signals) -> None:
        self._log.info("stopping: %s", number.name)
        service.tell(service.STOPPING)
        self._stopping.set()
        if self._starting is not None:
            self._starting.cancel()
        for each in (signal.SIGTERM, signal.SIGINT):  # a second signal kills the process
            asyncio.get_running_loop().remove_signal_handler(each)

    def _start(self, work: Callable[[Node], Coroutine[Any, Any, None]], node: Node) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.get_running_loop().create_task(self._attempt(work, node)))

    async def _attempt(self, work: Callable[[Node], Coroutine[Any, Any, None]], node: Node) -> None:
        await self._ready.wait()  # signals that arrive during the start are handled after it
        try:
            await work(node)
        except (FlowstoneError, OSError) as error:
            self._log.error("%s", error)

    async def _reload(self, node: Node) -> None:
        """Apply all changes of the configuration, or none of them."""
        try:
            wanted = self._read()
            gone = {name: None for name in self._settings.options if name not in wanted.options}
            changed = await node.reconfigure(**_news(node, {**wanted.options, **gone}))
        except (FlowstoneError, OSError) as error:
            place = settings.config_path(self._arguments, os.environ) or "configuration"
            self._log.error("ignoring %s, keeping current settings: %s", place, error)
            return
        for name in wanted.process.differences(self._settings.process):
            self._log.warning("%s cannot be changed at run time; restart the node to apply it", name)
        self._settings = wanted
        self._log.info("configuration reloaded; changed: %s", ", ".join(changed) or "nothing")

    async def _snapshot(self, node: Node) -> None:
        await node.snapshot()


def _check_data(wanted: settings.NodeSettings) -> None:
    """Raise UsageError if the options do not match the data on disk: every further start would fail the same way.

    Unreadable files are left to the node, which reports them in more detail.
    """
    place = DataPlace(configure(wanted.options))
    for _ in place.missing():
        pass  # the node creates them
    with suppress(XlogError):
        place.check(place.files(), wanted.user)


def _configure_log(node: Node) -> None:
    """Apply the log options of the node, which may also come from a client that CALLs `box.cfg`."""
    configuration = node.configuration
    set_level({"log_level": configuration.log_level})
    set_format(configuration.log_format)


def _news(node: Node, options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` without `replication` if it is unchanged.

    Setting it reconnects to all peers, and a node that has lost a peer would become read-only meanwhile.
    """
    name = "replication"
    is_old = name in options and OPTIONS[name].accept(options[name]) == node.configuration.replication
    return {key: value for key, value in options.items() if key != name or not is_old}


def _collect_seldom() -> None:
    """Exclude the recovered data from garbage collection, and collect less often: each full collection is a pause.

    Tuples are bytes and need no collector; objects of single requests are freed by reference counting.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
