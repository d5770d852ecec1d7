"""Where a server is, by what others call it: `user@host:port`, an address on its own machine, a socket.

Pure. A machine has several names; those that every machine has for itself mean the machine of who says them.
"""

from __future__ import annotations

from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_OWN_NAMES: Final = frozenset(("localhost", "::1", "0.0.0.0", "::", ""))
_SOCKET: Final = "unix/:"


def place_of(address: str) -> str:
    """Host and port of `[user@]host:port`, in the one spelling that two addresses of one place share."""
    host, port = _parts(address)
    return f"{host}:{port}" if port is not None else host


def seen_from(teller: str, address: str) -> str:
    """The place of a server that the one at `teller` knows by `address`: its loopback is not ours."""
    host, port = _parts(address)
    if port is not None and host == _LOOPBACK:
        machine, teller_port = _parts(teller)
        host = machine if teller_port is not None else _LOOPBACK
    return f"{host}:{port}" if port is not None else host


def _parts(address: str) -> tuple[str, str | None]:
    """The path of a socket has no port."""
    place = address.rpartition("@")[2].partition("?")[0]
    if place.startswith(_SOCKET):
        return place, None
    host, _, port = place.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]").lower()
    if bare in _OWN_NAMES or bare.startswith("127."):
        return _LOOPBACK, port
    return f"[{bare}]" if ":" in bare else bare, port
