"""`--http-listen` and `--http-token` of commands that run for long, and what is said about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

import typer

from flowstone.cli import extras
from flowstone.cli.console import UsageError, say

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from flowstone.web.monitoring import Monitored
    from flowstone.web.server import WebServer

TOKEN_VARIABLE: Final = "FLOWSTONE_HTTP_TOKEN"

HttpListen = Annotated[
    str | None,
    typer.Option(
        "--http-listen",
        metavar="HOST:PORT",
        help="Serve metrics for Prometheus and health by HTTP there; port 0 for any that is free.",
    ),
]
HttpToken = Annotated[
    str | None,
    typer.Option(
        "--http-token",
        help=f"What has to be shown to be served. Better in {TOKEN_VARIABLE}: command lines can be seen by others. "
        "Elsewhere than on loopback one is made if none is given.",
    ),
]


class Place:
    """Where HTTP is served, with the token that is asked for there; `is_new`: it was made for this run."""

    def __init__(self, listen: str, token: str | None, *, option: str = "--http-listen") -> None:
        from flowstone.iproto.uri import UriError
        from flowstone.web.address import TokenNeeded, check_token, http_address, is_loopback, new_token

        extras.need("web", option)
        self.listen = listen
        self.option = option
        try:
            place = http_address(listen)
            token = token or os.environ.get(TOKEN_VARIABLE) or None
            self.is_new = token is None and not is_loopback(place)
            self.token = new_token() if self.is_new else token
            check_token(place, self.token)
        except UriError as error:
            hint = "write it as HOST:PORT, or as a port of this machine; ports end at 65535"
            raise UsageError(f"{error.message} (given as {option})", hint=hint) from error
        except TokenNeeded as error:
            raise UsageError(error.message, hint=error.hint) from error

    def server(self, monitored: Monitored, application: ASGIApp | None = None, hosts: Sequence[str] = ()) -> WebServer:
        """Metrics and health of `monitored`, beside an application, if there is one."""
        from flowstone.web.monitoring import PROBES, monitoring
        from flowstone.web.server import WebServer

        served = monitoring(monitored, application)
        return WebServer(served, self.listen, token=self.token, hosts=hosts, open_paths=PROBES, option=self.option)

    def tell(self, url: str) -> None:
        """Says where it is, and the token that nobody knows yet."""
        say(f"flowstone: metrics and health at {url}")
        self.tell_token(url)

    def tell_token(self, url: str) -> None:
        """Says it once, if it was made for this run."""
        if self.is_new:
            say(f"flowstone: the token of this run, for {self.link(url)}")

    def link(self, url: str) -> str:
        """`url` as a browser may open it: with the token, if one is asked for."""
        return f"{url}?token={quote(self.token, safe='')}" if self.token is not None else url


def place_of(listen: str | None, token: str | None) -> Place | None:
    """None where nobody asked for HTTP."""
    return Place(listen, token) if listen is not None else None
