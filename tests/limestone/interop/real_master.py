"""The real library as a process driven line by line, as a master or to open a directory.

The program is `lsmaster` in the directory that FLOWSTONE_LIMESTONE names, a driver around liblimestone. A request is a
line `NUMBER COMMAND ARGUMENTS`; the answer is `NUMBER ok RESULT`, `NUMBER error MESSAGE`, or rows and then `NUMBER .`.
Commands of different channels run in separate threads. If the library aborts, the output ends.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from flowstone.limestone.settings import ENDPOINT
from tests.limestone.interop.real_limestone import VARIABLE

PROGRAM: Final = "lsmaster"
ANSWER_SECONDS: Final = 60.0
Rows = list[tuple[int, bytes, bytes]]


def available() -> bool:
    return bool(os.environ.get(VARIABLE)) and (Path(os.environ[VARIABLE]) / PROGRAM).is_file()


class Died(Exception):
    """Raised when the process ends before it has answered."""


class Refused(Exception):
    """Raised when the library or the driver reports an error."""


class RealMaster:
    """A driver process.

    Any thread may send requests, and waits for its own answers. `command`: another program with the same interface.
    """

    def __init__(
        self, endpoint: str | None = None, command: Sequence[str | Path] | None = None, **variables: str
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REPLICATION_")}
        environment.pop(ENDPOINT, None)
        environment |= variables | ({ENDPOINT: endpoint} if endpoint is not None else {})
        self.process = subprocess.Popen(
            command or [Path(os.environ[VARIABLE]) / PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._count = 0
        self._answers: dict[int, list[str]] = {}
        self._is_over = False
        self._change = threading.Condition()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith(b"\n"):
                break
            number, _, rest = line.decode().rstrip("\n").partition(" ")
            with self._change:
                self._answers.setdefault(int(number), []).append(rest)
                self._change.notify_all()
        with self._change:
            self._is_over = True
            self._change.notify_all()

    def send(self, command: str) -> int:
        """Send a request and return its number; raise Died if the process has ended."""
        assert self.process.stdin is not None
        with self._change:
            self._count += 1
            number = self._count
            try:
                self.process.stdin.write(f"{number} {command}\n".encode())
                self.process.stdin.flush()
            except (OSError, ValueError):  # the process has ended, or `kill` has closed the pipe
                raise Died(command) from None
        return number

    def wait(self, number: int) -> list[str]:
        """Return the lines of an answer."""
        with self._change:
            while True:
                lines = self._answers.get(number, [])
                if lines and (lines[-1] == "." or lines[-1].split(" ", 1)[0] in ("ok", "error")):
                    break
                if self._is_over:
                    raise Died(str(number))
                if not self._change.wait(ANSWER_SECONDS):
                    raise TimeoutError(f"no answer to request {number}")
        if lines[-1].startswith("error"):
            raise Refused(lines[-1])
        return lines

    def ask(self, command: str) -> str:
        return self.wait(self.send(command))[-1].removeprefix("ok").strip()

    def rows(self) -> Rows:
        lines = self.wait(self.send("cursor"))[:-1]
        return [(int(storage), unhex(key), unhex(value)) for storage, key, value in map(str.split, lines)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                assert stream is not None
                stream.close()

    def quit(self) -> None:
        """Shut the store down cleanly."""
        self.ask("quit")
        self.process.wait(ANSWER_SECONDS)


@contextmanager
def real_master(endpoint: str | None = None, **variables: str) -> Iterator[RealMaster]:
    master = RealMaster(endpoint, **variables)
    try:
        yield master
    finally:
        master.kill()


def opened_by_the_original(directory: Path) -> tuple[int, Rows] | None:
    """Return the last epoch and the rows of a directory; None if the library aborts or hangs.

    The call changes the directory. For a torn entry the library reads up to four billion blob ids from beyond the end
    of the file.
    """
    with real_master() as master:
        try:
            last_epoch = int(master.ask(f"open {directory} 1"))
            rows = master.rows()
            master.quit()
        except (Died, TimeoutError):
            return None
        return last_epoch, rows


def hexed(data: bytes) -> str:
    return data.hex() or "-"


def unhex(text: str) -> bytes:
    return b"" if text == "-" else bytes.fromhex(text)
