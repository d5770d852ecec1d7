"""Addresses of servers as Tarantool users write them: `user:password@host:port`, `unix/:/path`, or a port.

A password is never shown: not by str, not by repr, not in an error about an invalid URI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from flowstone.errors import FlowstoneError

FORMS = "write it as [user[:password]@]host:port, unix/:/path, or a port number"

PARAMETERS = (
    "transport",
    "ssl_cert_file",
    "ssl_key_file",
    "ssl_ca_file",
    "ssl_ciphers",
    "ssl_password",
)
"""Parameters allowed after the `?`. Other names are rejected: a mistyped `transport` would mean a plain connection."""

TRANSPORTS = ("plain", "ssl")

_SECRET = "ssl_password"


class UriError(FlowstoneError):
    """The text is not a valid address."""


@dataclass(frozen=True, slots=True)
class Uri:
    """The address of a server and a login. If `port` is None, `host` is the path of a Unix socket.

    `user` None is the guest; a missing password is the empty one, as in Tarantool.
    """

    host: str
    port: int | None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    parameters: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def address(self) -> str:
        """Return host and port only, for messages and logs."""
        if self.port is None:
            return f"unix/:{self.host}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.user}@{self.address}" if self.user is not None else self.address

    @property
    def shown(self) -> str:
        """Return the URI with its parameters, without secrets."""
        query = "&".join(f"{name}={value}" for name, value in self.parameters if name != _SECRET)
        return f"{self}?{query}" if query else str(self)


def parse_uri(text: str) -> Uri:
    """Parse `text`. Raise UriError if it is not one valid address."""
    if not isinstance(text, str):
        raise UriError(f"URI must be a string, not {type(text).__name__}", hint=FORMS)
    if "," in text:
        _refuse_list(text)
    return _parse(text)


def parse_members(uris: str | Iterable[str]) -> tuple[Uri, ...]:
    """Parse the addresses of the members of a replica set: a list, or one string with commas between them.

    A string that is a list only if a password is cut at a comma is one address. Raise UriError if an address is not
    valid, or there is none.
    """
    if not isinstance(uris, str):
        if not isinstance(uris, Iterable):
            raise UriError(f"URI must be a string or a list of strings, not {type(uris).__name__}", hint=FORMS)
        found = tuple(map(parse_uri, uris))
        if not found:
            raise UriError("list of URIs is empty", hint="specify at least one member")
        return found
    parts = uris.split(",")
    wrong = [number for number, part in enumerate(parts, 1) if not _is_uri(part)]
    if not wrong:
        return tuple(map(_parse, parts))
    if len(parts) == 1 or uris.count("@") == 1:
        return (_parse(uris),)
    if "@" not in uris and "?" not in uris:
        return tuple(map(_parse, parts))  # raises the error of the part, which has no secret
    raise UriError(f"address {wrong[0]} of {len(parts)} in the list is not valid", hint=FORMS)


def _is_uri(text: str) -> bool:
    try:
        _parse(text)
    except UriError:
        return False
    return True


def _refuse_list(text: str) -> None:
    """Raise UriError if `text` lists several addresses. Parsed as a single URI, all addresses but the last would become
    part of a password.

    The error shows what would be read as user, host and port. The error does not show the addresses in the text: if the
    text is a single address, they are parts of its password.
    """
    parts = text.split(",")
    if not all(map(_is_uri, parts)):
        return
    message = f"URI has {len(parts)} addresses, but one is expected"
    if _is_uri(text):
        uri = _parse(text)
        place = f"path {uri.host!r}" if uri.port is None else f"host {uri.host!r}, port {uri.port}"
        message += f": read as one, it means user {uri.user!r}, {place}, and a password with a comma"
    raise UriError(message, hint="specify one member; if it is one address, pass user and password separately")


def _parse(text: str) -> Uri:
    rest, _, query = text.strip().partition("?")
    try:
        login, at, place = rest.rpartition("@")
        user, password = _login(login) if at else (None, None)
        host, port = _place(place)
        return Uri(host, port, user, password, _parameters(query))
    except UriError:
        if "@" not in query:
            raise
    # The apparent address or parameter may be part of a password and must not be shown.
    raise UriError("URI has a ? before its last @: parameters begin at the ?", hint=FORMS)


def with_login(uri: Uri, username: str | None, password: str | None) -> Uri:
    """Return `uri` with this login, unchanged if it has a user. Raise UriError for a password without a user."""
    if uri.user is not None:
        return uri
    if username is None and password is not None:
        raise UriError("password given without a user", hint="specify the user, too")
    return replace(uri, user=username, password=password)


def means_a_path(text: str) -> bool:
    """Return True if `text`, which may name a directory or a server, can only be a path and may be shown.

    Parameters contain paths too, and a text with a login or a parameter may contain a password.
    """
    place, _, query = text.partition("?")
    return "/" in place and not place.startswith("unix/:") and "@" not in text and "=" not in query


def _login(login: str) -> tuple[str, str | None]:
    user, colon, password = login.partition(":")
    if not user:
        raise UriError("URI has an @ but no user", hint=FORMS)
    return user, password if colon else None


def _place(place: str) -> tuple[str, int | None]:
    if place.startswith("unix/:"):
        path = place.removeprefix("unix/:")
        if not path:
            raise UriError("URI has no path after unix/:", hint=FORMS)
        return path, None
    if place.isdecimal():
        return "127.0.0.1", _port(place, place)
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:/\s\[\]]+)):(\d+)", place)
    if match is None:
        if place.count(":") > 1 and "[" not in place:  # user:password:port, perhaps
            raise UriError("URI has several colons and no @", hint=f"{FORMS}; an IPv6 address is in brackets")
        raise UriError(f"{place!r} is not a valid address", hint=FORMS)
    return match[1] or match[2], _port(match[3], place)


def _port(text: str, place: str) -> int:
    port = int(text) if len(text) <= 5 else 0
    if not 1 <= port <= 65535:
        raise UriError(f"port of {place!r} is not between 1 and 65535", hint=FORMS)
    return port


def _parameters(query: str) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in PARAMETERS:
            raise UriError(f"unknown URI parameter {name!r}", hint=f"known parameters: {', '.join(PARAMETERS)}")
        if name in pairs:
            raise UriError(f"duplicate URI parameter {name}", hint="remove one of them")
        if name == "transport" and value not in TRANSPORTS:
            raise UriError(f"URI parameter transport is {value!r}", hint=f"it can be {' or '.join(TRANSPORTS)}")
        pairs[name] = value
    if pairs and pairs.get("transport") != "ssl":
        without = next((name for name in pairs if name != "transport"), None)
        if without is not None:
            hint = "add it; without it the connection is plain"
            raise UriError(f"URI parameter {without} requires transport=ssl", hint=hint)
    return tuple(pairs.items())
