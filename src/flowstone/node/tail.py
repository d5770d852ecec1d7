"""The newest part of the log in memory, for relays: chunks of whole transactions, framed once for all who take all.

Fed by the journal with what is written; what gathers until the relays look is one chunk. Bounded in bytes: whoever is
behind its first chunk reads the files (`log_reader.py`). Knows nothing of connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from flowstone.iproto import scan
from flowstone.replication.relay import PROMOTIONS, RowFilter
from flowstone.replication.row_stream import slab_of_rows, stream_packets
from flowstone.replication.synchro import Demote, Promote, decode_control
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import Slab

TAIL_SIZE_MAX: Final = 64 * 1024 * 1024


class Chunk:
    """Rows of our log between two positions, and the packets that they are to a replica."""

    __slots__ = ("_packets", "_promoted_term", "_rows", "_slab", "_tables", "after", "before", "number")

    def __init__(
        self, number: int, rows: bytes, before: VClock, after: VClock, tables: list[Chunk] | None = None
    ) -> None:
        """`tables` gets the chunk when it has tabulated its rows: somebody should soon let it forget that."""
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
        """About the bytes of the rows and of the packets, without what `forget_slab` lets go of."""
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
        """All rows but the local ones, for replicas that take all; made once."""
        if self._packets is None:
            self._packets = self._lone_packet() or packets_of(self.slab)
        return self._packets

    def _lone_packet(self) -> bytes | None:
        """The packet of a lone row, which a master that is not busy has most of the time; None if it needs a look."""
        rows, before = self._rows, self.before
        if self.after.signature - before.signature != 1 or self.after.get(0) != before.get(0):
            return None
        # A row begins with the head of its header map, key 0 and the type.
        if rows[1] != 0 or rows[2] in PROMOTIONS:
            return None
        return b"\xce" + len(rows).to_bytes(4, "big") + rows

    def packets_for(self, rows: RowFilter, sync: int) -> bytes:
        """The rows that one replica gets."""
        if not sync and rows.takes_all(self.before, self.after):
            return self.packets
        if rows.takes_nothing(self.before, self.after):
            return b""
        return packets_of(self.slab, rows, sync)

    @property
    def promoted_term(self) -> int:
        """The newest term in which the queue changed hands here, known once there are packets; 0: it did not."""
        return self._promoted_term

    def forget_slab(self) -> None:
        """The table of rows is larger than the rows; nearly always one look at it was enough."""
        self._slab = None


def packets_of(slab: Slab, rows: RowFilter | None = None, sync: int = 0) -> bytes:
    """The packets that a slab of our log is to a replica: all rows that `rows` keeps, never local ones."""
    return stream_packets(slab, None if rows is None else rows.keep(slab), sync=sync)


def promoted_term(slab: Slab) -> int:
    """The newest term of a PROMOTE or DEMOTE in the slab."""
    types = slab.cells[scan.TYPE]
    promote, demote = PROMOTIONS
    numbers = np.flatnonzero((types == promote) | (types == demote))
    terms = [0]
    for row in slab.rows(numbers) if len(numbers) else ():
        control = decode_control(row.type, row.body)
        if isinstance(control, Promote | Demote):
            terms.append(control.term)
    return max(terms)


class Tail:
    """The chunks, numbered; `end` is the number of the next. `on_rows` is called when there is something to seal."""

    def __init__(self, vclock: VClock, on_rows: Callable[[], None], *, size_max: int = TAIL_SIZE_MAX) -> None:
        self._chunks: deque[Chunk] = deque()
        self._vclock = vclock
        self._rows: list[bytes] = []
        self._gathered = vclock
        self._on_rows = on_rows
        self._tables: list[Chunk] = []
        self.size_max = size_max
        self.size = 0
        self.end = 0

    def append(self, rows: bytes, vclock: VClock) -> None:
        """Told by the journal what it has written, and where it is then."""
        is_first = not self._rows
        self._rows.append(rows)
        self._gathered = vclock
        if is_first:
            self._on_rows()

    def seal(self) -> None:
        """Makes a chunk of what has gathered."""
        if self._rows:
            chunk = Chunk(self.end, b"".join(self._rows), self._vclock, self._gathered, self._tables)
            self._chunks.append(chunk)
            self.size += chunk.size
            self._vclock = self._gathered
            self._rows = []
            self.end += 1

    def chunk(self, number: int) -> Chunk | None:
        """The chunk; None if it is too old, or not there yet."""
        place = number - self.end + len(self._chunks)
        return self._chunks[place] if 0 <= place < len(self._chunks) else None

    def find(self, known: VClock) -> int | None:
        """The number of the first chunk that has news for who knows `known`; None: what comes before it is gone."""
        if self._vclock.without_zero() <= known:
            return self.end
        for chunk in reversed(self._chunks):
            if chunk.before.without_zero() <= known:
                return chunk.number
        return None

    def trim(self, needed: int) -> None:
        """Drops the chunks before number `needed`, and as many more as are too much."""
        chunks = self._chunks
        while chunks and (chunks[0].number < needed or self.size > self.size_max):
            self.size -= chunks.popleft().size
        for chunk in self._tables:
            chunk.forget_slab()
        self._tables.clear()
