"""Processes that run a Python module without importing it again: hundreds of nodes and commands.

The imports of a node take most of a second. Here, one process per pytest worker has imported all modules of nodes and
commands, and forks. A forked process has its own process id, descriptors, signals and exit code, and runs the module
from its beginning, as `python -m` does. Tests of a fresh interpreter use `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Final

UNBUFFERED: Final = "PYTHONUNBUFFERED"
MESSAGE_MAX: Final = 1 << 20


class WarmProcess:
    """A process like `subprocess.Popen([sys.executable, "-m", *command])`, with the part of that interface that tests
    use. It is killed when its starter, or the process with this object, ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int | None = None,
        stdin: IO[bytes] | int | None = None,
        cwd: str | os.PathLike[str] = os.curdir,
        env: Mapping[str, str] | None = None,
        starter: str | None = None,
    ) -> None:
        """Without `stdin`, standard input is empty; without `stderr`, errors go to `stdout`. `starter` is an address
        that `starter_address` returned in another process.
        """
        self.args = list(command)
        self.returncode: int | None = None
        request = {"command": self.args, "cwd": os.path.abspath(cwd), "env": dict(os.environ if env is None else env)}
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(f"\0{starter or starter_address()}")
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            streams = [stdin if stdin is not None else nothing, stdout, stdout if stderr is None else stderr]
            numbers = [each if isinstance(each, int) else each.fileno() for each in streams]
            socket.send_fds(self._connection, [json.dumps(request).encode()], numbers)
        finally:
            os.close(nothing)
        self.pid = self._told()

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended, or its signal as a negative number."""
        if self.returncode is None:
            with suppress(BlockingIOError):
                self._end(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                self._end(timeout)
            except TimeoutError:
                from subprocess import TimeoutExpired

                raise TimeoutExpired(self.args, timeout or 0.0) from None
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self, timeout: float | None) -> None:
        self._connection.settimeout(timeout)
        self.returncode = self._told()
        self._connection.close()

    def _told(self) -> int:
        told = self._connection.recv(MESSAGE_MAX)
        if not told:
            raise RuntimeError("the process that starts others has ended")
        return int(told)


@cache
def starter_address() -> str:
    """Return the address of the starter. The starter and all its processes end with this process."""
    from pathlib import Path
    from subprocess import PIPE, Popen

    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    # Single-threaded, because fork copies only the calling thread.
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.warm_starter"]
    process = Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    process.stdout.close()
    assert address, f"{command} has ended"
    atexit.register(process.communicate)  # this also closes the pipes
    return address
