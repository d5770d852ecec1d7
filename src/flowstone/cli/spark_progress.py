"""What a command over Spark shows while it runs, on one line of a terminal: what is being done, how far Spark is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLEAR_LINE: Final = "\r\x1b[K"
POLL_SECONDS: Final = 0.3


class Line:
    """A line of standard error that changes; nothing where nobody looks."""

    def __init__(self, screen: TextIO | None = None) -> None:
        self._screen = screen if screen is not None else sys.stderr
        self._is_terminal = self._screen is not None and self._screen.isatty()
        self._what = ""
        self._has_line = False

    def tell(self, what: str) -> None:
        """Says what is being done from now on."""
        self._what = what
        self.progress("")

    def progress(self, more: str) -> None:
        """Says how far it is."""
        if self._is_terminal:
            self._screen.write(f"{CLEAR_LINE}{self._what}{more}…")
            self._screen.flush()
            self._has_line = True

    def close(self) -> None:
        """Takes the line away."""
        if self._has_line:
            self._screen.write(CLEAR_LINE)
            self._screen.flush()
            self._has_line = False


@contextmanager
def tasks_shown(spark: SparkSession, line: Line) -> Iterator[None]:
    """While the block runs, how many of Spark's tasks are done."""
    ended = threading.Event()
    tracker: Any = spark.sparkContext.statusTracker()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            with suppress(Exception):  # Spark may be stopping; a progress line is nothing to fail for
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
