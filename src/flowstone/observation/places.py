"""Normalized places of servers: makes `user@host:port`, loopback addresses and sockets comparable.

Pure. A loopback address or `localhost` means the machine of the server that reports it. Host names are not resolved.
"""

from __future__ import annotations

from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_OWN_NAMES: Final = frozenset(("localhost", "::1", "0.0.0.0", "::", ""))
_SOCKET: Final = "unix/:"


def place_of(address: str) -> str:
    """Return host and port of `[user@]host:port`, spelled the same for every address of one place."""
    host, port = _parts(address)
    return f"{host}:{port}" if port is not None else host


def seen_from(teller: str, address: str) -> str:
    """Return the place of `address` as reported by the server at `teller`, whose loopback address is not ours."""
    host, port = _parts(address)
    if port is not None and host == _LOOPBACK:
        machine, teller_port = _parts(teller)
        host = machine if teller_port is not None else _LOOPBACK
    return f"{host}:{port}" if port is not None else host


def _parts(address: str) -> tuple[str, str | None]:
    """Return host and port; for a Unix socket, its path and None."""
    place = address.rpartition("@")[2].partition("?")[0]
    if place.startswith(_SOCKET):
        return place, None
    host, _, port = place.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]").lower()
    if bare in _OWN_NAMES or bare.startswith("127."):
        return _LOOPBACK, port
    return f"[{bare}]" if ":" in bare else bare, port
