"""The options `--http-listen` and `--http-token` of long-running commands, and the messages about them."""

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
        help="Serve metrics for Prometheus and health checks over HTTP at this address; port 0 picks a free port.",
    ),
]
HttpToken = Annotated[
    str | None,
    typer.Option(
        "--http-token",
        help=f"Token that HTTP clients must send. Prefer {TOKEN_VARIABLE}: command lines can be seen by others. "
        "If it is not set, the command generates and prints one, except on loopback.",
    ),
]


class HttpPlace:
    """An address that HTTP is served at, and its token, if any; `is_new`: the token was generated for this run."""

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
        """Return a server for the metrics and health of `monitored` and, if given, for `application`."""
        from flowstone.web.monitoring import PROBES, monitoring
        from flowstone.web.server import WebServer

        served = monitoring(monitored, application)
        return WebServer(served, self.listen, token=self.token, hosts=hosts, open_paths=PROBES, option=self.option)

    def tell(self, url: str) -> None:
        """Report the address and, if it was generated for this run, the token."""
        say(f"flowstone: metrics and health at {url}")
        self.tell_token(url)

    def tell_token(self, url: str) -> None:
        """Report the token if it was generated for this run: the user cannot know it otherwise."""
        if self.is_new:
            say(f"flowstone: generated a token for this run: {self.link(url)}")

    def link(self, url: str) -> str:
        """Return `url` for a browser: with the token, if there is one."""
        return f"{url}?token={quote(self.token, safe='')}" if self.token is not None else url


def place_of(listen: str | None, token: str | None) -> HttpPlace | None:
    """Return the place for `--http-listen`; None if the option is not given."""
    return HttpPlace(listen, token) if listen is not None else None
