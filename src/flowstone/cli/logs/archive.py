"""`flowstone archive`: receive the log of a live server into files that a server can start from.

Parses the options, reports events and handles signals; the archive itself is `archive/archive.py`.
"""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import typer

from flowstone.cli.console import OK, UsageError, say
from flowstone.cli.http_options import HttpListen, HttpPlace, HttpToken, place_of
from flowstone.cli.log import JSON, PLAIN, LogFormat, say_event, set_format
from flowstone.cli.logs.play import PASSWORD_HELP, URI_HELP, USERNAME_VARIABLE, address

if TYPE_CHECKING:
    from flowstone.archive.archive import Archive
    from flowstone.archive.events import ArchiveEvent
    from flowstone.web.archive_metrics import ArchiveMetrics

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=replicator TT_CLI_PASSWORD=secret flowstone archive db1:3301 /backup/db1`\n\n"
    "To start a server from the archive, copy the directory and run `tarantool` in the copy with `box.cfg{}`."
)

EXIT_CODES = """Exit codes: 0 stopped by a signal, or finished with --once; 1 the server rejects the archive, belongs to
another replica set, has lost rows or (with --once) is unreachable, the directory is in use, or the disk is full; 2 the
command line or a path on it is wrong."""

DAY: Final = 86400.0
WAL_MAX_SIZE: Final = 256 * 1024 * 1024
LOGGER: Final = "flowstone.archive"
CLEAR_LINE: Final = "\r\x1b[K"


def archive(
    uri: Annotated[str, typer.Argument(metavar="URI", help=URI_HELP)],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory of the archive; created if missing.")],
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Stop when everything the server had at the start is archived; fail if the server is unreachable.",
        ),
    ] = False,
    register: Annotated[
        bool,
        typer.Option(
            "--register",
            help="Register as a member of the replica set, so that the server keeps its logs until the archive has "
            "them. This takes one of 31 ids and counts in N of the quorum formula. Otherwise the archive is anonymous, "
            "and a server before 3.3 keeps no logs for it: logs that the server deletes while the archive is "
            "disconnected are a gap.",
        ),
    ] = False,
    images: Annotated[
        bool,
        typer.Option(
            "--images",
            help="Add the old and the new tuple to each row. Needs memory for all data, and time to load the data at "
            "each start.",
        ),
    ] = False,
    snapshot_interval: Annotated[
        float,
        typer.Option(
            "--snapshot-interval",
            metavar="SECONDS",
            min=0,
            help="Time between snapshots of all data; 0: only the first one.",
        ),
    ] = DAY,
    wal_max_size: Annotated[
        int, typer.Option("--wal-max-size", metavar="BYTES", min=1, help="Size at which a new log begins.")
    ] = WAL_MAX_SIZE,
    replication_timeout: Annotated[
        float,
        typer.Option(
            "--replication-timeout",
            metavar="SECONDS",
            min=0.01,
            help="Time between heartbeats, as configured on the server; a server that is silent for four times as long "
            "is disconnected.",
        ),
    ] = 1.0,
    username: Annotated[
        str | None, typer.Option("--username", "-u", help=f"User to replicate as. Default: {USERNAME_VARIABLE}.")
    ] = None,
    password: Annotated[str | None, typer.Option("--password", "-p", help=PASSWORD_HELP)] = None,
    http_listen: HttpListen = None,
    http_token: HttpToken = None,
    log_format: LogFormat = PLAIN,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON, one object per line (docs/reference/archive.md).")
    ] = False,
) -> int:
    """Receive the log of a live Tarantool and keep it durably in files that Tarantool can recover from.

    The archive starts with a snapshot, then writes the log as it arrives and acknowledges rows that are on disk. It
    resumes where it stopped after an interruption of either side. Rows that the server no longer has are replaced by a
    new snapshot and listed in manifest.json. The user needs the role `replication`.
    """
    from flowstone.archive.archive import Archive
    from flowstone.archive.manifest import NotAnArchive
    from flowstone.cli import event_loop

    place = place_of(http_listen, http_token)
    set_format(log_format)
    teller = _Teller(as_json, log_format)
    watch = _watch(directory) if place is not None else None

    def tell(event: ArchiveEvent) -> None:
        teller.tell(event)
        if watch is not None:
            watch.note(event)

    missing = _missing(directory)
    receiver = Archive(
        address(uri, username, password),
        directory,
        register=register,
        images=images,
        snapshot_interval=snapshot_interval,
        wal_max_size=wal_max_size,
        replication_timeout=replication_timeout,
        on_event=tell,
    )
    try:
        event_loop.run(_run(receiver, once, place, watch))
    except NotAnArchive as error:
        raise UsageError(error.message, hint=error.hint) from error
    finally:
        teller.close()
        for made in missing:
            with suppress(OSError):  # not empty, or never created
                os.rmdir(made)
    return OK


def _missing(directory: str) -> list[str]:
    """Return the directories that have to be created for `directory`, itself included, innermost first."""
    path, found = os.path.abspath(directory), []
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def _watch(directory: str) -> ArchiveMetrics:
    from flowstone.web.archive_metrics import ArchiveMetrics

    return ArchiveMetrics(directory)


async def _run(receiver: Archive, once: bool, place: HttpPlace | None, watch: ArchiveMetrics | None) -> None:
    import asyncio
    import logging
    import signal

    # Events report everything that matters. Without a handler, logging would print warnings to stderr.
    logging.getLogger("flowstone").addHandler(logging.NullHandler())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, receiver.stop)
    try:
        async with AsyncExitStack() as stack:
            if place is not None and watch is not None:
                web = await stack.enter_async_context(place.server(watch))
                place.tell(web.url)
            await receiver.run(once=once)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Teller:
    """Reports events: as JSON lines on stdout, or as log lines on stderr.

    Progress is rewritten in place on a terminal, and left out of the lines on stderr otherwise.
    """

    def __init__(self, as_json: bool, log_format: str = PLAIN, screen: TextIO | None = None) -> None:
        self._as_json = as_json
        self._log_format = log_format
        self._screen = screen if screen is not None else sys.stderr
        self._is_terminal = self._screen is not None and self._screen.isatty()
        self._has_line = False

    def tell(self, event: ArchiveEvent) -> None:
        from flowstone.archive.events import Progress

        if self._as_json:
            import msgspec

            print(msgspec.json.encode(event).decode(), flush=True)
        elif self._log_format == JSON:
            if not isinstance(event, Progress):
                say_event(event, LOGGER)
        elif isinstance(event, Progress):
            self._show(str(event))
        else:
            self.close()
            say(f"flowstone: {event}")

    def _show(self, line: str) -> None:
        if self._is_terminal:
            self._screen.write(f"{CLEAR_LINE}{line}")
            self._screen.flush()
            self._has_line = True

    def close(self) -> None:
        """Erase the progress, so that the next line starts on an empty line."""
        if self._has_line:
            self._screen.write(CLEAR_LINE)
            self._screen.flush()
            self._has_line = False
