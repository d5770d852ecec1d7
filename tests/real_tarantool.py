"""The real Tarantool, for tests and benchmarks: runs scripts, or a server on loopback.

`available()` returns True if the binary exists. Tests use the fixtures of `conftest.py`, which fail instead of skipping
with CI=true.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Final

START_SECONDS = 120

_PORTS: Final = range(10_000, 32_000)
"""None of those that are given to who connects: what is free now is free when a server takes it, or takes it again."""

_RANDOM: Final = SystemRandom()


def available() -> bool:
    return shutil.which("tarantool") is not None and shutil.which("tarantoolctl") is not None


def run(script: str, directory: Path, *, seconds: float = 600, binary: str = "tarantool") -> str:
    """Run a Lua script in `directory`; return its standard output, or raise an error with the log."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "script.lua"
    path.write_text(script)
    done = subprocess.run(
        [binary, path.name],
        cwd=directory,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"tarantool exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def cat(path: Path, *, format: str = "json", show_system: bool = True) -> bytes:
    """Return the output of `tarantoolctl cat` for one file."""
    command = ["tarantoolctl", "cat", str(path), f"--format={format}"]
    if show_system:
        command.append("--show-system")
    return subprocess.run(command, capture_output=True, timeout=600, check=True).stdout


@dataclass
class Server:
    """A running server: its `uri`, the `directory` of its files, and its `process`."""

    uri: str
    port: int
    directory: Path
    process: subprocess.Popen[bytes]

    def log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")


def free_port() -> int:
    while True:
        port = _RANDOM.choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def serve(directory: Path, *, setup: str = "", cfg: str = "", binary: str = "tarantool") -> Iterator[Server]:
    """Run a real server on loopback whose guest has all privileges. `setup` is Lua code that runs before the server is
    ready.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    (directory / "server.lua").write_text(
        f"box.cfg{{listen='127.0.0.1:{port}', log='server.log', {cfg}}}\n"
        "box.schema.user.grant('guest', 'super', nil, nil, {if_not_exists=true})\n"
        f"{setup}\nprint('READY') io.stdout:flush()\n"
    )
    command, pipe = [binary, "server.lua"], subprocess.PIPE
    process = subprocess.Popen(command, cwd=directory, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        seen = b""
        for line in process.stdout:
            seen += line
            if line.strip() == b"READY":
                break
        else:
            raise RuntimeError(f"tarantool did not start: {seen.decode(errors='replace')}")
        yield Server(f"127.0.0.1:{port}", port, directory, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if process.stdout is not None:
            process.stdout.close()
