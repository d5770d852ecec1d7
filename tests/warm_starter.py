"""The process that forks those of `warm_process.py`: `python -m tests.warm_starter`, which prints its address.

It has imported Flowstone except for Spark, and has one thread. For each request it forks a keeper, which forks the
process and reports its exit. A keeper whose requester has ended kills its process; the starter ends with its standard
input.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from uuid import uuid4

import flowstone
from tests.warm_process import MESSAGE_MAX, UNBUFFERED


def preload() -> None:
    for module in pkgutil.walk_packages(flowstone.__path__, "flowstone."):
        if not module.name.startswith("flowstone.spark") and not module.name.endswith("__main__"):
            import_module(module.name)
    for name in ("encodings.idna", "rich.live", "uvloop"):  # imported only when needed elsewhere
        import_module(name)
    gc.collect()
    gc.freeze()


def serve(listener: socket.socket) -> list[str] | None:
    """Return the command in each forked process that runs one, and None in the starter, at its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return keep(connection)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # reap keepers that have ended
                pass


def keep(connection: socket.socket) -> list[str]:
    """Return in the requested process; the keeper exits here."""
    text, streams, _, _ = socket.recv_fds(connection, MESSAGE_MAX, 3)
    if not text:
        os._exit(0)
    request = json.loads(text)
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(request["cwd"], request["env"], streams)
        command: list[str] = request["command"]
        return command
    for number in streams:
        os.close(number)
    with suppress(OSError):  # the requester has ended
        connection.send(b"%d" % pid)
        ended = os.pidfd_open(pid)
        ready, _, _ = select.select([connection.fileno(), ended], [], [])
        if ended not in ready:
            os.kill(pid, signal.SIGKILL)
        connection.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def become(directory: str, environment: Mapping[str, str], streams: Sequence[int]) -> None:
    """Give a forked process its own streams, directory and environment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, given in enumerate(streams):
        os.dup2(given, number)
        os.close(given)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get(UNBUFFERED):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # it is what Python opened


def main() -> None:
    preload()
    address = f"flowstone-tests-{uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")  # an abstract socket: a name without a file
        listener.listen()
        print(address, flush=True)  # noqa: T201
        command = serve(listener)
    if command is not None:
        module, *arguments = command
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
