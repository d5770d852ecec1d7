"""`flowstone status`: show replica sets as their members report them, once or live."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import FAILED, OK, UsageError, output
from flowstone.cli.replica_set.members import Password, Uris, Username, addresses, surveyed

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri
    from flowstone.observation.replica_set import ReplicaSet

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone status --watch 127.0.0.1:3301`\n\n"
    "One member is enough if it follows the others; they are queried as the same user."
)

EXIT_CODES = """Exit codes: 0 all members with a known address answer, all followers follow, there is a leader or a
writable member, and no lag is large; 1 otherwise; 2 the command line is wrong. With --watch: 0 when interrupted."""

INTERVAL_SECONDS: Final = 2.0


def status(
    uris: Uris,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until interrupted.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            help=f"Refresh interval; only with --watch. Default: {INTERVAL_SECONDS:g}.",
        ),
    ] = None,
    username: Username = None,
    password: Password = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object per line (docs/reference/json-output.md).")
    ] = False,
) -> int:
    """Show replica sets: members, leader, topology, lag, transactions pending a quorum, and log retention.

    Works with nodes and with every Tarantool. A user other than `admin` needs the privilege to call `box.info`, granted
    once on the master: `box.schema.func.create('box.info')` and
    `box.schema.user.grant('watcher', 'execute', 'function', 'box.info')`. Options and log retention are shown only to
    users that may call everything (`'execute', 'universe'`), which also lets them run any Lua on the server.
    """
    from flowstone.cli import event_loop

    if interval is not None and not watch:
        raise UsageError("--interval requires --watch", hint="add --watch, or omit --interval")
    wanted = addresses(uris, username, password)
    if not watch:
        return event_loop.run(_once(wanted, as_json))
    with suppress(KeyboardInterrupt):
        event_loop.run(_live(wanted, interval or INTERVAL_SECONDS, as_json))
    return OK


async def _once(uris: Sequence[Uri], as_json: bool) -> int:
    from flowstone.observation.health import complaints

    async with surveyed(uris) as (_, sets):
        pass
    with _screen(uris, as_json, live=False) as show:
        show(sets)
    return FAILED if any(map(complaints, sets)) else OK


async def _live(uris: Sequence[Uri], interval: float, as_json: bool) -> None:
    async with surveyed(uris) as (survey, sets):
        with _screen(uris, as_json, live=True) as show:
            while True:
                show(sets)
                await asyncio.sleep(interval)
                sets = await survey.look()


@contextmanager
def _screen(uris: Sequence[Uri], as_json: bool, *, live: bool) -> Iterator[Callable[[Sequence[ReplicaSet]], None]]:
    """Yield a function that shows replica sets: as JSON, as tables, or as tables that are redrawn on a terminal."""
    if as_json:
        yield lambda sets: print(json.dumps(told(sets)), flush=True)
        return
    from rich.live import Live

    from flowstone.cli.replica_set.status_board import RateWindow, board

    console, explained = output(), uris[0].address
    if not live or not console.is_terminal:
        yield lambda sets: console.print(board(sets, explained=explained))
        return
    with Live(console=console, auto_refresh=False) as screen:
        yield lambda sets: screen.update(RateWindow(board(sets, explained=explained)), refresh=True)


def told(sets: Sequence[ReplicaSet]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    from flowstone.observation.health import complaints
    from flowstone.observation.replica_set import document

    shown = [document(one) | {"complaints": list(complaints(one))} for one in sets]
    return {"is_healthy": not any(one["complaints"] for one in shown), "replicasets": shown}
