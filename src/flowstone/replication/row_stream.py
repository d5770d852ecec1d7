"""Rows in bulk: bytes from a peer to slabs of whole transactions, and slabs to log rows and packets.

Pure: it uses no socket and no clock. `RowStream` takes the bytes of a connection and limits how many it buffers. The
functions after it convert rows to what is written or sent next, with their bodies unchanged. The passes over the bytes
are in `iproto/row_batches.py`.
"""

from __future__ import annotations

from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import RemoteProtocolError
from flowstone.iproto import row_batches, row_scanner
from flowstone.iproto import scan as rowscan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.iproto.packet import PacketError, decode_response, span
from flowstone.iproto.row_batch_kernels import build_log_rows, build_packets
from flowstone.iproto.row_batches import AT, NEEDED, ROWS, WHOLE_AT, WHOLE_ROWS
from flowstone.iproto.scan import Bytes, Cells
from flowstone.iproto.scan_kernels import scan_packets, scan_spans
from flowstone.iproto.slab import Slab
from flowstone.xlog.block import TRANSACTION_SIZE_MAX

ROWS_MAX: Final = 16384
"""Rows of one slab, unless a single transaction has more: applying them takes some milliseconds."""

REPLY_SIZE_MAX: Final = 1024**2
"""Bytes of a packet before rows are due: ballots and errors are small, and the peer may be any process."""

TRANSACTION_ROWS_MAX: Final = 4 * 1024**2
"""Rows of one transaction: millions of short rows would exhaust memory, because the table takes 168 bytes per row.

Tarantool has no such limit, but a transaction of this size takes minutes there, too.
"""

_ROOM: Final = 64
"""Initial columns of the table, one per row."""

_SMALL: Final = 4096
"""Up to this number of bytes, a table for the largest possible number of rows is cheaper than counting the rows."""

_HINT: Final = "check that a Tarantool server runs there, then restart replication from it"

_WHAT: Final = {
    row_batches.BAD_ROW: "a packet that is not a row",
    row_batches.BAD_REPLICA_ID: "invalid replica id",
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
    """`peer` sent `what`, which is invalid. The rest of the stream cannot be decoded."""

    def __init__(self, peer: str, what: str) -> None:
        super().__init__(f"{peer} sent {what}", hint=_HINT)
        self.peer = peer
        self.what = what


class RowStream:
    """The bytes of one connection, taken packet by packet or in slabs of whole transactions.

    Each byte is scanned once, however the stream is split: the rows of an incomplete transaction stay in the table.
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
        """The number of buffered bytes: not taken yet, or part of an incomplete packet or transaction."""
        return len(self._unread)

    def feed(self, data: bytes) -> None:
        """Append bytes received from the connection."""
        self._unread += data

    def take_packet(self) -> bytes | None:
        """Return the next packet, undecoded and without its length. Used for replies that precede the rows. None if
        incomplete."""
        found = self._packet_at(0)
        if found is None:
            return None
        packet, end = found
        del self._unread[:end]
        self._progress[:] = 0  # rows of an incomplete transaction, if any, are scanned again
        self._needed = 1
        return packet

    def take(self, *, rows_max: int = ROWS_MAX) -> Slab | None:
        """Return all complete transactions received, as one slab of packets; None if there is none yet.

        The slab has at most `rows_max` rows, or up to twice the rows of a transaction that has more. After the rows
        before it are taken, an error packet raises the error it contains; a packet that is not a row, or violates a
        transaction, raises StreamError.
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
        """Scan the received bytes into the table: up to `rows_max` rows, or more until a transaction is complete."""
        while True:
            room = min(self._cells.shape[1], rows_max)
            # A bytearray cannot grow while an array refers to it, so the array is not kept in a variable.
            why = scan_packets(
                np.frombuffer(self._unread, np.uint8),
                self._cells,
                room,
                self.packet_size_max,
                self._transaction_size_max,
                self._progress,
            )
            if why != rowscan.FULL:
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
        """Remove the first `count` rows, which end at byte `end`, from the table and the bytes; return them."""
        progress, cells = self._progress, self._cells
        payload = bytes(memoryview(self._unread)[:end])
        del self._unread[:end]
        table = cells[:, :count].copy()
        left = int(progress[ROWS]) - count
        if left:
            cells[:, :left] = cells[:, count : count + left]
            for line in _OFFSETS:
                offsets = cells[line, :left]
                offsets[offsets >= 0] -= end
        if cells.shape[1] > 4 * ROWS_MAX and left < _ROOM:
            self._cells = cells[:, :_ROOM].copy()  # release the table of a large transaction
        progress[AT] -= end
        progress[ROWS] = left
        progress[WHOLE_AT] = progress[WHOLE_ROWS] = 0
        self._needed = 1
        return Slab(self.peer, payload, np.frombuffer(payload, np.uint8), table, _ONE_SPAN)

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
            what = f"row {lsn} of replica {replica_id}: {what}"
        raise StreamError(self.peer, what)

    def _packet_at(self, at: int) -> tuple[bytes, int] | None:
        """Return the packet at offset `at` and its end offset; None if it is incomplete."""
        unread = self._unread
        if at >= len(unread):
            return None
        try:
            start, end = span(unread, at, self.packet_size_max)
        except PacketError as error:
            raise StreamError(self.peer, f"an invalid packet: {error.message}") from None
        return (bytes(unread[start:end]), end) if end <= len(unread) else None


def slab_of_rows(rows: bytes, path: str) -> Slab:
    """Return a slab of log rows: whole transactions, concatenated without packet lengths."""
    buf: Bytes = np.frombuffer(rows, np.uint8)
    spans: Cells = np.array([[0, len(rows)]], np.int64)
    if len(rows) <= _SMALL:
        cells: Cells = np.empty((rowscan.LINES, len(rows) // row_scanner.ROW_SIZE_MIN + 2), np.int64)
        _, _, count, why = scan_spans(buf, spans, 0, 0, cells, 0)
        if why == rowscan.DONE:
            return Slab(path, rows, buf, cells[:, :count], _ONE_SPAN)
    found = row_scanner.scan(buf, spans)
    if found.wrong:
        raise RemoteProtocolError(f"{path}: invalid row at byte {found.wrong[0][1]}")
    return Slab(path, rows, buf, found.cells, _ONE_SPAN)


def replaces_control(slab: Slab, number: int) -> bool:
    """True if row `number` is a NOP in place of a control row: a transaction of one row with explicit TSN and COMMIT.

    A NOP in place of a void transaction has the form of real servers. A reader of the log must tell them apart:
    rows of a former owner after its own CONFIRM are kept, rows after a void transaction are not.
    """
    kind, single, flags, tsn, lsn = slab.cells[_MARKS, number].tolist()
    return kind == RequestType.NOP and not single and bool(flags & rowscan.COMMIT) and tsn == lsn


def journal_rows(slab: Slab, first: int, stop: int, timestamp: float) -> bytes:
    """Encode rows `first` up to `stop` for our log: without packet lengths and SYNC, with our own timestamp."""
    if stop <= first:
        return b""
    out = _room(slab.cells, first, stop)
    size = build_log_rows(slab.buf, slab.cells, first, stop, timestamp, out)
    assert size >= 0, "the rows of a slab are in the order of their bytes"
    return out[:size].tobytes()


def stream_packets(slab: Slab, keep: NDArray[np.bool_] | None = None, *, sync: int = 0) -> bytes:
    """Encode rows as packets for a replica: all rows, or the rows that `keep` selects, each with `sync` unless it is 0.

    Local rows are never sent; local rows with a replica id, as in old logs, are sent as NOPs to keep their LSN. The
    rest of a filtered transaction is a valid transaction: its last row gets the flags, and a single row has no TSN.
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
    size = build_packets(slab.buf, slab.cells, chosen, signed_sync, out)
    assert size >= 0, "the rows of a slab are in the order of their bytes"
    return out[:size].tobytes()


def _room(cells: Cells, first: int, stop: int) -> Bytes:
    """Allocate a buffer for the rows in any encoding; rows are contiguous, so two offsets give their size."""
    content = int(cells[rowscan.ROW_END, stop - 1]) - int(cells[rowscan.ROW_AT, first])
    return np.empty(row_batches.rows_bound(stop - first, max(content, 0)), np.uint8)
