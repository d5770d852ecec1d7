"""`flowstone.follow`: a replica of a running server inside a program, with or without an event loop.

Only creates the replica and starts its event loop; `replica.py` and `blocking_replica.py` are the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from flowstone.errors import LocalProtocolError
from flowstone.iproto.uri import Uri, parse_members
from flowstone.outside import Outside, production
from flowstone.outside.loop_thread import LoopThread
from flowstone.replica.blocking_replica import BlockingReplica
from flowstone.replica.replica import OnChange, OnResync, OnState, Replica


def follow(
    uri: str | Iterable[str],
    *,
    spaces: Collection[str | int] | None = None,
    on_change: OnChange | None = None,
    on_resync: OnResync | None = None,
    on_state: OnState | None = None,
    connect_timeout: float = 10.0,
    replication_timeout: float = 1.0,
    outside: Outside | None = None,
) -> Following:
    """Follow a server or a replica set: keep a read-only copy of its data in this program's memory.

    Only settled transactions are visible, a synchronous one after its CONFIRM. The server sees an anonymous replica
    that acknowledges only settled rows, and so never completes a quorum. If the connection is lost, the replica
    continues with the next member in the list, at its settled position: each settled transaction is reported once, in
    order. It tries all members in turn until the block ends. If no member has the logs that the replica needs, a new
    snapshot replaces the data at once, and `on_resync` is called. A program without an event loop uses `with` instead
    of `async with`: that replica has the same methods as plain calls, which may be called from any thread.

    Args:
        uri: Address of the server, or the addresses of several members of one replica set: a list, or one string with
            commas between them. Their users need the role `replication`.
        spaces: Follow only these spaces, by name or id; a space that gets one of the names later is followed, too.
        on_change: Trigger for the changes of each settled transaction, as `Replica.on_change`.
        on_resync: Trigger for snapshots that replace the data, as `Replica.on_resync`.
        on_state: Trigger for the loss of the upstream and for a new upstream, as `Replica.on_state`.
        connect_timeout: Seconds until the first data must arrive from a member.
        replication_timeout: The `replication_timeout` of the server. A connection counts as lost after four times this
            time without a message.
        outside: The door to network and clock; for tests.

    Returns:
        A context manager. `async with` yields a `Replica`, `with` yields a `BlockingReplica`. Entering it raises
        CannotFollow if every member is unreachable or rejects the replica.

    Raises:
        UriError: `uri` is not a valid address, or list of addresses.
        LocalProtocolError: `spaces` is not a list.

    Example:
        members = "replicator:secret@db1:3301,replicator:secret@db2:3301"
        async with flowstone.follow(members, spaces=["orders"]) as replica:
            order = replica.space("orders").get(42)                     # costs little more than a dict lookup
            late = replica.space("orders").index("by_status").select("late")
            await replica.wait_for({1: 1000}, timeout=5)                # until the replica is at this position

            @replica.on_change
            def changed(changes):                                       # one settled transaction
                for change in changes:
                    print(change.space, change.type, change.key, change.old, change.new)
    """
    members = parse_members(uri)
    if isinstance(spaces, str | bytes | int):
        raise LocalProtocolError(f"spaces must be a list, not {spaces!r}", hint=f"write spaces=[{spaces!r}]")

    def make(guard: AbstractContextManager[Any] | None) -> Replica:
        return Replica(
            outside if outside is not None else production(),
            *members,
            spaces=spaces,
            on_change=() if on_change is None else (on_change,),
            on_resync=() if on_resync is None else (on_resync,),
            on_state=() if on_state is None else (on_state,),
            connect_timeout=connect_timeout,
            replication_timeout=replication_timeout,
            guard=guard,
        )

    return Following(members, make)


class Following:
    """The context manager that `follow` returns: the server is followed until the `async with` or `with` block ends."""

    def __init__(self, members: tuple[Uri, ...], make: Callable[[AbstractContextManager[Any] | None], Replica]) -> None:
        self._members = members
        self._make = make
        self._replica: Replica | None = None
        self._thread: LoopThread | None = None

    async def __aenter__(self) -> Replica:
        """Start the replica and return it when it has data.

        Raises:
            CannotFollow: The server is unreachable or rejects the replica.
            LocalProtocolError: This result of `follow` was already used.
        """
        self._check_unused()
        replica = self._replica = self._make(None)
        await replica.start()
        return replica

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._replica is not None
        await self._replica.stop()

    def __enter__(self) -> BlockingReplica:
        """Start the replica, with an event loop in a new thread, and return it when it has data.

        Raises:
            CannotFollow: The server is unreachable or rejects the replica.
            LocalProtocolError: This result of `follow` was already used.
        """
        self._check_unused()
        thread = self._thread = LoopThread("flowstone-follow")
        replica = self._replica = self._make(thread.lock)
        try:
            thread.run(replica.start())
        except BaseException:
            thread.close()
            raise
        return BlockingReplica(replica, thread, self._members)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._replica is not None
        assert self._thread is not None
        try:
            self._thread.run(self._replica.stop())
        finally:
            self._thread.close()

    def _check_unused(self) -> None:
        if self._replica is not None:
            raise LocalProtocolError("result of follow was already used", hint="call follow again")
