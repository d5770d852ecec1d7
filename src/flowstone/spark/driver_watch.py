"""A reader's process lives as long as its driver: told to end, or left behind by a JVM that was killed, it lets go.

Spark ends a stopped query's reader by SIGTERM, without a word to the reader itself. A JVM that is killed says nothing
at all: the operating system then gives its children another parent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

POLL_SECONDS: Final = 0.25
GRACE_SECONDS: Final = 5.0
"""How long letting go may take before the process ends all the same."""


def watch_driver(let_go: Callable[[], None]) -> None:
    """From now on `let_go` is called, and the process ended, on SIGTERM or when the parent is gone.

    For the main thread of a process that somebody else's loop runs in.
    """
    parent = os.getppid()

    def terminated(number: int, frame: FrameType | None) -> None:
        _end(let_go)

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        _end(let_go)

    signal.signal(signal.SIGTERM, terminated)
    threading.Thread(target=poll, name="flowstone-driver-watch", daemon=True).start()


def _end(let_go: Callable[[], None]) -> None:
    watchdog = threading.Timer(GRACE_SECONDS, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        let_go()
    finally:
        os._exit(0)
