"""A network whose sends count as operations of its machine's disk.

One number thus chooses the moment at which a process dies: at a write, a sync or a send, or in the middle of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flowstone.outside import Client, Listener, Network, Receiver, Stream, Tls
from flowstone.outside.network import BACKLOG, DEFAULT_OPTIONS, SocketOptions
from tests.simulation.disk import Inode, Storage

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Outgoing(Inode):
    """The part of a send that leaves if the process dies during it."""

    def __init__(self, write: Callable[[Buffer], None]) -> None:
        super().__init__()
        self._write = write

    def append(self, data: bytes) -> None:
        self._write(data)


class CountedNetwork:
    """A Network whose sends are operations of the machine."""

    def __init__(self, network: Network, storage: Storage) -> None:
        self._network = network
        self._storage = storage

    async def connect(
        self,
        host: str,
        port: int | None,
        *,
        timeout: float,
        tls: Tls | None = None,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Stream:
        stream = await self._network.connect(host, port, timeout=timeout, tls=tls, options=options)
        return CountedStream(stream, self._storage, f"{host}:{port}")

    async def listen(
        self,
        host: str,
        port: int | None,
        on_client: Callable[[Client], Receiver],
        *,
        tls: Tls | None = None,
        backlog: int = BACKLOG,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Listener:
        def accept(client: Client) -> Receiver:
            return on_client(CountedClient(client, self._storage))

        return await self._network.listen(host, port, accept, tls=tls, backlog=backlog, options=options)


class CountedStream:
    def __init__(self, stream: Stream, storage: Storage, peer: str) -> None:
        self._stream = stream
        self._storage = storage
        self._peer = peer
        self.read = stream.read
        self.drain = stream.drain
        self.deliver = stream.deliver
        self.close = stream.close

    def write(self, data: Buffer) -> None:
        self._storage.operate("send", self._peer, bytes(data), _Outgoing(self._stream.write))
        self._stream.write(data)


class CountedClient:
    def __init__(self, client: Client, storage: Storage) -> None:
        self._client = client
        self._storage = storage
        self.peer = client.peer
        self.pause_reading = client.pause_reading
        self.resume_reading = client.resume_reading
        self.close = client.close
        self.abort = client.abort

    @property
    def queued(self) -> int:
        return self._client.queued

    def write(self, data: Buffer) -> None:
        self._storage.operate("send", self.peer, bytes(data), _Outgoing(self._client.write))
        self._client.write(data)
