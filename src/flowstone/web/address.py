"""The address that HTTP is served at, and the token that protects it.

Imports no web library, so that options can be checked without the extra `web`.
"""

from __future__ import annotations

import ipaddress
import secrets
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri, UriError
from flowstone.node.configuration import listen_uri

TOKEN_LENGTH_MIN: Final = 16
"""Minimum length of a token, in characters; shorter tokens can be guessed."""


class TokenNeeded(FlowstoneError):
    """The address is reachable from other machines and has no valid token."""


def http_address(listen: str) -> Uri:
    """Return the address that `listen` names; raise UriError unless it is a host and a port, or a port."""
    place = listen_uri(listen)
    if place.port is None or place.user is not None or place.parameters:
        raise UriError(f"{place.address} is not a valid HTTP address", hint="write it as HOST:PORT")
    return place


def is_loopback(place: Uri) -> bool:
    """Return True if only this machine can connect to the address."""
    try:
        return ipaddress.ip_address(place.host).is_loopback
    except ValueError:
        return place.host.lower() == "localhost"


def new_token() -> str:
    return secrets.token_urlsafe(32)


def is_token(text: str) -> bool:
    """Return True if the text is long enough for a token and can be sent in an HTTP header."""
    return len(text) >= TOKEN_LENGTH_MIN and text.isascii() and text.isprintable()


def check_token(place: Uri, token: str | None) -> None:
    """Raise TokenNeeded if the address requires a token and has none, or if the token is invalid."""
    if token is None and not is_loopback(place):
        raise TokenNeeded(
            f"{place.address} is reachable from other machines", hint="set a token, or listen on 127.0.0.1"
        )
    if token is not None and not is_token(token):
        raise TokenNeeded(f"token must have at least {TOKEN_LENGTH_MIN} printable ASCII characters")
