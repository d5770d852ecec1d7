"""Rows between members of a replica set: a peer's bytes to slabs of whole transactions, slabs to a log's and a peer's.

Pure: no socket and no clock. `RowStream` takes what a connection delivers and bounds what it keeps; the functions
below turn rows into what is written or sent next, bodies untouched. The passes are those of `iproto/row_batches.py`.
"""

from __future__ import annotations

from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import RemoteProtocolError
from flowstone.iproto import row_batches
from flowstone.iproto import scan as rowscan
from flowstone.iproto.batches import float_bits
from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.iproto.packet import decode_response
from flowstone.iproto.row_batches import AT, NEEDED, ROWS, WHOLE_AT, WHOLE_ROWS
from flowstone.iproto.scan import Bytes, Cells
from flowstone.xlog.block import TRANSACTION_SIZE_MAX
from flowstone.xlog.reader import Slab

ROWS_MAX: Final = 16384
"""Rows of one slab, unless a single transaction has more: some milliseconds of work for whoever applies them."""

REPLY_SIZE_MAX: Final = 1024**2
"""Bytes of a packet before rows are due: ballots and errors are small, and who sends them may be anybody."""

TRANSACTION_ROWS_MAX: Final = 4 * 1024**2
"""Rows of one transaction: short ones in their millions would exhaust memory, of which the table takes 168 bytes each.
Tarantool has no such bound, but a transaction of this size takes minutes there, too."""

_ROOM: Final = 64
"""Columns of the first table."""

_SMALL: Final = 4096
"""Bytes of rows for which a table of any size they may need is cheaper than asking how large it must be."""

_HINT: Final = "see whether a Tarantool server is there, and follow it anew"

_WHAT: Final = {
    row_batches.BAD_ROW: "a packet that is no row",
    row_batches.BAD_REPLICA_ID: "which no replica set can have",
    row_batches.BAD_TSN: "Transaction id must be equal to LSN of the first row in the transaction.",
    row_batches.INTERLEAVED: "replication does not support interleaving transactions",
}
_OFFSETS: Final = (
    rowscan.KEY_AT,
    rowscan.KEY_END,
    rowscan.TUPLE_AT,
    rowscan.TUPLE_END,
    rowscan.OPS_AT,
    rowscan.OPS_END,
    rowscan.ROW_AT,
    rowscan.BODY_AT,
    rowscan.ROW_END,
)
_MARKS: Final = [rowscan.TYPE, rowscan.SINGLE, rowscan.FLAGS, rowscan.TSN, rowscan.LSN]
_ONE_SPAN: Final[Cells] = np.zeros(1, np.int64)


class StreamError(RemoteProtocolError):
    """`peer` sent `what`. Nothing that it sends after that can be understood."""

    def __init__(self, peer: str, what: str) -> None:
        super().__init__(f"{peer} sent {what}", hint=_HINT)
        self.peer = peer
        self.what = what


class RowStream:
    """What one connection delivers, packet by packet or in slabs of whole transactions.

    Each byte is looked at once, however it comes cut: of an unfinished transaction, the rows so far stay tabulated.
    After an error every call raises it again.
    """

    def __init__(
        self,
        peer: str,
        *,
        packet_size_max: int = BLOCK_SIZE_MAX,
        transaction_size_max: int = TRANSACTION_SIZE_MAX,
        transaction_rows_max: int = TRANSACTION_ROWS_MAX,
    ) -> None:
        self.peer = peer
        self.packet_size_max = packet_size_max
        self._transaction_size_max = transaction_size_max
        self._transaction_rows_max = transaction_rows_max
        self._unread = bytearray()
        self._cells: Cells = np.empty((rowscan.LINES, _ROOM), np.int64)
        self._progress: Cells = np.zeros(row_batches.PROGRESS_SIZE, np.int64)
        self._needed = 1

    @property
    def unread_size(self) -> int:
        """Bytes that are kept because nobody took them yet, or because they are not whole."""
        return len(self._unread)

    def feed(self, data: bytes) -> None:
        """What the connection has delivered."""
        self._unread += data

    def take_packet(self) -> bytes | None:
        """The next packet, undecoded and without its length; for replies before the rows begin."""
        found = self._packet_at(0)
        if found is None:
            return None
        packet, end = found
        del self._unread[:end]
        self._progress[:] = 0  # rows of an unfinished transaction, if any, are scanned anew
        self._needed = 1
        return packet

    def take(self, *, rows_max: int = ROWS_MAX) -> Slab | None:
        """All whole transactions that have come, as one slab whose rows are the packets; None if there is none yet.

        It has at most `rows_max` rows, or twice those of a transaction that has more. An error packet is raised as the
        error that it is, after the rows before it are taken; what is no row or breaks a transaction is a StreamError.
        """
        if len(self._unread) < self._needed:
            return None
        why = self._scan(rows_max)
        count = int(self._progress[WHOLE_ROWS])
        if count:
            return self._cut(count, int(self._progress[WHOLE_AT]))
        if why != row_batches.NEED:
            self._fail(why)
        self._needed = int(self._progress[NEEDED])
        return None

    def _scan(self, rows_max: int) -> int:
        """Tabulates what has come: `rows_max` rows, or more while there is no whole transaction among them."""
        while True:
            room = min(self._cells.shape[1], rows_max)
            # The array must be gone before anything is added to the bytes, so it has no name.
            why = row_batches.scan_packets(
                np.frombuffer(self._unread, np.uint8),
                self._cells,
                room,
                self.packet_size_max,
                self._transaction_size_max,
                self._progress,
            )
            if why != row_batches.FULL:
                return why
            if room == rows_max:
                if self._progress[WHOLE_ROWS]:
                    return why
                if rows_max >= self._transaction_rows_max:
                    raise StreamError(self.peer, f"a transaction of more than {self._transaction_rows_max} rows")
                rows_max = min(2 * rows_max, self._transaction_rows_max)
            if room == self._cells.shape[1]:
                grown: Cells = np.empty((rowscan.LINES, 2 * room), np.int64)
                grown[:, :room] = self._cells
                self._cells = grown

    def _cut(self, count: int, end: int) -> Slab:
        """Takes the first `count` rows, which end at byte `end`, off the table and the bytes."""
        progress, cells = self._progress, self._cells
        payload = bytes(memoryview(self._unread)[:end])
        del self._unread[:end]
        # One column too many, so that kernels see tables of the layout that those of files have, and need no second
        # compilation.
        table: Cells = np.empty((rowscan.LINES, count + 1), np.int64)
        table[:, :count] = cells[:, :count]
        left = int(progress[ROWS]) - count
        if left:
            cells[:, :left] = cells[:, count : count + left]
            for line in _OFFSETS:
                offsets = cells[line, :left]
                offsets[offsets >= 0] -= end
        if cells.shape[1] > 4 * ROWS_MAX and left < _ROOM:
            self._cells = cells[:, :_ROOM].copy()  # a large transaction has gone; so goes its table
        progress[AT] -= end
        progress[ROWS] = left
        progress[WHOLE_AT] = progress[WHOLE_ROWS] = 0
        self._needed = 1
        return Slab(self.peer, payload, np.frombuffer(payload, np.uint8), table[:, :count], _ONE_SPAN)

    def _fail(self, why: int) -> NoReturn:
        at, row = int(self._progress[AT]), int(self._progress[ROWS])
        if why in (row_batches.BAD_LENGTH, row_batches.ERROR_PACKET):
            found = self._packet_at(at)
            assert found is not None
            raise decode_response(found[0]).error()
        if why == row_batches.TOO_LARGE:
            raise StreamError(self.peer, f"a transaction of more than {self._transaction_size_max} bytes")
        what = _WHAT[why]
        if why != row_batches.BAD_ROW:
            lsn, replica_id = (int(self._cells[line, row]) for line in (rowscan.LSN, rowscan.REPLICA_ID))
            what = f"row {lsn} of replica {replica_id}, {what}"
        raise StreamError(self.peer, what)

    def _packet_at(self, at: int) -> tuple[bytes, int] | None:
        """The packet that begins at `at`, and where it ends; None while it is not whole."""
        unread = self._unread
        if at >= len(unread):
            return None
        size, start = unread[at], at + 1
        if size >= 0x80:
            if not 0xCC <= size <= 0xCF:
                raise StreamError(self.peer, f"something that is no packet: it begins with byte 0x{size:02x}")
            start += 1 << (size - 0xCC)
            if start > len(unread):
                return None
            size = int.from_bytes(unread[at + 1 : start], "big")
        if not 0 < size <= self.packet_size_max:
            what = f"a packet of {size} bytes, between 1 and {self.packet_size_max} are accepted"
            raise StreamError(self.peer, what)
        if start + size > len(unread):
            return None
        return bytes(unread[start : start + size]), start + size


def slab_of_rows(rows: bytes, path: str) -> Slab:
    """Rows as a log has them: one behind the other, whole transactions."""
    buf: Bytes = np.frombuffer(rows, np.uint8)
    spans: Cells = np.array([[0, len(rows)]], np.int64)
    if len(rows) <= _SMALL:
        cells: Cells = np.empty((rowscan.LINES, len(rows) // rowscan.ROW_SIZE_MIN + 2), np.int64)
        _, _, count, why = rowscan.scan_spans(buf, spans, 0, 0, cells, 0)
        if why == rowscan.DONE:
            return Slab(path, rows, buf, cells[:, :count], _ONE_SPAN)
    found = rowscan.scan(buf, spans)
    if found.wrong:
        raise RemoteProtocolError(f"{path}: the bytes at {found.wrong[0][1]} are no row")
    return Slab(path, rows, buf, found.cells, _ONE_SPAN)


def replaces_control(slab: Slab, number: int) -> bool:
    """True if row `number` is a NOP in place of a control row: a transaction of one row with explicit TSN and COMMIT.

    A NOP in place of a void transaction looks as in real servers. A reader of the log must distinguish them: rows of a
    former owner after its own CONFIRM are kept, rows after a void transaction are not.
    """
    kind, single, flags, tsn, lsn = slab.cells[_MARKS, number].tolist()
    return kind == row_batches.NOP and not single and bool(flags & rowscan.COMMIT) and tsn == lsn


def journal_rows(slab: Slab, first: int, stop: int, timestamp: float) -> bytes:
    """Rows `first` to `stop` as our log has them: without packet lengths and SYNC, stamped with our own time."""
    if stop <= first:
        return b""
    out = _room(slab.cells, first, stop)
    size = row_batches.build_log_rows(slab.buf, slab.cells, first, stop, float_bits(timestamp), out)
    assert size >= 0, "the rows of a slab are in the order of their bytes"
    return out[:size].tobytes()


def stream_packets(slab: Slab, keep: NDArray[np.bool_] | None = None, *, sync: int = 0) -> bytes:
    """Rows as packets for a replica: all, or those that `keep` selects, each with `sync` unless that is 0.

    Local rows are never among them (those that old logs sign with a replica's id go as NOPs, for their LSN). What is
    left of a transaction is a transaction: its last row has the flags, and one that is left alone has no TSN.
    """
    count = len(slab)
    if not count:
        return b""
    chosen = row_batches.ALL
    if keep is not None:
        assert keep.shape == (count,), "one choice per row"
        chosen = np.ascontiguousarray(keep).view(np.uint8)
    out = _room(slab.cells, 0, count)
    signed_sync = sync - (sync >> 63 << 64)  # kernels take a number above 2^63 as its negative twin
    size = row_batches.build_packets(slab.buf, slab.cells, chosen, signed_sync, out)
    assert size >= 0, "the rows of a slab are in the order of their bytes"
    return out[:size].tobytes()


def _room(cells: Cells, first: int, stop: int) -> Bytes:
    """Room for rows in any form; they follow each other, so two offsets tell how many bytes their bodies have."""
    content = int(cells[rowscan.ROW_END, stop - 1]) - int(cells[rowscan.ROW_AT, first])
    return np.empty(row_batches.rows_bound(stop - first, max(content, 0)), np.uint8)
