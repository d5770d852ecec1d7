"""Notifications to the service manager: the process is ready, the process is stopping.

Implements systemd's protocol (sd_notify): a datagram to the socket named by NOTIFY_SOCKET. Does nothing if the variable
is not set.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Final

READY: Final = b"READY=1"
STOPPING: Final = b"STOPPING=1"

VARIABLE: Final = "NOTIFY_SOCKET"


def tell(state: bytes) -> None:
    """Send `state` to the service manager, if there is one. Errors are ignored: the node must run without it."""
    place = os.environ.get(VARIABLE, "")
    if not place.startswith(("/", "@")):
        return
    abstract = place.startswith("@")
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect("\0" + place[1:] if abstract else place)
        out.send(state)
