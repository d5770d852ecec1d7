"""What a process tells the service manager that started it: that it is ready, that it stops.

systemd's protocol (sd_notify): a line to the socket that NOTIFY_SOCKET names. Where nobody asked, nobody is told.
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
    """Tells the service manager, if there is one; one that does not listen is no error."""
    place = os.environ.get(VARIABLE, "")
    if not place.startswith(("/", "@")):
        return
    abstract = place.startswith("@")
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect("\0" + place[1:] if abstract else place)
        out.send(state)
