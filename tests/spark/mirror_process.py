"""`flowstone mirror` as a process: started, watched by its events, killed with all its children, restarted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

from flowstone.replication.vclock import VClock

SECONDS = 600.0


class MirrorProcess:
    """One run of the process.

    `events` grows while the process lives; its other output is in `log`.
    """

    def __init__(self, arguments: list[str], directory: Path, **environment: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.log = directory / "mirror.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flowstone.cli", "mirror", "--json", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
            )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # a kill truncated this line
            for line in self.process.stdout:
                self.events.append(json.loads(line))

    def wait_for(self, what: str, condition: Callable[[dict[str, Any]], bool], seconds: float = SECONDS) -> None:
        """Wait for an event that satisfies the condition; fail with the log if the process ends before."""
        deadline = time.monotonic() + seconds
        seen = 0
        while True:
            has_ended = self.process.poll() is not None
            while seen < len(self.events):
                if condition(self.events[seen]):
                    return
                seen += 1
            if has_ended and not self._reader.is_alive():
                raise AssertionError(f"mirror exited with {self.process.returncode} before {what}:\n{self.said()}")
            if time.monotonic() > deadline:
                self.process.send_signal(signal.SIGABRT)  # the signal makes its threads print their stacks
                self.process.wait(60)
                raise AssertionError(f"no {what} within {seconds} s; last: {self.events[-3:]}\n{self.said()}")
            time.sleep(0.02)

    def wait_until(self, position: dict[int, int]) -> None:
        """Wait for a progress event at or after a position."""
        wanted = VClock(position).without_zero()

        def is_there(event: dict[str, Any]) -> bool:
            if event["event"] != "progress":
                return False
            lsns = (VClock({int(number): lsn for number, lsn in each.items()}) for each in event["positions"].values())
            return any(wanted <= each for each in lsns)

        self.wait_for(f"progress at {wanted}", is_there)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """Kill the process with all its children, as a power cut would."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._end()

    def stop(self) -> int:
        """Stop the process as an operator does; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self._end()

    def _end(self) -> int:
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, the innermost first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))

    def below(parent: int) -> Iterator[int]:
        for child in children.get(parent, []):
            yield from below(child)
            yield child

    return list(below(pid))
