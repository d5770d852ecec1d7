"""End a reader's process together with its driver, after releasing what the process holds.

Spark ends the reader of a stopped query by SIGTERM, without notifying the reader itself. A killed JVM sends nothing at
all; the operating system then gives its children another parent.
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
"""Time allowed for `let_go` before the process exits regardless."""


def watch_driver(let_go: Callable[[], None]) -> None:
    """Call `let_go` and end the process on SIGTERM or when the parent process is gone.

    Must be called from the main thread, for a process whose loop belongs to Spark.
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
