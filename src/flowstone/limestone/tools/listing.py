"""The entries of a data directory as they are in its files, each with the epoch of its session and whether it counts.

Uses the Disk that is passed in, and blocks. For tools that show every entry; `limestone/store/recovery.py` determines
the resulting rows. A directory that is being written can be read, too: an incomplete entry is then the end of its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flowstone.limestone.format import names
from flowstone.limestone.format.entries import EntryType, Marker, Token, walk
from flowstone.outside import Disk


class Listed(NamedTuple):
    """A token of a file. `epoch` is the epoch of its session, or of the token itself. `is_durable` is true if the token
    counts or its epoch is durable."""

    file: str
    offset: int
    token: Token
    epoch: int | None
    is_durable: bool


def files(disk: Disk, directory: str) -> list[str]:
    """Return the names of the log files of a directory, including the compacted one, sorted."""
    found = (name for name in disk.list_directory(directory) if names.is_pwal(name))
    return [name for name in found if disk.kind(f"{directory}/{name}") == "file"]


def listing(disk: Disk, directory: str, name: str, durable_epoch: int) -> Iterator[Listed]:
    """Yield all tokens of one file in order; Torn or Unknown, if any, comes last."""
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
