"""Where HTTP is served, who can come there, and whether a token keeps out those who should not.

Knows no web library: whoever only checks an option needs none.
"""

from __future__ import annotations

import ipaddress
import secrets
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri, UriError
from flowstone.node.configuration import listen_uri

TOKEN_LENGTH_MIN: Final = 16
"""Shorter ones can be guessed."""


class TokenNeeded(FlowstoneError):
    """Others than this machine could ask, and nothing keeps them from it."""


def http_address(listen: str) -> Uri:
    """Where `listen` asks to serve HTTP; UriError where it asks for no such place."""
    place = listen_uri(listen)
    if place.port is None or place.user is not None or place.parameters:
        raise UriError(f"{place.address} is no place to serve HTTP at", hint="write it as HOST:PORT")
    return place


def is_loopback(place: Uri) -> bool:
    """Whether nobody but this machine can come there."""
    try:
        return ipaddress.ip_address(place.host).is_loopback
    except ValueError:
        return place.host.lower() == "localhost"


def new_token() -> str:
    return secrets.token_urlsafe(32)


def is_token(text: str) -> bool:
    """Whether it is long enough, and can be part of a header."""
    return len(text) >= TOKEN_LENGTH_MIN and text.isascii() and text.isprintable()


def check_token(place: Uri, token: str | None) -> None:
    """TokenNeeded where one is missing, or is none."""
    if token is None and not is_loopback(place):
        raise TokenNeeded(f"{place.address} can be reached by others", hint="give a token, or listen on 127.0.0.1")
    if token is not None and not is_token(token):
        raise TokenNeeded(f"the token has fewer than {TOKEN_LENGTH_MIN} letters, or others than ASCII has")
