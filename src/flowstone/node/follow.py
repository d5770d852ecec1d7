"""`flowstone.follow`: a replica of a running server inside a program, with an event loop or without one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from flowstone.errors import LocalProtocolError
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node.replica import OnChange, OnResync, Replica
from flowstone.node.replica_blocking import BlockingReplica
from flowstone.outside import Outside, production
from flowstone.outside.loop_thread import LoopThread


def follow(
    uri: str,
    *,
    spaces: Collection[str | int] | None = None,
    on_change: OnChange | None = None,
    on_resync: OnResync | None = None,
    connect_timeout: float = 10.0,
    replication_timeout: float = 1.0,
    outside: Outside | None = None,
) -> Following:
    """Follows the server at `uri`: a read-only copy of its data in this program's memory, kept up to date.

        async with flowstone.follow("replicator:secret@db1:3301", spaces=["orders"]) as replica:
            order = replica.space("orders").get(42)                     # costs little more than a look into a dict
            late = replica.space("orders").index("by_status").select("late")
            await replica.wait_for({1: 1000}, timeout=5)                # until we have what was written there

            @replica.on_change
            def changed(changes):                                       # one settled transaction
                for change in changes:
                    print(change.space, change.type, change.key, change.old, change.new)

    In a program without an event loop it is `with flowstone.follow(…) as replica`, with the same methods as plain
    calls, from any thread. The user needs the role `replication` there.

    `spaces`, names or ids, are all that is kept; a space that gets one of the names later is followed, too. Only what
    is settled is shown: a synchronous transaction from its CONFIRM on. The server sees an anonymous replica that never
    completes a quorum. A lost connection is made again for as long as the block lasts; `connect_timeout` seconds are
    for the first one, whose failure is one error, CannotFollow. `replication_timeout` should be the server's own: after
    four times as long without a word from it the connection counts as lost. Where the server has no more the logs that
    we need, its new snapshot takes the place of the data in one moment, and `on_resync` is told.
    """
    place = parse_uri(uri)
    if isinstance(spaces, str | bytes | int):
        raise LocalProtocolError(f"spaces is {spaces!r}, no list", hint=f"write spaces=[{spaces!r}]")

    def make(guard: AbstractContextManager[Any] | None) -> Replica:
        return Replica(
            outside if outside is not None else production(),
            place,
            spaces=spaces,
            on_change=() if on_change is None else (on_change,),
            on_resync=() if on_resync is None else (on_resync,),
            connect_timeout=connect_timeout,
            replication_timeout=replication_timeout,
            guard=guard,
        )

    return Following(place, make)


class Following:
    """What `follow` gives: the block of an `async with` or of a `with` is how long the server is followed."""

    def __init__(self, uri: Uri, make: Callable[[AbstractContextManager[Any] | None], Replica]) -> None:
        self._uri = uri
        self._make = make
        self._replica: Replica | None = None
        self._thread: LoopThread | None = None

    async def __aenter__(self) -> Replica:
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
        self._check_unused()
        thread = self._thread = LoopThread("flowstone-follow")
        replica = self._replica = self._make(thread.lock)
        try:
            thread.run(replica.start())
        except BaseException:
            thread.close()
            raise
        return BlockingReplica(replica, thread, self._uri)

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
            raise LocalProtocolError("this has been used already", hint="call follow again")
