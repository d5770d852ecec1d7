"""A session that has ended, in the form in which it is sent to replicas.

A small session is encoded once for all replicas, a large one piece by piece for each, so that neither a long session
nor its blobs are ever in memory as a whole. Reads blobs through the Disk that is passed in; never sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import names
from flowstone.limestone.format.messages import SessionFlags, encode_entries
from flowstone.limestone.format.transcode import BlobContent, wire_parts
from flowstone.outside import Disk

KEPT_MAX: Final = 4 << 20
"""Maximum size on the wire of a session that is encoded once and kept until the next session of its channel has ended.
"""

BLOB_KEPT_MAX: Final = 1 << 20
"""Maximum size of a blob that is encoded with its session. A worker reads larger blobs when they are sent."""

PIECE_SIZE: Final = 1 << 20
"""Bytes of a blob that are read and sent at once."""

COST: Final = 2048
"""Bytes of memory that a session needs besides its messages: objects, closures and queue entries, as measured."""

Parts = Callable[[], Iterable[bytes | memoryview]]
"""Returns the entries of a session as in a log file, without markers, in parts of whole entries; can be called again.
"""

_ENDS: Final = SessionFlags.END | SessionFlags.FLUSH


@dataclass(frozen=True)
class WireForm:
    """The form in which sessions are sent. `directory` is the directory of their blobs.

    With `compatible`, a message is sent for every call, as the original does. With `has_stale_end`, the end message has
    the epoch of the channel's previous session, as in the original's asynchronous session close
    (`docs/spec/limestone.md#epoch-field`)."""

    disk: Disk
    directory: str
    compatible: bool = False
    has_stale_end: bool = False
    is_old: bool = False
    """True if the entries may name deleted blobs. No row refers to a deleted blob, so it is sent as an empty one and
    marked as gone."""

    def open_blob(self, blob_id: int) -> BlobContent | None:
        """Return the content of a blob; None if `is_old` and the blob has been deleted."""
        path = f"{self.directory}/{names.blob(blob_id)}"
        if self.is_old and self.disk.kind(path) is None:
            return None
        size = self.disk.size(path)
        return BlobContent(size, self._read(path, size))

    def _read(self, path: str, size: int) -> Iterator[bytes]:
        with self.disk.open(path) as file:
            at = 0
            while at < size:
                data = file.read_at(at, min(PIECE_SIZE, size - at))
                if not data:
                    raise LimestoneError(f"blob {path} was truncated while it was sent: {at} of {size} bytes left")
                at += len(data)
                yield data

    def _open_small_blob(self, blob_id: int) -> BlobContent | None:
        content = self.open_blob(blob_id)
        if content is not None and content.size > BLOB_KEPT_MAX:
            raise _TooLarge
        return content

    def pieces(
        self, epoch: int, parts: Iterable[bytes | memoryview], epoch_before: int, *, only_small_blobs: bool = False
    ) -> Iterator[bytes]:
        """Yield the encoding of a session with these parts, in order."""
        open_blob = self._open_small_blob if only_small_blobs else self.open_blob
        part: bytes | memoryview = b""
        is_first, is_stale = True, self.compatible and self.has_stale_end
        for following in parts:
            if part:
                yield from wire_parts(
                    part, epoch, begin=is_first, end=False, compatible=self.compatible, open_blob=open_blob
                )
                is_first = False
            part = following
        yield from wire_parts(
            part, epoch, begin=is_first, end=not is_stale, compatible=self.compatible, open_blob=open_blob
        )
        if is_stale:
            yield encode_entries(epoch_before, (), 0, _ENDS)


class _TooLarge(Exception):
    pass


class EndedSession:
    """A session to send. `acknowledged` lists the conversations in which the session was acknowledged; a replica that
    reconnects must acknowledge it again."""

    def __init__(
        self,
        form: WireForm,
        channel_id: int,
        epoch: int,
        parts: Parts,
        epoch_before: int = 0,
    ) -> None:
        self.channel_id = channel_id
        self.epoch = epoch
        self.acknowledged: list[object] = []
        self._form = form
        self._parts: Parts | None = parts
        self._epoch_before = epoch_before
        self.kept = self._whole(parts)
        """The whole encoding; None if it is too large to keep."""
        if self.kept is not None:
            self._parts = None  # a second copy of the entries

    @property
    def held(self) -> int:
        """Bytes of memory that the session may need until it is acknowledged: its messages, here and in the buffer of
        the connection, or the entries that its parts keep; and the objects around them."""
        return COST + (KEPT_MAX if self.kept is None else 2 * len(self.kept))

    def _whole(self, parts: Parts) -> bytes | None:
        found: list[bytes] = []
        size = 0
        pieces = self._form.pieces(self.epoch, parts(), self._epoch_before, only_small_blobs=True)
        try:
            for piece in pieces:
                found.append(piece)
                size += len(piece)
                if size > KEPT_MAX:
                    return None
        except _TooLarge:
            return None
        return found[0] if len(found) == 1 else b"".join(found)

    def pieces(self) -> Iterator[bytes]:
        """Yield the encoding in order; may read files. Raise LimestoneError if they can no longer be read."""
        if self.kept is not None:
            yield self.kept
            return
        assert self._parts is not None
        try:
            yield from self._form.pieces(self.epoch, self._parts(), self._epoch_before)
        except OSError as error:
            raise LimestoneError(f"cannot read back session of log channel {self.channel_id}: {error}") from error
