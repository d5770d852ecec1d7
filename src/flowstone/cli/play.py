"""`flowstone play`: replays log files into a live server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.cli import options
from flowstone.cli.console import OK, SKIPPED, UsageError, note_compilation, progress_bar

if TYPE_CHECKING:
    from flowstone.history.reading import Piece
    from flowstone.iproto.uri import Uri
    from flowstone.node.play import PlayResult
    from flowstone.xlog.transactions import Transaction

EXAMPLE = "Example: `flowstone play --from 1000 admin:secret@127.0.0.1:3301 /var/lib/tarantool/instance`"

USERNAME_VARIABLE, PASSWORD_VARIABLE = "TT_CLI_USERNAME", "TT_CLI_PASSWORD"


def play(
    uri: Annotated[str, typer.Argument(metavar="URI", help="[user[:password]@]host:port, unix/:/path, or a port.")],
    paths: options.Paths,
    from_lsn: options.From = None,
    to_lsn: options.To = None,
    timestamp: options.Timestamp = None,
    space: options.Spaces = None,
    replica: options.Replicas = None,
    show_system: options.ShowSystem = False,
    recursive: options.Recursive = False,
    settled: Annotated[
        bool, typer.Option("--settled/--no-settled", help="Replay only what can no longer be rolled back.")
    ] = True,
    force: options.Force = False,
    username: Annotated[
        str | None, typer.Option("--username", "-u", help=f"User to replay as; else {USERNAME_VARIABLE} is asked.")
    ] = None,
    password: Annotated[
        str | None, typer.Option("--password", "-p", help=f"The user's password; else {PASSWORD_VARIABLE} is asked.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Replay log files into a live server, in order, transaction by transaction.

    Stops at the first row that the server refuses: everything before its transaction is applied, nothing from it on,
    and the message says where to resume with --from. Rows of system spaces are left out unless --show-system or
    --space asks for them, so the spaces have to exist. --to and --timestamp are exclusive bounds, as in `tt play`.
    """
    selection = options.make_selection(from_lsn, to_lsn, timestamp, space, replica, show_system)
    wanted = options.Wanted(paths, selection, settled, recursive, force)
    return _replay(_address(uri, username, password), wanted, as_json)


def _address(text: str, username: str | None, password: str | None) -> Uri:
    """The server's address with whom to be there: by option, by URI, or by environment, in this order."""
    from flowstone.iproto.uri import parse_uri

    uri = parse_uri(text)
    if username is not None or password is not None:
        if uri.user is not None:
            raise UsageError("a user both in the URI and as an option", hint="give one of them")
    elif uri.user is not None:
        return uri
    username = username if username is not None else os.environ.get(USERNAME_VARIABLE)
    password = password if password is not None else os.environ.get(PASSWORD_VARIABLE)
    if username is None and password is not None:
        raise UsageError("a password without a user", hint="name the user with --username")
    return replace(uri, user=username, password=password)


@dataclass
class _Source:
    """The transactions of a reading, and the file that the last one came from."""

    pieces: Iterable[Piece]
    path: str | None = None

    def __iter__(self) -> Iterator[Transaction]:
        from flowstone.history.transactions import transactions

        for transaction, path in transactions(self.pieces):
            self.path = path
            yield transaction


def _replay(uri: Uri, wanted: options.Wanted, as_json: bool) -> int:
    import asyncio

    from flowstone.node import play as player
    from flowstone.outside import production

    outside = production()
    note_compilation()
    files = wanted.files(outside)
    begun = time.monotonic()
    with progress_bar(sum(map(outside.disk.size, files))) as bar:
        reading = wanted.reading(outside, files, bar.advance)
        source = _Source(reading.pieces())
        try:
            result = asyncio.run(player.play(outside, uri, source, file=lambda: source.path))
        except player.PlayError as error:
            bar.close()
            print(_told(error.result, time.monotonic() - begun, as_json))
            raise
    print(_told(result, time.monotonic() - begun, as_json))
    options.warn(reading.report)
    return SKIPPED if reading.report.skipped else OK


def _told(result: PlayResult, seconds: float, as_json: bool) -> str:
    positions = dict(sorted(result.positions.items()))
    if as_json:
        return json.dumps(
            {
                "transactions": result.transactions,
                "rows": result.rows,
                "skipped": result.skipped,
                "seconds": round(seconds, 3),
                "positions": positions,
            }
        )
    text = f"replayed {result.transactions} transactions with {result.rows} rows in {seconds:.1f} s"
    if result.skipped:
        text += f"; {result.skipped} rows change no space and were left out"
    if len(positions) == 1:
        text += f"; to go on later: --from {max(positions.values()) + 1}"
    elif positions:
        each = ", ".join(f"--replica {replica_id} --from {lsn + 1}" for replica_id, lsn in positions.items())
        text += f"; to go on later, for each replica: {each}"
    return text
