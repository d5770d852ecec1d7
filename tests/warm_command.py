"""A proxy for a process of `warm_process.py`, for callers that start commands with `subprocess` and pipes.

`python -IS warm_command.py STARTER MODULE ARGUMENT…` runs the module with the streams of the proxy, forwards signals,
and exits like the module; the process id is that of the proxy. If the proxy is killed, so is the process. It imports
little, and starts in 50 ms.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.warm_process import WarmProcess, starter_address

PASSED_ON: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def warm(module: str) -> tuple[str, ...]:
    """Return the command to start instead of `python -m MODULE`."""
    return (sys.executable, "-IS", __file__, starter_address(), module)


def run(command: Sequence[str], starter: str) -> int:
    """Run a command; return its exit code, or end by the same signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    process = WarmProcess(command, stdin=0, stdout=1, stderr=2, starter=starter)

    def pass_on(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    for descriptor in (0, 1):  # close them here: the peers of these streams wait for the process, not for the proxy
        os.close(descriptor)
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    _, starter, *command = sys.argv
    os._exit(run(command, starter))
