"""A node as a process: its signals, its log, and reading its configuration again.

What a node does, `flowstone.Node` does in any program; here it is only told when to stop, to reload, to snapshot.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from flowstone.cli import settings
from flowstone.cli.console import OK, note_compilation, say
from flowstone.errors import FlowstoneError
from flowstone.node.node import Node
from flowstone.node.option_checks import LOG_LEVELS

SEVERITIES: Final = {
    "fatal": logging.CRITICAL,
    "syserror": logging.ERROR,
    "error": logging.ERROR,
    "crit": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.INFO - 5,
    "debug": logging.DEBUG,
}


GC_THRESHOLD: Final = 50_000
"""New objects between two collections; Python's 700 is a collection for every few requests in flight."""


class Process:
    """A node and what the operating system tells it."""

    def __init__(self, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._defaults = defaults
        self._settings = self._read()
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._log = logging.getLogger("flowstone")

    def _read(self) -> settings.Settings:
        return settings.read_settings(self._arguments, os.environ, self._defaults)

    async def run(self) -> int:
        start_log()
        set_level(self._settings.options)
        note_compilation()
        for name in self._settings.strangers:
            self._log.warning("the environment variable %s is no option of a node", name)
        node = Node(**self._settings.options, user=self._settings.user, pid=os.getpid())
        self._listen_to_signals(node)
        try:
            await self._start_node(node)
            if not self._stopping.is_set():
                _collect_seldom()
                self._ready.set()
                say("ready")
            await self._stopping.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await node.stop()
        self._log.info("stopped")
        return OK

    async def _start_node(self, node: Node) -> None:
        """Returns when the node runs, or when it was told to stop before: peers may be waited for without end."""
        self._starting = asyncio.get_running_loop().create_task(node.start())
        try:
            await self._starting
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
        self._stopping.set()
        if self._starting is not None:
            self._starting.cancel()
        for each in (signal.SIGTERM, signal.SIGINT):  # who cannot wait may say it again
            asyncio.get_running_loop().remove_signal_handler(each)

    def _start(self, work: Callable[[Node], Coroutine[Any, Any, None]], node: Node) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.get_running_loop().create_task(self._attempt(work, node)))

    async def _attempt(self, work: Callable[[Node], Coroutine[Any, Any, None]], node: Node) -> None:
        await self._ready.wait()  # what is asked for while the node starts is done when it has
        try:
            await work(node)
        except (FlowstoneError, OSError) as error:
            self._log.error("%s", error)

    async def _reload(self, node: Node) -> None:
        """Applies all that has changed, or nothing of it."""
        try:
            wanted = self._read()
            gone = {name: None for name in self._settings.options if name not in wanted.options}
            changed = await node.reconfigure(**wanted.options, **gone)
        except (FlowstoneError, OSError) as error:
            place = settings.config_path(self._arguments, os.environ) or "the configuration"
            self._log.error("%s is not applied, all options stay as they were: %s", place, error)
            return
        self._settings = wanted
        set_level(wanted.options)
        self._log.info("configuration read again; changed: %s", ", ".join(changed) or "nothing")

    async def _snapshot(self, node: Node) -> None:
        await node.snapshot()


def _collect_seldom() -> None:
    """Keeps the garbage collector from walking over what recovery has loaded: each such walk is a pause.

    Tuples are bytes and need no collector; what turns leave behind is freed by its count of references.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


def start_log() -> None:
    """The log goes to stderr, a line per event."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(formatter)
    log = logging.getLogger("flowstone")
    log.handlers = [handler]
    log.propagate = False


def set_level(options: Mapping[str, Any]) -> None:
    """From now on what is less grave than `log_level` is not logged."""
    level = options.get("log_level", "info")
    name = LOG_LEVELS[int(level)] if level.isdecimal() else level
    logging.getLogger("flowstone").setLevel(SEVERITIES[name])
