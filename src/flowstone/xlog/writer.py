"""Writers of log files: `LogWriter` appends to an `.xlog`, `SnapWriter` writes a `.snap`, which appears complete.

Relies on `outside.disk`. A file is created as `NAME.inprogress` and renamed to `NAME` once its header is written (xlog)
or all of it is (snap). Rows are written as they are, in blocks that are flushed at 128 KiB (`FLUSH_THRESHOLD`). After a
failed write the xlog is truncated to its last whole block, so no block ever follows garbage. The caller decides which
rows to write and when to sync.
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
    FLUSH_THRESHOLD,
    checksum,
    encode_block,
    encode_fixheader,
    new_compressor,
)
from flowstone.xlog.block_table import FIXHEADER_SIZE
from flowstone.xlog.errors import LsnUsedTwice, WriteFailed, XlogError
from flowstone.xlog.meta import HEADER_READ_SIZE, HEADER_SIZE_MAX, FileType, Meta, encode, file_name, parse
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import LogTransaction

INPROGRESS = ".inprogress"

SMALL_SIZE_MAX = COMPRESS_THRESHOLD - FIXHEADER_SIZE - 1
"""Largest size of rows that real writers do not compress."""


class LogWriter:
    """An open `.xlog`. `vclock` is the position after the rows written; `size` is the offset of the next block."""

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
        """Create a file that has only its header. From here on, the file and its name survive a power loss."""
        if meta.file_type is not FileType.XLOG:
            raise LocalProtocolError(f"log must be of type XLOG, not {meta.file_type.value}")
        file, path, size = _begin(disk, directory, meta)
        try:
            file.sync()
            _publish(disk, path)
        except OSError as error:
            # A log left without its writer would look like a gap once the old log continues.
            file.close()
            _discard(disk, path)
            raise WriteFailed(path, size, error, is_usable=False) from error
        return cls(disk, file, path, meta, dict(meta.vclock), size)

    @classmethod
    def reopen(cls, disk: Disk, path: str) -> LogWriter:
        """Open an existing file to continue it: cut off its end marker, or the torn tail of a crash.

        Reads the whole file. Damage that no crash explains raises DamagedFile and changes nothing. The rows read and
        the file's name survive a power loss from here on: their writer may have died before it could sync them.
        """
        file = disk.append_to(path)
        try:
            meta, length = parse(file.read_at(0, HEADER_READ_SIZE), path)
            if meta.file_type is not FileType.XLOG:
                raise XlogError(f"{path}: cannot append to a {meta.file_type.value} file", path=path)
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
        """Like `reopen`, for a caller that has just read the file: its rows end at offset `size` and at `vclock`."""
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
        """Return False after a failure that left the end of the file unknown (see `mend`), and after closing."""
        return self._is_usable

    @property
    def vclock(self) -> dict[int, int]:
        """Return a copy of the position after the last row."""
        return dict(self._vclock)

    def append(self, transactions: Iterable[LogTransaction]) -> None:
        """Write all transactions with one call to the disk, in as few blocks as a real server would use.

        All or nothing: LsnUsedTwice and BlockTooLarge are raised before anything is written, and on WriteFailed the
        bytes written are cut off again. Not durable before `sync`.
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
        """Like `append`, for encoded rows: each item holds the rows of one or more whole transactions.

        `vclock` is the position after them, for which the caller is responsible. With `sync` the rows are durable on
        return, or cut off again as after any other failure.
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
        """Like `append_encoded`, for one transaction too small to be compressed. Takes ownership of `vclock`."""
        head = encode_fixheader(False, len(rows), checksum(rows))
        self._write((head, rows))
        self._vclock = vclock

    def mend(self) -> None:
        """Make a file with an unknown end usable again: cut it at the end of its last sound block."""
        try:
            self._file.truncate(self.size)
            self._file.sync()
        except OSError as error:
            raise WriteFailed(self.path, self.size, error, is_usable=False) from error
        self._is_usable = True

    def sync(self, *, since: int | None = None) -> None:
        """Return once everything appended survives a power loss.

        After a failed sync the content of the disk is unknown (the kernel may have dropped the pages and does not
        report it again), so the writer becomes unusable. If everything up to byte `since` was synced before, the bytes
        after it are cut off instead.
        """
        try:
            self._file.sync()
        except OSError as error:
            self._is_usable = False
            if since is not None:
                # Only the bytes synced before were acknowledged: the rest must not reappear later.
                self.size = since
                with suppress(WriteFailed):
                    self.mend()
            raise WriteFailed(self.path, self.size, error, is_usable=self._is_usable) from error

    def rotate(self) -> LogWriter:
        """End this file and return the next one, whose PrevVClock is the VClock of this file.

        A file without rows is continued instead, because the next file would have the same name. If the next file
        cannot be created, the current file does not change.
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
        """Write the end marker, sync and close the file. Closing twice is harmless."""
        try:
            if self._is_usable:
                self._end()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without writing an end marker."""
        self._is_usable = False
        self._file.close()

    def _end(self) -> None:
        """Write the end marker and sync: a later file must not survive a power loss that this file does not survive."""
        end = self.size
        self._write([EOF_MAGIC])
        try:
            self.sync()
        except WriteFailed:
            self.size = end
            raise

    def _write(self, parts: Sequence[bytes]) -> None:
        if not self._is_usable:
            raise XlogError(f"{self.path}: writer is closed or failed before", path=self.path, hint="reopen the file")
        try:
            self._file.append(*parts)
        except OSError as error:
            self._cut(self.size)
            raise WriteFailed(self.path, self.size, error, is_usable=self._is_usable) from error
        except BaseException:
            # After an interrupt any part of the data may be written, and this is not the time to clean up.
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
    """A `.snap` being written. The caller adds spaces in the order of ids, tuples in the order of the primary key.

    As a context manager it finishes the file, or abandons it if the block raises.
    """

    def __init__(self, disk: Disk, directory: str, meta: Meta, timestamp: float) -> None:
        if meta.file_type is not FileType.SNAP or meta.prev_vclock is not None:
            raise LocalProtocolError("snapshot must be of type SNAP without PrevVClock")
        self._disk = disk
        self._file, self.path, self._size = _begin(disk, directory, meta)
        self._timestamp = timestamp
        self._compressor = new_compressor()
        self._rows: list[bytes] = []
        self._pending = FIXHEADER_SIZE
        self._is_open = True
        self.row_count = 0

    def add_tuples(self, space_id: int, tuples: Iterable[bytes], group_id: int = 0) -> None:
        """Add tuples of one space, each as MessagePack; `group_id` is GROUP_LOCAL for a local space."""
        start = b"\x00\x02" + (b"\x07" + bytes((group_id,)) if group_id else b"")
        # Real writers use a space id of fixed width, so that the length of the body does not depend on it.
        body = b"\x82\x10\xce" + struct.pack(">I", space_id) + b"\x21"
        rest = b"\x04\xcb" + struct.pack(">d", self._timestamp) + body
        numbered = bytes((0x83 + bool(group_id),)) + start + b"\x03"
        unnumbered = bytes((0x82 + bool(group_id),)) + start
        for data in tuples:
            number = self.row_count
            head = numbered + encode_uint(number) if number else unnumbered
            self._add(head + rest + data)

    def add_row(self, type: RequestType, body: bytes, group_id: int = 0) -> None:
        """Add a row that is not a tuple: RAFT or PROMOTE of newer servers."""
        row = Row(type, group_id=group_id, lsn=self.row_count, tsn=self.row_count, timestamp=self._timestamp)
        self._add(encode_header(row) + body)

    def add_encoded(self, rows: bytes, count: int) -> None:
        """Add `count` encoded rows, numbered from `row_count` on; together they go into one block."""
        self._rows.append(rows)
        self.row_count += count
        self._pending += len(rows)
        if self._pending >= FLUSH_THRESHOLD:
            self._flush()

    def add_blocks(self, blocks: bytes, row_count: int) -> None:
        """Add whole blocks encoded elsewhere: `row_count` rows, numbered from the writer's `row_count` on."""
        self._flush()
        self._write([blocks])
        self.row_count += row_count

    def finish(self) -> str:
        """End the file, make it durable, give it its name and return its path; remove it on failure."""
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
        """Remove the unfinished file; harmless after `finish`."""
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
    """Return groups of whole transactions; each group becomes one block."""
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
    """Read `log` to its end and return the vclock after its last row."""
    vclock = dict(log.meta.vclock)
    for slab in log.slabs():
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        for replica_id in np.unique(replica_ids).tolist():
            vclock[replica_id] = max(vclock.get(replica_id, 0), int(lsns[replica_ids == replica_id].max()))
    return vclock


def _begin(disk: Disk, directory: str, meta: Meta) -> tuple[File, str, int]:
    """Create the file under its temporary name and write its header; return the file, its final path and its size."""
    path = posixpath.join(directory, file_name(meta.vclock, meta.file_type))
    header = encode(meta)
    if len(header) > HEADER_SIZE_MAX:
        raise XlogError(
            f"{path}: text header has {len(header)} bytes: at most {HEADER_SIZE_MAX} are allowed", path=path
        )
    if disk.kind(path) is not None:
        raise XlogError(f"{path}: already exists", path=path, hint="continue it, or write to another directory")
    if disk.kind(path + INPROGRESS) is not None:
        # Left by a crash: nothing reads it, and the directory's lock ensures that no other process writes it.
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
    """Remove an unfinished file, under its temporary or its final name."""
    disk.unlink(path if disk.kind(path) else path + INPROGRESS)


def _publish(disk: Disk, path: str) -> None:
    disk.rename(path + INPROGRESS, path)
    _sync_name(disk, path)


def _sync_name(disk: Disk, path: str) -> None:
    disk.sync_directory(posixpath.dirname(path) or ".")
