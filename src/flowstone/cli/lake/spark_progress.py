"""The progress line of commands that run Spark: the current step, and how many tasks are done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TextIO

CLEAR_LINE: Final = "\r\x1b[K"
POLL_SECONDS: Final = 0.3


class Line:
    """A status line that is rewritten in place on stderr; prints nothing if that is not a terminal."""

    def __init__(self, screen: TextIO | None = None) -> None:
        self._screen = screen if screen is not None else sys.stderr
        self._is_terminal = self._screen is not None and self._screen.isatty()
        self._what = ""
        self._has_line = False

    def tell(self, what: str) -> None:
        """Show `what` as the current step."""
        self._what = what
        self.progress("")

    def progress(self, more: str) -> None:
        """Show the current step, followed by `more`."""
        if self._is_terminal:
            self._screen.write(f"{CLEAR_LINE}{self._what}{more}…")
            self._screen.flush()
            self._has_line = True

    def close(self) -> None:
        """Remove the line."""
        if self._has_line:
            self._screen.write(CLEAR_LINE)
            self._screen.flush()
            self._has_line = False


@contextmanager
def tasks_shown(line: Line) -> Iterator[None]:
    """Show the number of finished Spark tasks on `line` while the block runs and Spark is running."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            pyspark: Any = sys.modules.get("pyspark")
            if pyspark is None:  # this restore needs no Spark
                continue
            with suppress(Exception):  # Spark may be starting or stopping, and a progress line must not fail the job
                context: Any = pyspark.SparkContext._active_spark_context
                tracker = context.statusTracker()
                stages = [tracker.getStageInfo(each) for each in tracker.getActiveStageIds()]
                done = sum(stage.numCompletedTasks for stage in stages if stage)
                total = sum(stage.numTasks for stage in stages if stage)
                line.progress(f" ({done} of {total} tasks)" if total else "")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
