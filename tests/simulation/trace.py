"""The events of a run: one line each, and one hash over all of them.

Two runs with equal hashes did the same, byte for byte. The last lines are kept to explain a failure; all of them on
request.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final

from tests.simulation.loop import LIFE

LINES_KEPT: Final = 400
LINES_HASHED: Final = 256
"""Number of lines hashed together: hashing them one by one takes longer than producing them."""


class Trace:
    """`note` adds an event; `lines` has the last events, `story` the relevant ones among these; `hash` covers all
    events.
    """

    def __init__(self, time: Callable[[], float], *, is_verbose: bool = False) -> None:
        self._time = time
        self._digest = hashlib.sha256()
        self._unhashed: list[str] = []
        lines_kept = None if is_verbose else LINES_KEPT
        self.lines: deque[str] = deque(maxlen=lines_kept)
        self.story: deque[str] = deque(maxlen=lines_kept)
        """The last lines, without those that only report transferred bytes."""
        self.count = 0

    def note(self, who: str, what: str, data: bytes | bytearray | None = None) -> None:
        content = f" {len(data)} bytes {zlib.crc32(data):08x}" if data else ""
        line = f"{self._time():.6f} {who} {what}{content}"
        self._unhashed.append(line)
        if len(self._unhashed) >= LINES_HASHED:
            self._hash_lines()
        self.lines.append(line)
        if data is None:
            self.story.append(line)
        self.count += 1

    def _hash_lines(self) -> None:
        self._digest.update("".join(f"{line}\n" for line in self._unhashed).encode())
        self._unhashed.clear()

    @property
    def hash(self) -> str:
        self._hash_lines()
        return self._digest.hexdigest()


class TraceHandler(logging.Handler):
    """Adds the log lines of nodes to the events. Lines with an exception are also passed to `on_failure`."""

    def __init__(self, trace: Trace, on_failure: Callable[[str, BaseException | None], None]) -> None:
        super().__init__(logging.INFO)
        self._trace = trace
        self._on_failure = on_failure

    def emit(self, record: logging.LogRecord) -> None:
        life = LIFE.get()
        if life is not None and life.is_dead:
            return
        who = life.name if life is not None else "-"
        self._trace.note(who, f"{record.levelname} {record.getMessage()}")
        if record.exc_info is not None and record.exc_info[1] is not None:
            self._on_failure(f"{who} logged {record.getMessage()!r}", record.exc_info[1])
