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

    __slots__ = ("_packets", "_promoted_term", "_rows", "_slab", "after", "before", "number")

    def __init__(self, number: int, rows: bytes, before: VClock, after: VClock) -> None:
        self.number = number
        self.before = before
        self.after = after
        self._rows = rows
        self._slab: Slab | None = None
        self._packets: bytes | None = None
        self._promoted_term = 0

    @property
    def size(self) -> int:
        """Bytes that it holds, without what `forget_slab` lets go of."""
        return len(self._rows) + len(self._packets or b"")

    @property
    def slab(self) -> Slab:
        if self._slab is None:
            self._slab = slab_of_rows(self._rows, "the log")
        return self._slab

    @property
    def packets(self) -> bytes:
        """All rows but the local ones, for replicas that take all; made once."""
        if self._packets is None:
            self._packets = packets_of(self.slab)
            self._promoted_term = promoted_term(self.slab)
        return self._packets

    def packets_for(self, rows: RowFilter, sync: int) -> bytes:
        """The rows that one replica gets."""
        if not sync and rows.takes_all(self.before, self.after):
            return self.packets
        self._promoted_term = promoted_term(self.slab)
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
    numbers = np.flatnonzero(np.isin(slab.cells[scan.TYPE], PROMOTIONS))
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
        self.size_max = size_max
        self.end = 0

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self._chunks)

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
            self._chunks.append(Chunk(self.end, b"".join(self._rows), self._vclock, self._gathered))
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
        while chunks and chunks[0].number < needed:
            chunks.popleft()
        size = self.size
        while chunks and size > self.size_max:
            size -= chunks.popleft().size
        for chunk in chunks:
            chunk.forget_slab()
