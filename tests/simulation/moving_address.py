"""An address that leads to one member and later to another, as a virtual IP or a DNS name does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flowstone.outside import Client, Listener, Network, Outside, Receiver, Stream, Tls
from flowstone.outside.network import BACKLOG, DEFAULT_OPTIONS, SocketOptions

ADDRESS = "moving"


class MovingAddress:
    """A Network with one more host: `target` is where ADDRESS leads."""

    def __init__(self, network: Network, target: str) -> None:
        self._network = network
        self.target = target
        self._streams: list[Stream] = []

    def outside(self, outside: Outside) -> Outside:
        """Return an Outside with this network."""
        return replace(outside, network=self)

    async def move(self, target: str) -> None:
        """Redirect the address to `target`; connections to the old target are closed."""
        self.target = target
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.close()

    async def connect(
        self,
        host: str,
        port: int | None,
        *,
        timeout: float,
        tls: Tls | None = None,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Stream:
        there = self.target if host == ADDRESS else host
        stream = await self._network.connect(there, port, timeout=timeout, tls=tls, options=options)
        if host == ADDRESS:
            self._streams.append(stream)
        return stream

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
        return await self._network.listen(host, port, on_client, tls=tls, backlog=backlog, options=options)
