"""`flowstone status`: replica sets as their members see them, once or live."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import FAILED, OK, UsageError, output
from flowstone.cli.members import Password, Uris, Username, addresses, surveyed

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri
    from flowstone.observation.replica_set import ReplicaSet

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone status --watch 127.0.0.1:3301`\n\n"
    "One member is enough where it follows the others; those are asked as the same user."
)

EXIT_CODES = """Exit codes: 0 all whose addresses are known answer, and all follow, somebody leads, nobody is far
behind; 1 not so; 2 the command line is wrong. With --watch: 0 when it is interrupted."""

INTERVAL_SECONDS: Final = 2.0


def status(
    uris: Uris,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it live, until interrupted.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            help=f"Between two looks; only with --watch. Default: {INTERVAL_SECONDS:g}.",
        ),
    ] = None,
    username: Username = None,
    password: Password = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON, an object per line (docs/reference/json-output.md).")
    ] = False,
) -> int:
    """Show replica sets: members, who leads, who follows whom and how far behind, what waits for a quorum, and for whom
    logs are kept.

    Works with nodes and with every Tarantool. A user that is not `admin` needs the right to call `box.info`, given on
    the master, once: `box.schema.func.create('box.info')` and
    `box.schema.user.grant('watcher', 'execute', 'function', 'box.info')`. Options and kept logs are shown to who may
    call everything (`'execute', 'universe'`), which lets the user run any Lua there.
    """
    from flowstone.cli import event_loop

    if interval is not None and not watch:
        raise UsageError("--interval is for --watch alone", hint="give --watch, too, or leave --interval out")
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
    """Shows replica sets: as JSON, as tables one after the other, or as tables that change on a terminal."""
    if as_json:
        yield lambda sets: print(json.dumps(told(sets)), flush=True)
        return
    from rich.live import Live

    from flowstone.cli.status_board import Window, board

    console, explained = output(), uris[0].address
    if not live or not console.is_terminal:
        yield lambda sets: console.print(board(sets, explained=explained))
        return
    with Live(console=console, auto_refresh=False) as screen:
        yield lambda sets: screen.update(Window(board(sets, explained=explained)), refresh=True)


def told(sets: Sequence[ReplicaSet]) -> dict[str, Any]:
    """What `--json` prints."""
    from flowstone.observation.health import complaints
    from flowstone.observation.replica_set import document

    shown = [document(one) | {"complaints": list(complaints(one))} for one in sets]
    return {"is_healthy": not any(one["complaints"] for one in shown), "replicasets": shown}
