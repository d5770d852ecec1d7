"""A replica for programs without an event loop: `with flowstone.follow(…) as replica`.

The replica lives in a loop in a thread of its own. Reads are made in the caller's thread, under the lock that the loop
holds while a transaction is applied, so each sees whole transactions; everything else is handed over to the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from flowstone.iproto.uri import Uri
from flowstone.node.replica import OnChange, OnResync, Replica, read_only
from flowstone.node.spaces import Index, Space
from flowstone.node.tuples import Tuple
from flowstone.outside.loop_thread import LoopThread
from flowstone.replication.vclock import VClock


class BlockingIndex:
    """An index of a replica, for reading: as `flowstone.Index`, from any thread."""

    def __init__(self, index: Index, lock: AbstractContextManager[Any], uri: Uri) -> None:
        self._index = index
        self._lock = lock
        self._uri = uri

    def get(self, key: Any) -> Tuple | None:
        """The tuple with this key of a unique index; None if there is none."""
        with self._lock:
            return self._index.get(key)

    def select(self, key: Any = (), **options: Any) -> list[Tuple]:
        """The tuples that match `key`, all for an empty one; options are `iterator`, `limit`, `offset`, `after`."""
        with self._lock:
            return self._index.select(key, **options)

    def count(self, key: Any = (), *, iterator: str | int = "EQ") -> int:
        """How many tuples `select` would give."""
        with self._lock:
            return self._index.count(key, iterator=iterator)

    def min(self, key: Any = ()) -> Tuple | None:
        """The first of the tuples that match `key`, in the order of the index."""
        with self._lock:
            return self._index.min(key)

    def max(self, key: Any = ()) -> Tuple | None:
        """The last of the tuples that match `key`."""
        with self._lock:
            return self._index.max(key)

    @property
    def name(self) -> str:
        with self._lock:
            return self._index.name

    def __len__(self) -> int:
        with self._lock:
            return len(self._index)

    def __iter__(self) -> Iterator[Tuple]:
        """All tuples, in the order of the index, as of now."""
        return iter(self.select(iterator="ALL"))

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def __repr__(self) -> str:
        return repr(self._index)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Nothing can be changed here."""
        raise read_only(self._uri)

    update = delete = _refuse


class BlockingSpace(BlockingIndex):
    """A space of a replica, for reading: as `flowstone.Space`, from any thread."""

    _index: Space

    def __init__(self, space: Space, lock: AbstractContextManager[Any], uri: Uri) -> None:
        super().__init__(space, lock, uri)

    @property
    def id(self) -> int:
        return self._index.id

    @property
    def format(self) -> tuple[dict[str, Any], ...]:
        """The fields of the format."""
        with self._lock:
            return self._index.format

    @property
    def indexes(self) -> dict[str, BlockingIndex]:
        """Handles of all indexes, by name."""
        with self._lock:
            found = self._index.indexes
        return {name: BlockingIndex(index, self._lock, self._uri) for name, index in found.items()}

    def index(self, index: str | int) -> BlockingIndex:
        """The index with this name or id."""
        with self._lock:
            return BlockingIndex(self._index.index(index), self._lock, self._uri)

    def random(self, number: int) -> Tuple | None:
        """The tuple at position `number` of the primary index, modulo their count."""
        with self._lock:
            return self._index.random(number)

    insert = replace = upsert = BlockingIndex._refuse
    create_index = drop_index = truncate = drop = rename = set_format = BlockingIndex._refuse


class BlockingReplica:
    """What `with flowstone.follow(…)` gives: spaces to read, at a position that only moves forward.

    All that is seen is settled. Triggers are called in the replica's own thread, transaction by transaction.
    """

    def __init__(self, replica: Replica, thread: LoopThread, uri: Uri) -> None:
        self._replica = replica
        self._thread = thread
        self._uri = uri

    def space(self, space: str | int) -> BlockingSpace:
        """The space with this name or id, to be read; a change is refused with error 7."""
        with self._thread.lock:
            return BlockingSpace(self._replica.space(space), self._thread.lock, self._uri)

    @property
    def vclock(self) -> VClock:
        """The settled position: everything up to here can be read, and will not be taken back."""
        with self._thread.lock:
            return self._replica.vclock

    def info(self) -> dict[str, Any]:
        """Who and where we are; `upstream` has its status, lag and idle time."""

        async def ask() -> dict[str, Any]:
            return self._replica.info()

        return self._thread.run(ask())

    def wait_for(self, vclock: VClock | Mapping[int, int], *, timeout: float | None = None) -> None:
        """Returns when everything up to `vclock` is here; NotReached when `timeout` seconds have passed."""
        self._thread.run(self._replica.wait_for(vclock, timeout=timeout))

    def on_change(self, trigger: OnChange) -> OnChange:
        """From now on calls `trigger` with the changes of every transaction that is settled. A decorator, too."""

        async def add() -> OnChange:
            return self._replica.on_change(trigger)

        return self._thread.run(add())

    def on_resync(self, trigger: OnResync) -> OnResync:
        """From now on calls `trigger` with the positions before and after, when a snapshot replaced the data."""

        async def add() -> OnResync:
            return self._replica.on_resync(trigger)

        return self._thread.run(add())
