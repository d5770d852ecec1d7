"""A session that has ended, as it goes to replicas: from the bytes of its log file to those of the wire.

Made once for all replicas where it is small, piece by piece for each where it is not, so that neither a long session
nor the blobs that it names are ever in memory whole. Reads blobs through the Disk one is handed; never sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from flowstone.limestone import names
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.messages import SessionFlags, encode_entries
from flowstone.limestone.transcode import wire_parts
from flowstone.outside import Disk

KEPT_MAX: Final = 4 << 20
"""Bytes on the wire up to which a session is made once and kept until its channel's next one has ended."""

BLOB_KEPT_MAX: Final = 1 << 20
"""A blob that is longer is read by a worker, when its turn comes."""

Parts = Callable[[], Iterable[bytes | memoryview]]
"""The entries of a session as they are in a log file, without markers, in parts of whole entries; may be called again.
"""

_ENDS: Final = SessionFlags.END | SessionFlags.FLUSH


@dataclass(frozen=True)
class WireForm:
    """How sessions are sent. `directory` is where the blobs are that they name.

    `compatible`: a message for every call, as the original. `has_stale_end`: as its asynchronous session close, the
    end says the epoch of the channel's session before (reference: the epoch field of LOG_ENTRIES)."""

    disk: Disk
    directory: str
    compatible: bool = False
    has_stale_end: bool = False
    is_old: bool = False
    """Whether the entries may name blobs that are gone: no row has one that was collected, so it is sent as empty."""

    def blob_content(self, blob_id: int, size_max: int | None = None) -> bytes:
        path = f"{self.directory}/{names.blob(blob_id)}"
        if self.is_old and self.disk.kind(path) is None:
            return b""
        with self.disk.open(path) as file:
            size = file.size()
            if size_max is not None and size > size_max:
                raise _TooLarge
            return file.read_at(0, size)

    def _small_blob_content(self, blob_id: int) -> bytes:
        return self.blob_content(blob_id, BLOB_KEPT_MAX)

    def pieces(
        self, epoch: int, parts: Iterable[bytes | memoryview], epoch_before: int, *, only_small_blobs: bool = False
    ) -> Iterator[bytes]:
        """What is sent for a session of these parts, in order."""
        content = self._small_blob_content if only_small_blobs else self.blob_content
        part: bytes | memoryview = b""
        is_first, is_stale = True, self.compatible and self.has_stale_end
        for following in parts:
            if part:
                yield from wire_parts(
                    part, epoch, begin=is_first, end=False, compatible=self.compatible, blob_content=content
                )
                is_first = False
            part = following
        yield from wire_parts(
            part, epoch, begin=is_first, end=not is_stale, compatible=self.compatible, blob_content=content
        )
        if is_stale:
            yield encode_entries(epoch_before, (), 0, _ENDS)


class _TooLarge(Exception):
    pass


class EndedSession:
    """`acknowledged` are the conversations in which it was: what a replica had before it was lost does not count."""

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
        self._parts = parts
        self._epoch_before = epoch_before
        self.kept = self._whole()
        """All that is sent for it; None where that is too much to keep."""

    @property
    def held(self) -> int:
        """Bytes that it may hold in memory until it is acknowledged: its messages, or what its parts have kept."""
        return KEPT_MAX if self.kept is None else len(self.kept)

    def _whole(self) -> bytes | None:
        found: list[bytes] = []
        size = 0
        pieces = self._form.pieces(self.epoch, self._parts(), self._epoch_before, only_small_blobs=True)
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
        """What is sent, in order; LimestoneError where it can no longer be had. It may read files."""
        if self.kept is not None:
            yield self.kept
            return
        try:
            yield from self._form.pieces(self.epoch, self._parts(), self._epoch_before)
        except OSError as error:
            raise LimestoneError(f"a session of log channel {self.channel_id} cannot be read back: {error}") from error
