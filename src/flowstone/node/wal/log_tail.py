"""The tail of the log in memory, shared by all relays: chunks of whole transactions, encoded once for all replicas.

The journal appends rows as they are written; all rows between two rounds of the relays form a chunk. The size is
limited: a relay whose position is before the first chunk reads files (`log_reader.py`). Connections are not used here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from flowstone.iproto import scan
from flowstone.iproto.slab import Slab
from flowstone.replication.limbo.control_rows import Demote, Promote, decode_control
from flowstone.replication.relay.relay_logic import PROMOTIONS, RowFilter
from flowstone.replication.row_stream import slab_of_rows, stream_packets
from flowstone.replication.vclock import VClock

TAIL_SIZE_MAX: Final = 64 * 1024 * 1024
"""Maximum size of all chunks in bytes; a relay that lags by more reads files."""


class TailChunk:
    """The rows of our log between two positions, and their packets for replicas."""

    __slots__ = ("_packets", "_promoted_term", "_rows", "_slab", "_tables", "after", "before", "number")

    def __init__(
        self, number: int, rows: bytes, before: VClock, after: VClock, tables: list[TailChunk] | None = None
    ) -> None:
        """The chunk appends itself to `tables` when it creates its slab, so that the owner can call `forget_slab`."""
        self.number = number
        self.before = before
        self.after = after
        self._rows = rows
        self._slab: Slab | None = None
        self._packets: bytes | None = None
        self._promoted_term = 0
        self._tables = tables

    @property
    def size(self) -> int:
        """The approximate size of rows and packets in bytes, without the slab."""
        return 2 * len(self._rows)

    @property
    def slab(self) -> Slab:
        if self._slab is None:
            self._slab = slab_of_rows(self._rows, "the log")
            self._promoted_term = promoted_term(self._slab)
            if self._tables is not None:
                self._tables.append(self)
        return self._slab

    @property
    def packets(self) -> bytes:
        """All rows except local ones, for replicas that get all of them; encoded once."""
        if self._packets is None:
            self._packets = self._lone_packet() or packets_of(self.slab)
        return self._packets

    def _lone_packet(self) -> bytes | None:
        """Return the packet of a single row, the usual case on an idle master; None if the rows have to be decoded."""
        rows, before = self._rows, self.before
        # The LSN of the row grew by one, so it is the only row, and it is global.
        if self.after.signature - before.signature != 1 or self.after.get(0) != before.get(0):
            return None
        # A row begins with the head of its header map, key 0 and the type.
        # Relays must send the term before a PROMOTE (docs/spec/replication.md#row-filter), so `promoted_term` has to be
        # known.
        if rows[1] != 0 or rows[2] in PROMOTIONS:
            return None
        return b"\xce" + len(rows).to_bytes(4, "big") + rows

    def packets_for(self, rows: RowFilter, sync: int) -> bytes:
        """Return the packets for one replica."""
        if not sync and rows.takes_all(self.before, self.after):
            return self.packets
        if rows.takes_nothing(self.before, self.after):
            return b""
        return packets_of(self.slab, rows, sync)

    @property
    def promoted_term(self) -> int:
        """The newest term of a PROMOTE or DEMOTE in the chunk, 0 if none; valid only after the packets were created."""
        return self._promoted_term

    def forget_slab(self) -> None:
        """Free the slab, which is larger than the rows and is rarely needed twice."""
        self._slab = None


def packets_of(slab: Slab, rows: RowFilter | None = None, sync: int = 0) -> bytes:
    """Return the packets of a slab of our log for a replica: the rows that `rows` keeps, without local ones."""
    return stream_packets(slab, None if rows is None else rows.keep(slab), sync=sync)


def promoted_term(slab: Slab) -> int:
    """Return the newest term of a PROMOTE or DEMOTE in the slab; 0 if there is none."""
    types = slab.cells[scan.TYPE]
    promote, demote = PROMOTIONS
    numbers = np.flatnonzero((types == promote) | (types == demote))
    terms = [0]
    for row in slab.rows(numbers) if len(numbers) else ():
        control = decode_control(row.type, row.body)
        if isinstance(control, Promote | Demote):
            terms.append(control.term)
    return max(terms)


class LogTail:
    """The numbered chunks. `end` is the number of the next one. `on_rows` is called when there are rows to seal."""

    def __init__(self, vclock: VClock, on_rows: Callable[[], None], *, size_max: int = TAIL_SIZE_MAX) -> None:
        self._chunks: deque[TailChunk] = deque()
        self._vclock = vclock
        self._rows: list[bytes] = []
        self._gathered = vclock
        self._on_rows = on_rows
        self._tables: list[TailChunk] = []
        self.size_max = size_max
        self.size = 0
        self.end = 0

    def append(self, rows: bytes, vclock: VClock) -> None:
        """Append rows that the journal has written; `vclock` is the position after them."""
        is_first = not self._rows
        self._rows.append(rows)
        self._gathered = vclock
        # Once per turn: rows of several writes of one turn become one chunk.
        if is_first:
            self._on_rows()

    def seal(self) -> None:
        """Make a chunk of the rows appended since the last call."""
        if self._rows:
            chunk = TailChunk(self.end, b"".join(self._rows), self._vclock, self._gathered, self._tables)
            self._chunks.append(chunk)
            self.size += chunk.size
            self._vclock = self._gathered
            self._rows = []
            self.end += 1

    def chunk(self, number: int) -> TailChunk | None:
        """Return the chunk; None if it was dropped, or does not exist yet."""
        place = number - self.end + len(self._chunks)
        return self._chunks[place] if 0 <= place < len(self._chunks) else None

    def find(self, known: VClock) -> int | None:
        """Return the number of the first chunk with rows after `known`; None if chunks before it were dropped."""
        # Everything is known. Rows that are gathered and not sealed yet become the chunk `end`.
        if self._vclock.without_zero() <= known:
            return self.end
        for chunk in reversed(self._chunks):
            if chunk.before.without_zero() <= known:
                return chunk.number
        return None

    def trim(self, needed: int) -> None:
        """Drop the chunks before number `needed`, and more if the size exceeds the limit."""
        chunks = self._chunks
        # A slow replica must not keep rows in memory; its relay reads files instead.
        while chunks and (chunks[0].number < needed or self.size > self.size_max):
            self.size -= chunks.popleft().size
        for chunk in self._tables:
            chunk.forget_slab()
        self._tables.clear()
