"""`flowstone play`: replay log files into a live server.

Also reads the credentials of every command that connects to servers (`address`, `login`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.cli.console import INTERRUPTED, UsageError, progress_bar, say
from flowstone.cli.logs import row_options as options
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.client.play import PlayResult
    from flowstone.history.log_reading import Piece
    from flowstone.iproto.uri import Uri
    from flowstone.xlog.transactions import LogTransaction

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone play --from 1000 127.0.0.1:3301 "
    "/var/lib/tarantool/instance`"
)

USERNAME_VARIABLE, PASSWORD_VARIABLE = "TT_CLI_USERNAME", "TT_CLI_PASSWORD"

URI_HELP = (
    "[user[:password]@]host:port, unix/:/path, or a port. For the user and the password, prefer "
    f"{USERNAME_VARIABLE} and {PASSWORD_VARIABLE}: command lines can be seen by others."
)
PASSWORD_HELP = f"Password of the user. Prefer {PASSWORD_VARIABLE}: command lines can be seen by others."


def play(
    uri: Annotated[str, typer.Argument(metavar="URI", help=URI_HELP)],
    paths: options.Paths,
    from_lsn: options.From = None,
    to_lsn: options.To = None,
    timestamp: options.Timestamp = None,
    space: options.Spaces = None,
    replica: options.Replicas = None,
    show_system: options.ShowSystem = False,
    recursive: options.Recursive = False,
    settled: Annotated[
        bool, typer.Option("--settled/--no-settled", help="Replay only transactions that can no longer be rolled back.")
    ] = True,
    force: options.Force = False,
    username: Annotated[
        str | None, typer.Option("--username", "-u", help=f"User to replay as. Default: {USERNAME_VARIABLE}.")
    ] = None,
    password: Annotated[str | None, typer.Option("--password", "-p", help=PASSWORD_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Replay log files into a live server, in order, transaction by transaction.

    The replay stops at the first row that the server rejects, or whose space has another name on the server. All
    transactions before that row's transaction are applied; this transaction and later ones are not. The message names
    the --from to resume with. Rows of system spaces are skipped unless selected with --show-system or --space, so the
    spaces must exist. Replay a snapshot only into empty spaces. --to and --timestamp are exclusive bounds, as in `tt
    play`.
    """
    selection = options.make_selection(from_lsn, to_lsn, timestamp, space, replica, show_system, truncates=True)
    wanted = options.RowOptions(paths, selection, settled, recursive, force)
    with options.advice(force=force):
        return _replay(address(uri, username, password), wanted, as_json)


def login(texts: Iterable[str], username: str | None, password: str | None) -> tuple[str | None, str | None]:
    """Return the login for those URIs among `texts` that have none: the options or, where missing, the environment.

    Raise UsageError if credentials are given both in a URI and as options.
    """
    from flowstone.iproto.uri import UriError, parse_uri

    if username is not None or password is not None:
        for text in texts:
            for member in text.split(","):
                with suppress(UriError):  # a directory, or an error that is reported when the address is used
                    if parse_uri(member).user is not None and not os.path.isdir(text):
                        raise UsageError("credentials given both in the URI and as options", hint="use one")
    username = username if username is not None else os.environ.get(USERNAME_VARIABLE)
    return username, password if password is not None else os.environ.get(PASSWORD_VARIABLE)


def address(text: str, username: str | None, password: str | None) -> Uri:
    """Parse the URI `text`, with credentials from the options, the URI or the environment, in this order.

    Raise UsageError if credentials are given both in the URI and as options, or a password without a user.
    """
    from flowstone.iproto.uri import parse_uri, with_login

    username, password = login([text], username, password)
    uri = parse_uri(text)
    if uri.user is None and username is None and password is not None:
        raise UsageError("password given without a user", hint="set the user with --username")
    return with_login(uri, username, password)


@dataclass
class _Source:
    """Iterates over the transactions of a reading.

    `path` is the file of the last transaction, `names` the names of the spaces in the log, by space id.
    """

    pieces: Iterable[Piece]
    path: str | None = None
    names: dict[int, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LogTransaction]:
        from flowstone.history.log_transactions import transactions

        for transaction, path in transactions(self._named()):
            self.path = path
            yield transaction

    def _named(self) -> Iterator[Piece]:
        """Yield the pieces, and record the name that each space has at its first row."""
        for piece in self.pieces:
            for space_id in _changed_spaces(piece):
                space = piece.schema.get(space_id)
                if space is not None:
                    self.names.setdefault(space_id, space.name)
            yield piece


def _changed_spaces(piece: Piece) -> Iterator[int]:
    """Yield the ids of the spaces that the rows of `piece` change, including the spaces they truncate."""
    import numpy as np

    from flowstone.box.system import TRUNCATE_ID
    from flowstone.client.log_statement import statement_of
    from flowstone.iproto.scan import SPACE_ID

    space_ids = piece.slab.cells[SPACE_ID, piece.rows]
    yield from np.unique(space_ids).tolist()
    for row in piece.slab.rows(piece.rows[space_ids == TRUNCATE_ID]):
        statement = statement_of(row)
        if statement is not None:
            yield statement.changed_space_id


def _replay(uri: Uri, wanted: options.RowOptions, as_json: bool) -> int:
    from flowstone.cli import event_loop
    from flowstone.client import play as player
    from flowstone.outside import production

    outside = production()
    files = wanted.files(outside)
    begun = time.monotonic()
    result = player.PlayResult()

    def tell() -> None:
        bar.close()
        print(_told(result, time.monotonic() - begun, as_json))

    def note(done: PlayResult) -> None:
        nonlocal result
        result = done

    with progress_bar(sum(map(outside.disk.size, files))) as bar:
        reading = wanted.reading(outside, files, bar.advance)
        source = _Source(reading.pieces())
        replay = player.play(
            outside,
            uri,
            source,
            on_progress=note,
            file=lambda: source.path,
            names=source.names.get,
        )
        try:
            event_loop.run(replay)
        except (KeyboardInterrupt, player.PlayInterrupted) as error:
            tell()
            say(f"flowstone: {error}" if isinstance(error, player.PlayInterrupted) else _interrupted(result))
            return INTERRUPTED
        except FlowstoneError as error:
            # If nothing was replayed, the error is enough.
            if isinstance(error, player.PlayError) or result.transactions:
                tell()
            raise
    tell()
    return options.finish(reading.report)


def _interrupted(result: PlayResult) -> str:
    return f"flowstone: interrupted{_resume(result)}"


def _resume(result: PlayResult) -> str:
    positions = dict(sorted(result.positions.items()))
    if len(positions) == 1:
        return f"; resume with --from {max(positions.values()) + 1}"
    if positions:
        each = ", ".join(f"--replica {replica_id} --from {lsn + 1}" for replica_id, lsn in positions.items())
        return f"; resume each replica with {each}"
    return ""


def _told(result: PlayResult, seconds: float, as_json: bool) -> str:
    if as_json:
        return json.dumps(
            {
                "transactions": result.transactions,
                "rows": result.rows,
                "skipped": result.skipped,
                "seconds": round(seconds, 3),
                "positions": dict(sorted(result.positions.items())),
            }
        )
    text = f"replayed {result.transactions} transactions with {result.rows} rows in {seconds:.1f} s"
    if result.skipped:
        text += f"; skipped {result.skipped} rows that change no space"
    return text + _resume(result)
