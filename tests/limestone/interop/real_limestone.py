"""The real Limestone: its replica on loopback, and its tool, in the directory that FLOWSTONE_LIMESTONE names."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowstone.limestone.settings import ENDPOINT

VARIABLE: Final = "FLOWSTONE_LIMESTONE"
START_SECONDS: Final = 60.0
TOOL_SECONDS: Final = 120.0
TOOL_MEMORY: Final = 1 << 30
"""Memory limit of the tool, which allocates as much as a length in a file says."""


def available() -> bool:
    return bool(os.environ.get(VARIABLE)) and all(_program(name).is_file() for name in ("tgreplica", "tglogutil"))


def _program(name: str) -> Path:
    return Path(os.environ[VARIABLE]) / name


@dataclass(frozen=True)
class Said:
    """The answer of tglogutil: its exit code, and the lines `name: value` of its output."""

    code: int
    fields: dict[str, str]
    log: str

    @property
    def died(self) -> bool:
        """True if the tool was killed by its input, for example by a length beyond its memory."""
        return self.code < 0

    @property
    def status(self) -> str:
        return self.fields.get("status", "")


def logutil(command: str, directory: Path, *options: str) -> Said:
    done = subprocess.run(
        [_program("tglogutil"), command, *options, directory],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TOOL_SECONDS,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (TOOL_MEMORY, TOOL_MEMORY)),
        env=os.environ | {"GLOG_logtostderr": "1"},
    )
    lines = (line.partition(": ") for line in done.stdout.splitlines())
    fields = {name: value for name, colon, value in lines if colon}
    return Said(done.returncode, fields, done.stderr)


@contextmanager
def replica(directory: Path) -> Iterator[str]:
    """Run tgreplica and return its endpoint.

    The process serves one master, and is killed at the end.
    """
    with replica_process(directory) as (endpoint, process):
        yield endpoint
        assert process.poll() is None, f"the real replica exited with {process.returncode}"


@contextmanager
def replica_process(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Like `replica`, but also return the process, which the test may kill."""
    directory.mkdir(parents=True, exist_ok=True)
    endpoint = f"tcp://127.0.0.1:{_free_port()}"
    process = subprocess.Popen(
        [_program("tgreplica"), directory],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {ENDPOINT: endpoint, "GLOG_logtostderr": "1"},
    )
    try:
        _wait_for_listening(process)
        yield endpoint, process
    finally:
        process.kill()
        process.communicate()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _wait_for_listening(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    deadline, said = time.monotonic() + START_SECONDS, b""
    while b"listening" not in said:
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        piece = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not piece:
            raise TimeoutError(f"the real replica does not listen; output: {said!r}")
        said += piece
