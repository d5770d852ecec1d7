"""`flowstone dashboard`: serve a live web page about replica sets until the command is stopped.

Parses the options and handles signals; `web/` builds the page from what `observation/` queries.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flowstone.cli import extras
from flowstone.cli.console import OK, say
from flowstone.cli.http_options import TOKEN_VARIABLE, HttpPlace
from flowstone.cli.log import PLAIN, LogFormat, start_log
from flowstone.cli.replica_set.members import Password, Uris, Username, addresses

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone dashboard --open 127.0.0.1:3301`\n\n"
    "One member of each set is enough if it follows the others; they are queried as the same user."
)

EXIT_CODES = """Exit codes: 0 stopped by a signal; 1 the address is taken; 2 the command line is wrong."""

LISTEN: Final = "127.0.0.1:8081"


def dashboard(
    uris: Uris,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address of the page; port 0 picks a free port.")
    ] = LISTEN,
    lake: Annotated[
        list[str] | None,
        typer.Option(
            "--lake", metavar="DIR", help="Show the tables of this lake of `flowstone mirror`. May be repeated."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            help=f"Token that is required to see the page. Prefer {TOKEN_VARIABLE}: command lines can be seen by "
            "others. If it is not set, the command generates and prints one, except on loopback.",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    username: Username = None,
    password: Password = None,
    log_format: LogFormat = PLAIN,
) -> int:
    """Show replica sets on a live web page: topology with the flow of rows, positions, lag, transactions pending a
    quorum, elections, transactions as they are written, tables of lakes, and why something is stopped.

    The command prints the address of the page and runs until it is interrupted. It changes nothing. The user needs the
    right to execute `box.info` and, for the transactions, the role `replication`. docs/reference/dashboard.md describes
    the JSON of the page; `/metrics` has metrics of all members for Prometheus.
    """
    extras.need("web", "flowstone dashboard")
    if lake:
        extras.need("spark", "--lake")
    from flowstone.cli import event_loop

    start_log(log_format)
    logging.getLogger("flowstone").setLevel(logging.INFO)
    # The page shows the problems of servers; the log is for problems of the dashboard itself and of its clients.
    for watching in ("flowstone.observation", "flowstone.node"):
        logging.getLogger(watching).setLevel(logging.ERROR)
    wanted = addresses(uris, username, password)
    event_loop.run(_run(wanted, HttpPlace(listen, token, option="--listen"), lake or [], open_page))
    return OK


async def _run(uris: Sequence[Uri], place: HttpPlace, lakes: Sequence[str], open_page: bool) -> None:
    from flowstone.observation.survey import Survey
    from flowstone.outside import production
    from flowstone.web.dashboard import dashboard as application
    from flowstone.web.feed import Feed
    from flowstone.web.monitoring import PROBES
    from flowstone.web.server import WebServer

    outside = production()
    feed = Feed(outside, Survey(outside, uris), lakes=lakes)
    stopping = _stop_signals()
    served = application(feed)
    async with WebServer(served, place.listen, token=place.token, open_paths=PROBES, option=place.option) as server:
        await feed.start()
        try:
            page = place.link(server.url)
            print(page, flush=True)
            if open_page:
                await asyncio.to_thread(_open, page)
            await stopping.wait()
        finally:
            await feed.stop()


def _stop_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def _open(page: str) -> None:
    import webbrowser

    if not webbrowser.open(page):
        say("flowstone: no browser found; open the address above yourself")
