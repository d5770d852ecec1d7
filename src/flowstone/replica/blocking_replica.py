"""A replica for programs without an event loop: `with flowstone.follow(…) as replica`.

The replica runs in an event loop in its own thread. Reads run in the caller's thread, under the lock that the loop
holds while it applies a transaction, so each read sees whole transactions. All other calls run in the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from flowstone.box.tuples import Tuple
from flowstone.iproto.uri import Uri
from flowstone.node.changes import SettledChange
from flowstone.node.spaces import Index, Space
from flowstone.outside.loop_thread import LoopThread
from flowstone.replica.change_stream import BUFFER_TRANSACTIONS, ChangeStream
from flowstone.replica.replica import OnChange, OnResync, OnState, Replica, read_only
from flowstone.replication.vclock import VClock


class BlockingIndex:
    """An index of a replica, for reading from any thread: `replica.space("orders").index("by_status")`.

    It reads like `flowstone.Index`; methods that change data raise error 7 (ER_READONLY).
    """

    def __init__(self, index: Index, lock: AbstractContextManager[Any], members: tuple[Uri, ...]) -> None:
        self._index = index
        self._lock = lock
        self._members = members

    def get(self, key: Any) -> Tuple | None:
        """Return the tuple with this key of a unique index; None if there is none."""
        with self._lock:
            return self._index.get(key)

    def select(self, key: Any = (), **options: Any) -> list[Tuple]:
        """Return the tuples that match `key`.

        Args:
            key: As for `Index.select`.
            options: As for `Index.select`.

        Raises:
            TarantoolError: An argument does not fit the index.
        """
        with self._lock:
            return self._index.select(key, **options)

    def count(self, key: Any = (), *, iterator: str | int = "EQ") -> int:
        """Return the number of tuples that `select` would return."""
        with self._lock:
            return self._index.count(key, iterator=iterator)

    def min(self, key: Any = ()) -> Tuple | None:
        """Return the first tuple that matches `key`, in the order of the index; None if there is none."""
        with self._lock:
            return self._index.min(key)

    def max(self, key: Any = ()) -> Tuple | None:
        """Return the last tuple that matches `key`, in the order of the index; None if there is none."""
        with self._lock:
            return self._index.max(key)

    @property
    def name(self) -> str:
        """The name of the index, or of the space."""
        with self._lock:
            return self._index.name

    def __len__(self) -> int:
        with self._lock:
            return len(self._index)

    def __iter__(self) -> Iterator[Tuple]:
        """Iterate over all tuples of this moment, in the order of the index."""
        return iter(self.select(iterator="ALL"))

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def __repr__(self) -> str:
        return repr(self._index)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise error 7 (ER_READONLY): a replica cannot be changed."""
        raise read_only(*self._members)

    update = delete = _refuse


class BlockingSpace(BlockingIndex):
    """A space of a replica, for reading from any thread: `replica.space("orders")`.

    It reads like `flowstone.Space`, by the primary index; methods that change data raise error 7 (ER_READONLY).
    """

    _index: Space

    def __init__(self, space: Space, lock: AbstractContextManager[Any], members: tuple[Uri, ...]) -> None:
        super().__init__(space, lock, members)

    @property
    def id(self) -> int:
        """The id of the space."""
        return self._index.id

    @property
    def format(self) -> tuple[dict[str, Any], ...]:
        """The fields of the format: `name`, `type` and `is_nullable` of each."""
        with self._lock:
            return self._index.format

    @property
    def indexes(self) -> dict[str, BlockingIndex]:
        """All indexes, by name."""
        with self._lock:
            found = self._index.indexes
        return {name: BlockingIndex(index, self._lock, self._members) for name, index in found.items()}

    def index(self, index: str | int) -> BlockingIndex:
        """Return the index with this name or id.

        Raises:
            TarantoolError: The index does not exist (error 35 or 148, ER_NO_SUCH_INDEX_…).
        """
        with self._lock:
            return BlockingIndex(self._index.index(index), self._lock, self._members)

    def random(self, number: int) -> Tuple | None:
        """Return the tuple at position `number`, modulo the number of tuples; None if the space is empty."""
        with self._lock:
            return self._index.random(number)

    insert = replace = upsert = BlockingIndex._refuse
    create_index = drop_index = truncate = drop = rename = set_format = BlockingIndex._refuse


class BlockingReplica:
    """A read-only copy of the data of a replica set, which `with flowstone.follow(…)` returns.

    It has the methods of `Replica` as plain calls, which may be called from any thread. Reads see only settled
    transactions, and the position only moves forward. Triggers are called in the replica's own thread, once per
    transaction; a trigger may read, but other methods wait for that thread and raise LocalProtocolError in a trigger.

    Example:
        with flowstone.follow("replicator:secret@db1:3301") as replica:
            orders = replica.space("orders")
            print(orders.get(42), len(orders), replica.vclock)
    """

    def __init__(self, replica: Replica, thread: LoopThread, members: tuple[Uri, ...]) -> None:
        self._replica = replica
        self._thread = thread
        self._members = members

    def space(self, space: str | int) -> BlockingSpace:
        """Return the space with this name or id, for reading.

        Its methods that change data raise error 7 (ER_READONLY).

        Raises:
            TarantoolError: The space does not exist or is not followed (error 36, ER_NO_SUCH_SPACE).
        """
        with self._thread.lock:
            return BlockingSpace(self._replica.space(space), self._thread.lock, self._members)

    @property
    def vclock(self) -> VClock:
        """The settled position: rows up to it are visible and can no longer be rolled back."""
        with self._thread.lock:
            return self._replica.vclock

    @property
    def upstream(self) -> str:
        """The address of the member that the replica follows or, while it follows none, tries next."""
        return self._replica.upstream

    @property
    def lag(self) -> float:
        """Seconds since the replica was last known to be in sync; see `Replica.lag`."""
        return self._replica.lag

    def check_fresh(self, max_lag: float) -> None:
        """Raise an error if `lag` is greater than `max_lag`; see `Replica.check_fresh`.

        Args:
            max_lag: Seconds; should be at least twice the `replication_timeout` of the server.

        Raises:
            StaleReplica: The replica may lack changes that are older than `max_lag`.
        """
        self._replica.check_fresh(max_lag)

    def info(self) -> dict[str, Any]:
        """Return `uuid` and `vclock` of the replica, and the state of its connection; see `Replica.info`."""

        async def ask() -> dict[str, Any]:
            return self._replica.info()

        return self._thread.run(ask())

    def wait_for(self, vclock: VClock | Mapping[int, int], *, timeout: float | None = None) -> None:
        """Wait until the replica is at `vclock` or later.

        Args:
            vclock: The position, such as the `box.info.vclock` of the server after a write.
            timeout: Seconds to wait; None: no limit.

        Raises:
            NotReached: The replica is not there after `timeout` seconds.
            CannotFollow: The replica is stopped.
            VClockError: `vclock` is not a vclock.
        """
        self._thread.run(self._replica.wait_for(vclock, timeout=timeout))

    def on_change(self, trigger: OnChange) -> OnChange:
        """Call `trigger` with the list of changes of each transaction that is settled from now on.

        Returns:
            `trigger`, so that the method can be used as a decorator.
        """

        async def add() -> OnChange:
            return self._replica.on_change(trigger)

        return self._thread.run(add())

    def on_resync(self, trigger: OnResync) -> OnResync:
        """Call `trigger` with the positions before and after, each time a snapshot replaces the data.

        `on_change` does not report the changes between the two positions.

        Returns:
            `trigger`, so that the method can be used as a decorator.
        """

        async def add() -> OnResync:
            return self._replica.on_resync(trigger)

        return self._thread.run(add())

    def on_state(self, trigger: OnState) -> OnState:
        """Call `trigger` with a `ReplicaState` when the replica is in sync with a member, and when it loses it.

        Returns:
            `trigger`, so that the method can be used as a decorator.
        """

        async def add() -> OnState:
            return self._replica.on_state(trigger)

        return self._thread.run(add())

    def changes(self, *, buffer: int = BUFFER_TRANSACTIONS) -> Iterator[list[SettledChange]]:
        """Return an iterator over the transactions that are settled from now on; see `Replica.changes`.

        Args:
            buffer: The number of transactions to keep for the reader.

        Returns:
            The iterator. It blocks until the next transaction, and raises ChangesMissed or CannotFollow, as the
            iterator of `Replica.changes` does.
        """

        async def open_stream() -> ChangeStream:
            return self._replica.changes(buffer=buffer)

        return self._read(self._thread.run(open_stream()))

    def _read(self, stream: ChangeStream) -> Iterator[list[SettledChange]]:
        async def read() -> list[SettledChange] | None:
            return await anext(stream, None)

        while (changes := self._thread.run(read())) is not None:
            yield changes
