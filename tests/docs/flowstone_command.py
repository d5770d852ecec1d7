"""`flowstone` in the documentation's shell: the command itself, except for those that need Spark.

Commands with Spark run in the process that has a session (`interpreter.py`): one JVM per command would take most of the
test time. The others are forked, and this process forwards to them (`warm_command.py`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final

from tests import warm_command

SPARK: Final = "DOCS_SPARK"
"""The socket of a process with Spark, where the page has one."""
STARTER: Final = "DOCS_STARTER"
"""The address of the process that forks commands."""
LISTEN: Final = "DOCS_LISTEN"
"""Replaces the default address of a node, which no example names."""


def needs_spark(arguments: Sequence[str]) -> bool:
    command = arguments[0] if arguments else ""
    return (
        command in {"restore", "verify"}
        or (command == "mirror" and "--once" in arguments)
        or (command == "limestone" and "--spark" in arguments)
    ) and "--help" not in arguments


def listens_by_default(arguments: Sequence[str]) -> bool:
    named = any(argument.startswith(("--listen", "--config", "--help", "--check")) for argument in arguments)
    return arguments[:1] == ["serve"] and not named and not {"FLOWSTONE_LISTEN", "FLOWSTONE_CONFIG"} & set(os.environ)


def ask(path: str, request: dict[str, object], output: int, errors: int) -> int:
    """Run a request in an interpreter; return its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [output, errors])
        answer = connection.recv(100)
    if not answer:
        raise RuntimeError("the interpreter has ended")
    return int(answer)


def main(arguments: Sequence[str]) -> int:
    # The commands must not see how the tests are run.
    path, address, starter = os.environ.pop(SPARK, None), os.environ.pop(LISTEN), os.environ.pop(STARTER)
    if path is None or not needs_spark(arguments):
        given = ["--listen", address] if listens_by_default(arguments) else []
        return warm_command.run(["flowstone.cli", *arguments, *given], starter)
    environment = dict(os.environ)
    return ask(path, {"command": list(arguments), "directory": os.getcwd(), "environment": environment}, 1, 2)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # use the streams of the command
