"""A blob that a replica receives piece by piece, in a temporary file until the entry that names the blob is complete.

All calls block. The content is durable before the file gets its final name. Temporary files that a crash leaves behind
are deleted at the next start (`directory.py`).
"""

from __future__ import annotations

from flowstone.limestone.format import copying
from flowstone.outside import Disk


class ReceivedBlob:
    """A temporary file at a path of its own: `append` all pieces, then `move`; or `discard` at any time."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._file = disk.create(path)

    def append(self, data: bytes, *, is_last: bool) -> None:
        """Append a piece; the last one makes the content durable."""
        self._file.append(data)
        if is_last:
            self._file.sync()
            self._file.close()

    def move(self, path: str) -> None:
        """Rename the file durably to `path`, replacing a file of that name."""
        self._disk.rename(self._path, path)
        self._disk.sync_directory(path.rpartition("/")[0])

    def discard(self) -> None:
        """Delete the temporary file; harmless after `move`."""
        self._file.close()
        copying.remove(self._disk, self._path)
