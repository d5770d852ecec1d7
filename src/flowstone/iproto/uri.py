"""Addresses of servers as Tarantool users write them: `user:password@host:port`, `unix/:/path`, or a port.

A password is never shown: not by str, not by repr, not in an error about a URI that could not be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from flowstone.errors import FlowstoneError

FORMS = "write it as [user[:password]@]host:port, as unix/:/path, or as a port"


class UriError(FlowstoneError):
    """The text is no address."""


@dataclass(frozen=True, slots=True)
class Uri:
    """Where to connect and as whom. `port` None means that `host` is the path of a Unix socket.

    `user` None is the guest; a missing password is the empty one, as in Tarantool.
    """

    host: str
    port: int | None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    parameters: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def address(self) -> str:
        """Host and port alone, for messages and logs."""
        if self.port is None:
            return f"unix/:{self.host}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.user}@{self.address}" if self.user is not None else self.address


def parse_uri(text: str) -> Uri:
    """The address that `text` names; UriError where it names none."""
    rest, _, query = text.strip().partition("?")
    login, at, place = rest.rpartition("@")
    user, password = _login(login) if at else (None, None)
    host, port = _place(place)
    return Uri(host, port, user, password, _parameters(query))


def _login(login: str) -> tuple[str, str | None]:
    user, colon, password = login.partition(":")
    if not user:
        raise UriError("a URI with @ but without a user", hint=FORMS)
    return user, password if colon else None


def _place(place: str) -> tuple[str, int | None]:
    if place.startswith("unix/:"):
        path = place.removeprefix("unix/:")
        if not path:
            raise UriError("unix/: without a path", hint=FORMS)
        return path, None
    if place.isdecimal():
        return "127.0.0.1", _port(place, place)
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:/\s\[\]]+)):(\d+)", place)
    if match is None:
        raise UriError(f"{place!r} is no address", hint=FORMS)
    return match[1] or match[2], _port(match[3], place)


def _port(text: str, place: str) -> int:
    port = int(text) if len(text) <= 5 else 0
    if not 1 <= port <= 65535:
        raise UriError(f"{place!r} has no port between 1 and 65535", hint=FORMS)
    return port


def _parameters(query: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        pairs.append((name, value))
    return tuple(pairs)
