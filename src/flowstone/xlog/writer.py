"""Writes log files: `LogWriter` an `.xlog`, which grows, `SnapWriter` a `.snap`, which appears complete.

Relies on `outside.disk`. A file is born as `NAME.inprogress`; its own name means that its header is whole
(xlog) or that all of it is (snap). Rows go to the file as the bytes they are. After a failed write an xlog
ends with a whole block again, so nothing ever follows garbage. Which rows to write, and when to sync, is the
caller's business.
"""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np

from flowstone.errors import LocalProtocolError
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row, encode_header, encode_uint
from flowstone.outside.disk import Disk, File
from flowstone.xlog.block import (
    COMPRESS_THRESHOLD,
    EOF_MAGIC,
    FIXHEADER_SIZE,
    FLUSH_THRESHOLD,
    checksum,
    encode_block,
    encode_fixheader,
    new_compressor,
)
from flowstone.xlog.errors import LsnUsedTwice, WriteFailed, XlogError
from flowstone.xlog.meta import HEADER_READ_SIZE, HEADER_SIZE_MAX, FileType, Meta, encode, file_name, parse
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import Transaction

INPROGRESS = ".inprogress"

SMALL_SIZE_MAX = COMPRESS_THRESHOLD - FIXHEADER_SIZE - 1
"""Bytes of rows that no real writer would compress."""


class LogWriter:
    """An open `.xlog`. `vclock` follows the rows written; `size` is where the next block goes."""

    def __init__(self, disk: Disk, file: File, path: str, meta: Meta, vclock: dict[int, int], size: int) -> None:
        self._disk = disk
        self._file = file
        self._vclock = vclock
        self._is_usable = True
        self._compressor = new_compressor()
        self.path = path
        self.meta = meta
        self.size = size

    @classmethod
    def create(cls, disk: Disk, directory: str, meta: Meta) -> LogWriter:
        """A new file with nothing but its header; file and name survive a loss of power from here on."""
        if meta.file_type is not FileType.XLOG:
            raise LocalProtocolError(f"a log is of type XLOG, not {meta.file_type.value}")
        file, path, size = _begin(disk, directory, meta)
        try:
            file.sync()
            _publish(disk, path)
        except OSError as error:
            # A log that stays behind without its writer would look like a gap once the old one went on.
            file.close()
            _discard(disk, path)
            raise WriteFailed(path, size, error, is_usable=False) from error
        return cls(disk, file, path, meta, dict(meta.vclock), size)

    @classmethod
    def reopen(cls, disk: Disk, path: str) -> LogWriter:
        """An existing file, to be continued: its end marker, or the torn tail of a crash, is cut off.

        Reads the whole file. Damage that no crash explains raises DamagedFile and changes nothing. What was read, and
        the file's name, survive a loss of power from here on: whoever wrote them may have died before it could see
        to that.
        """
        file = disk.append_to(path)
        try:
            meta, length = parse(file.read_at(0, HEADER_READ_SIZE), path)
            if meta.file_type is not FileType.XLOG:
                raise XlogError(f"{path}: a {meta.file_type.value} file cannot be appended to", path=path)
            log = LogFile(path, file, meta, length)
            vclock = _follow(log)
            assert log.ending is not None  # a log read to its end without an error has one
            end = log.ending.offset
            if end != file.size():
                file.truncate(end)
            file.sync()
            _sync_name(disk, path)
        except BaseException:
            file.close()
            raise
        return cls(disk, file, path, meta, vclock, end)

    @classmethod
    def resume(cls, disk: Disk, path: str, meta: Meta, vclock: Mapping[int, int], size: int) -> LogWriter:
        """As `reopen`, for a caller who has just read the file: its rows end at `size`, with `vclock`."""
        file = disk.append_to(path)
        try:
            if size != file.size():
                file.truncate(size)
            file.sync()
            _sync_name(disk, path)
        except OSError as error:
            file.close()
            raise WriteFailed(path, size, error, is_usable=False) from error
        return cls(disk, file, path, meta, dict(vclock), size)

    @property
    def is_usable(self) -> bool:
        """False after a failure that left the end of the file unknown (`mend` it), and once it was closed."""
        return self._is_usable

    @property
    def vclock(self) -> dict[int, int]:
        """A copy of the position behind the last row."""
        return dict(self._vclock)

    def append(self, transactions: Iterable[Transaction]) -> None:
        """Writes all of them with one call to the disk, in as few blocks as a real server would use.

        All or nothing: LsnUsedTwice and BlockTooLarge come before anything is written, and on WriteFailed
        what was written is cut off again. Not durable before `sync`.
        """
        vclock = dict(self._vclock)
        parts: list[bytes] = []
        rows: list[bytes] = []
        size = FIXHEADER_SIZE
        for transaction in transactions:
            for row in transaction.rows:
                if row.lsn <= vclock.get(row.replica_id, 0):
                    raise LsnUsedTwice(self.path, row.replica_id, row.lsn, vclock.get(row.replica_id, 0))
                vclock[row.replica_id] = row.lsn
                data = row.encode()
                rows.append(data)
                size += len(data)
            if size >= FLUSH_THRESHOLD:
                parts += encode_block(rows, self._compressor, self.path, self.size)
                rows, size = [], FIXHEADER_SIZE
        if rows:
            parts += encode_block(rows, self._compressor, self.path, self.size)
        self._write(parts)
        self._vclock = vclock

    def append_encoded(self, transactions: Sequence[bytes], vclock: Mapping[int, int], *, sync: bool = False) -> None:
        """As `append`, for rows that are bytes already: each item holds those of one or more whole transactions.

        `vclock` is the position behind them, which the caller vouches for. With `sync` they are durable on return,
        or cut off again as after any other failure.
        """
        parts: list[bytes] = []
        for together in _batches(transactions):
            parts += encode_block(together, self._compressor, self.path, self.size)
        before = self.size
        self._write(parts)
        if sync:
            self.sync(since=before)
        self._vclock = dict(vclock)

    def append_small(self, rows: bytes, vclock: dict[int, int]) -> None:
        """As `append_encoded`, for one transaction too small to be compressed; `vclock` becomes the writer's own."""
        head = encode_fixheader(False, len(rows), checksum(rows))
        self._write((head, rows))
        self._vclock = vclock

    def mend(self) -> None:
        """Makes a file usable whose end was unknown, by cutting it where its last sound block ends."""
        try:
            self._file.truncate(self.size)
            self._file.sync()
        except OSError as error:
            raise WriteFailed(self.path, self.size, error, is_usable=False) from error
        self._is_usable = True

    def sync(self, *, since: int | None = None) -> None:
        """Returns when everything appended survives a loss of power.

        After a failed sync nobody knows what the disk holds (the kernel may have dropped the pages and will
        not say so again), so the writer refuses to go on; or, where all up to byte `since` was synced before, what is
        behind that is cut off again.
        """
        try:
            self._file.sync()
        except OSError as error:
            self._is_usable = False
            if since is not None:
                # What was synced before is safe, and is all that was promised: the rest must not come back one day.
                self.size = since
                with suppress(WriteFailed):
                    self.mend()
            raise WriteFailed(self.path, self.size, error, is_usable=self._is_usable) from error

    def rotate(self) -> LogWriter:
        """Ends this file and gives the next one, whose PrevVClock is this one's VClock.

        A file without rows goes on instead, for the next would have its name. If the next file cannot be
        made, this one stays as it was.
        """
        if self._vclock == self.meta.vclock:
            return self
        end = self.size
        self._end()
        meta = Meta(
            FileType.XLOG,
            self.meta.instance_uuid,
            self._vclock,
            prev_vclock=self.meta.vclock,
            version=self.meta.version,
        )
        try:
            successor = LogWriter.create(self._disk, posixpath.dirname(self.path), meta)
        except (OSError, XlogError):
            self._cut(end)
            raise
        self.abandon()
        return successor

    def close(self) -> None:
        """Writes the end marker, syncs and gives the file back. Closing twice is harmless."""
        try:
            if self._is_usable:
                self._end()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Gives the file back as it is, without an end marker."""
        self._is_usable = False
        self._file.close()

    def _end(self) -> None:
        """Writes the end marker. A later file must not survive a loss of power that this one does not: so it syncs."""
        end = self.size
        self._write([EOF_MAGIC])
        try:
            self.sync()
        except WriteFailed:
            self.size = end
            raise

    def _write(self, parts: Sequence[bytes]) -> None:
        if not self._is_usable:
            raise XlogError(f"{self.path}: closed, or failed before", path=self.path, hint="reopen it")
        try:
            self._file.append(*parts)
        except OSError as error:
            self._cut(self.size)
            raise WriteFailed(self.path, self.size, error, is_usable=self._is_usable) from error
        except BaseException:
            # An interrupt: any part of it may be there, and this is no moment to clean up.
            self._is_usable = False
            raise
        self.size += sum(map(len, parts))

    def _cut(self, size: int) -> None:
        self.size = size
        try:
            self._file.truncate(size)
        except OSError:
            self._is_usable = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SnapWriter:
    """A `.snap` in the making. The caller brings spaces in ascending id, tuples in primary-key order.

    As a context manager it finishes the file, or abandons it when the block raises.
    """

    def __init__(self, disk: Disk, directory: str, meta: Meta, timestamp: float) -> None:
        if meta.file_type is not FileType.SNAP or meta.prev_vclock is not None:
            raise LocalProtocolError("a snapshot is of type SNAP and has no PrevVClock")
        self._disk = disk
        self._file, self.path, self._size = _begin(disk, directory, meta)
        self._timestamp = timestamp
        self._compressor = new_compressor()
        self._rows: list[bytes] = []
        self._pending = FIXHEADER_SIZE
        self._is_open = True
        self.row_count = 0

    def add_tuples(self, space_id: int, tuples: Iterable[bytes], group_id: int = 0) -> None:
        """Tuples of one space, MessagePack each; `group_id` is GROUP_LOCAL for a local space."""
        start = b"\x00\x02" + (b"\x07" + bytes((group_id,)) if group_id else b"")
        # The fixed-width space id is what real writers use, so that the body's length does not depend on it.
        body = b"\x82\x10\xce" + struct.pack(">I", space_id) + b"\x21"
        rest = b"\x04\xcb" + struct.pack(">d", self._timestamp) + body
        numbered = bytes((0x83 + bool(group_id),)) + start + b"\x03"
        unnumbered = bytes((0x82 + bool(group_id),)) + start
        for data in tuples:
            number = self.row_count
            head = numbered + encode_uint(number) if number else unnumbered
            self._add(head + rest + data)

    def add_row(self, type: RequestType, body: bytes, group_id: int = 0) -> None:
        """A row that is no tuple: RAFT and PROMOTE of newer servers."""
        row = Row(type, group_id=group_id, lsn=self.row_count, tsn=self.row_count, timestamp=self._timestamp)
        self._add(encode_header(row) + body)

    def add_encoded(self, rows: bytes, count: int) -> None:
        """`count` rows that are bytes already, numbered from `row_count` on; together they go into one block."""
        self._rows.append(rows)
        self.row_count += count
        self._pending += len(rows)
        if self._pending >= FLUSH_THRESHOLD:
            self._flush()

    def add_blocks(self, blocks: bytes, row_count: int) -> None:
        """Whole blocks that somebody else has encoded: `row_count` rows that are numbered from our `row_count` on."""
        self._flush()
        self._write([blocks])
        self.row_count += row_count

    def finish(self) -> str:
        """Ends the file, makes it durable, gives it its name, returns the path; or leaves nothing of it."""
        try:
            self._flush()
            self._write([EOF_MAGIC])
            self._file.sync()
            _publish(self._disk, self.path)
        except OSError as error:
            self.abandon()
            raise WriteFailed(self.path, self._size, error, is_usable=False) from error
        except XlogError:
            self.abandon()
            raise
        self._is_open = False
        self._file.close()
        return self.path

    def abandon(self) -> None:
        """Removes what there is of the file; harmless after `finish`."""
        if self._is_open:
            self._is_open = False
            self._file.close()
            _discard(self._disk, self.path)

    def _add(self, row: bytes) -> None:
        self._rows.append(row)
        self.row_count += 1
        self._pending += len(row)
        if self._pending >= FLUSH_THRESHOLD:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            parts = encode_block(self._rows, self._compressor, self.path, self._size)
            self._rows, self._pending = [], FIXHEADER_SIZE
            self._write(parts)

    def _write(self, parts: Sequence[bytes]) -> None:
        try:
            self._file.append(*parts)
        except OSError as error:
            raise WriteFailed(self.path, self._size, error, is_usable=False) from error
        self._size += sum(map(len, parts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()


def _batches(transactions: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    """Whole transactions, put together into what becomes one block each."""
    if sum(map(len, transactions)) < FLUSH_THRESHOLD - FIXHEADER_SIZE:
        return (transactions,) if transactions else ()
    return _cut_at_threshold(transactions)


def _cut_at_threshold(transactions: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    first, size = 0, FIXHEADER_SIZE
    for number, data in enumerate(transactions, 1):
        size += len(data)
        if size >= FLUSH_THRESHOLD:
            yield transactions[first:number]
            first, size = number, FIXHEADER_SIZE
    if first < len(transactions):
        yield transactions[first:]


def _follow(log: LogFile) -> dict[int, int]:
    """The vclock behind the last row of `log`, which is read to its end."""
    vclock = dict(log.meta.vclock)
    for slab in log.slabs():
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        for replica_id in np.unique(replica_ids).tolist():
            vclock[replica_id] = max(vclock.get(replica_id, 0), int(lsns[replica_ids == replica_id].max()))
    return vclock


def _begin(disk: Disk, directory: str, meta: Meta) -> tuple[File, str, int]:
    """The file under its temporary name with its header, its future path, and its size."""
    path = posixpath.join(directory, file_name(meta.vclock, meta.file_type))
    header = encode(meta)
    if len(header) > HEADER_SIZE_MAX:
        raise XlogError(f"{path}: text header of {len(header)} bytes, at most {HEADER_SIZE_MAX}", path=path)
    if disk.kind(path) is not None:
        raise XlogError(f"{path}: exists already", path=path, hint="continue it, or write to another directory")
    if disk.kind(path + INPROGRESS) is not None:
        # What a crash left: nobody reads it, and the directory's lock says that nobody writes it.
        disk.unlink(path + INPROGRESS)
    file = disk.create(path + INPROGRESS)
    try:
        file.append(header)
    except OSError as error:
        file.close()
        disk.unlink(path + INPROGRESS)
        raise WriteFailed(path, 0, error, is_usable=False) from error
    return file, path, len(header)


def _discard(disk: Disk, path: str) -> None:
    """Removes a file that was not finished, whichever of its two names it has."""
    disk.unlink(path if disk.kind(path) else path + INPROGRESS)


def _publish(disk: Disk, path: str) -> None:
    disk.rename(path + INPROGRESS, path)
    _sync_name(disk, path)


def _sync_name(disk: Disk, path: str) -> None:
    disk.sync_directory(posixpath.dirname(path) or ".")
