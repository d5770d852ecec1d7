"""Processes of Limestone on simulated machines: a crash can come at any write, sync or send of either side.

The simulator of `tests/simulation/`, with other processes than nodes on its machines. A send counts among the
operations of a machine's disk, so that one number says where in its life a process dies, or in the middle of what.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from flowstone import Node
from flowstone.outside import Client, Disk, Listener, Network, Outside, Receiver, Stream, Tls
from flowstone.outside.network import BACKLOG, DEFAULT_OPTIONS, SocketOptions
from tests.simulation.disk import Inode, SimulatedDisk, Storage
from tests.simulation.loop import Life
from tests.simulation.simulation import Machine, Simulation

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Process(Protocol):
    async def stop(self) -> None: ...


P = TypeVar("P", bound=Process)


class Stage(Simulation):
    """As `Simulation`, whose `kill`, `crash`, `crash_after`, `stop` and `on` are for these processes, too."""

    def build(self, *names: str) -> None:
        """Machines on which nothing runs yet."""
        for name in names:
            self._machines[name] = Machine(self, name)

    async def launch(self, name: str, start: Callable[[Outside], Coroutine[Any, Any, P]]) -> P:
        """Run a process on a machine until it is stopped, or dies; Crashed if it does before it has started."""
        machine = self._machines[name]
        assert machine.life is None, f"{name} is running"
        machine.life = life = Life(name)
        self.internet.boot(machine.host)
        self._lives.append(life)
        self.trace.note(name, "start")
        outside = machine.outside(life)
        outside = replace(outside, network=CountedNetwork(outside.network, machine.storage))
        try:
            process = await self.on(name, start(outside))
        except BaseException:
            if machine.life is life:
                self._end(machine, life, is_quiet=False)
            raise
        machine.node = cast(Node, process)
        return process

    def look(self, name: str) -> Disk:
        """A machine's disk, to be read by the scenario whatever runs there."""
        return SimulatedDisk(self._machines[name].storage, Life("scenario"))


class _Outgoing(Inode):
    """What of a send still leaves when the process dies in the middle of it."""

    def __init__(self, write: Callable[[Buffer], None]) -> None:
        super().__init__()
        self._write = write

    def append(self, data: bytes) -> None:
        self._write(data)


class CountedNetwork:
    """The door's Network, each of whose sends is an operation of the machine."""

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
