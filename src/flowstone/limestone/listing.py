"""The entries of a data directory as they stand in its files, each with its session's epoch and whether it counts.

Through the Disk one is handed, and blocking. For those that want to see all there is, one by one; what a directory adds
up to is for `recovery.py`. A directory that is being written to can be read, too: what is not whole yet is its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flowstone.limestone import names
from flowstone.limestone.entries import EntryType, Marker, Token, walk
from flowstone.outside import Disk


class Listed(NamedTuple):
    """A token of a file. `epoch`: of the session it is in, or its own. `is_durable`: it counts, or its epoch does."""

    file: str
    offset: int
    token: Token
    epoch: int | None
    is_durable: bool


def files(disk: Disk, directory: str) -> list[str]:
    """The log files of a directory, the compacted one among them, by name."""
    found = (name for name in disk.list_directory(directory) if names.is_pwal(name))
    return [name for name in found if disk.kind(f"{directory}/{name}") == "file"]


def listing(disk: Disk, directory: str, name: str, durable_epoch: int) -> Iterator[Listed]:
    """All tokens of one file in their order; Torn or Unknown, if any, comes last."""
    epoch: int | None = None
    is_durable = False
    with disk.open(f"{directory}/{name}") as file:
        for offset, token in walk(file.read_at, file.size()):
            if isinstance(token, Marker):
                if token.type is EntryType.MARKER_DURABLE:
                    yield Listed(name, offset, token, token.epoch, True)
                    continue
                if token.type is not EntryType.MARKER_END:
                    epoch = token.epoch
                    is_durable = token.type is EntryType.MARKER_BEGIN and epoch <= durable_epoch
            yield Listed(name, offset, token, epoch, is_durable and epoch is not None)
            if isinstance(token, Marker) and token.type is EntryType.MARKER_END:
                epoch = None
