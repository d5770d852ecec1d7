"""File descriptors of log channels: a limit of open files that is too low is an error before the first session.

Reads the limit of the process through the Disk that is passed in. Never changes it: that is up to the program.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flowstone.limestone.errors import LimestoneError
from flowstone.outside import Disk

SPARE: Final = 64
"""Descriptors for everything except log channels: manifest, epoch file, snapshot, blobs, libraries and the program."""

RAISE: Final = "raise the limit of open files (ulimit -n, LimitNOFILE of a systemd unit)"

PER_REPLICA_CHANNEL: Final = 2
"""Descriptors of a log channel at a replica: its connection and its log file."""


def per_master_channel(replicas: int, *, compatible: bool) -> int:
    """Descriptors of a log channel at a master: its log file, and a connection to each replica.

    Unless `compatible`, also the log file once more for each replica: it is read while the replica catches up."""
    return 1 + replicas * (1 if compatible else 2)


def check(disk: Disk, channels: int, per_channel: int) -> None:
    """Raise LimestoneError if the process may not open enough files for `channels` log channels."""
    limit, needed = disk.open_files_max(), channels * per_channel + SPARE
    if limit is not None and needed > limit:
        raise LimestoneError(
            f"{channels} log channels need {needed} file descriptors, and the limit of open files is {limit}",
            hint=f"{RAISE}: each log channel needs {per_channel}",
        )


@contextmanager
def explained() -> Iterator[None]:
    """Raise LimestoneError with a hint where the limit of open files has been reached."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise LimestoneError(f"cannot open {error.filename}: {error.strerror}", hint=RAISE) from error
