"""A network in memory: hosts, ports, connections with latency, and links that can be cut or become black holes.

`Internet` is shared by all hosts; `SimulatedNetwork` is the Network for one life of a process. A connection behaves
like TCP: bytes arrive in order, once or not at all; a full window blocks the writer; the kernel closes the connections
of a killed process, but not those of a machine that lost power. Data lost in a black hole is retransmitted once the
link is healed. TLS and Unix sockets are not simulated.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, Final

from flowstone.outside import Client, Listener, Network, Receiver, Stream, Tls
from flowstone.outside.network import BACKLOG, DEFAULT_OPTIONS, KEEPALIVE_SECONDS, QUEUE_MAX, SocketOptions
from tests.simulation.link import LATENCY, Fault, Link
from tests.simulation.loop import LIFE, Died, Life, VirtualLoop
from tests.simulation.trace import Trace

if TYPE_CHECKING:
    from typing_extensions import Buffer

WINDOW: Final = 4 * 1024 * 1024
"""Bytes in flight or unread by the peer beyond which a kernel accepts no more, as on loopback."""

SPLIT_PROBABILITY: Final = 0.05

STREAM_QUEUE_MAX: Final = 64 * 1024
"""Queued bytes from which on `drain` waits, as in asyncio."""

FIRST_EPHEMERAL_PORT: Final = 40_000


class Kind(StrEnum):
    DATA = "data"
    FIN = "fin"
    RST = "rst"


@dataclass(slots=True)
class Host:
    name: str
    is_up: bool = True
    next_port: int = FIRST_EPHEMERAL_PORT


class Internet:
    """All hosts and the links between them."""

    def __init__(self, loop: VirtualLoop, rng: Random, trace: Trace) -> None:
        self.loop = loop
        self.trace = trace
        self.hosts: dict[str, Host] = {}
        self.listeners: dict[tuple[str, int], SimulatedListener] = {}
        self.links: dict[tuple[str, str], Link] = {}
        """From one host to another; only links that ever had a fault."""
        self._rng = rng
        self._ends: dict[End, None] = {}
        self._connection_count = 0

    # --- faults ---

    def break_link(self, source: str, target: str, fault: Fault) -> None:
        """Break one direction; a cut resets the connections of both."""
        link = self.link(source, target)
        link.fault, link.faulty_since = fault, self.loop.time()
        self.later(KEEPALIVE_SECONDS, self._keep_alive, source, target)
        self.trace.note("network", f"{fault.value} {source} {target}")
        if fault is Fault.CUT:
            self.reset(source, target)

    def reset(self, one: str, other: str) -> None:
        """Reset the current connections between the two hosts."""
        ends = [end for end in self._ends if {end.host.name, end.other.host.name} == {one, other}]
        for end in ends:
            end.sever()
        self.link(one, other).hit_count += len(ends)

    def link(self, source: str, target: str) -> Link:
        """Return a link, to inspect it or to inject faults."""
        return self.links.setdefault((source, target), Link())

    def heal(self, source: str, target: str) -> None:
        """Restore a link, including packets that a black hole swallowed."""
        link = self.links.get((source, target))
        if link is None or link.fault is None:
            return
        link.fault = None
        self.trace.note("network", f"heal {source} {target}")
        for end in list(self._ends):
            if (end.host.name, end.other.host.name) == (source, target) and end.other.host.is_up:
                end.send_again()

    def _keep_alive(self, source: str, target: str) -> None:
        """Reset connections whose keepalive probes, or answers to them, were lost."""
        link = self.link(source, target)
        if link.fault is not None and self.loop.time() - link.faulty_since >= KEEPALIVE_SECONDS:
            for end in list(self._ends):
                if (end.host.name, end.other.host.name) in ((source, target), (target, source)):
                    end.time_out()

    def boot(self, host: Host) -> None:
        """Power a machine on; packets sent to it before are retransmitted."""
        if host.is_up:
            return
        host.is_up = True
        for end in list(self._ends):
            if end.other.host is host and self.is_open(end.host, host):
                end.send_again()

    def end_of_life(self, life: Life, *, is_quiet: bool) -> None:
        """End a process. Its kernel closes its connections, unless the machine is down."""
        for address in [address for address, listener in self.listeners.items() if listener.life is life]:
            del self.listeners[address]
        for end in list(self._ends):
            if end.life is life and not end.is_gone:
                end.die(is_quiet)

    def thaw(self, life: Life) -> None:
        """Resume a process; its kernel has received data for it."""
        for end in list(self._ends):
            if end.life is life:
                self.later(0, end.hand_over)

    # --- interface to the ends of connections ---

    def delay(self, source: Host, target: Host) -> float:
        link = self.links.get((source.name, target.name))
        return self._rng.uniform(*LATENCY) if link is None else link.seconds(self.loop.time(), self._rng)

    def split(self, data: bytes) -> list[bytes]:
        """Occasionally split one write into two pieces."""
        if len(data) < 2 or self._rng.random() >= SPLIT_PROBABILITY:
            return [data]
        at = self._rng.randrange(1, len(data))
        return [data[:at], data[at:]]

    def is_open(self, source: Host, target: Host) -> bool:
        link = self.links.get((source.name, target.name))
        return link is None or link.is_open()

    def later(self, delay: float, callback: Callable[..., None], *args: object) -> None:
        """Schedule a callback of the network, which belongs to no life."""
        self.loop.call_later(delay, callback, *args, context=Context())

    def forget(self, end: End) -> None:
        self._ends.pop(end, None)

    # --- connecting ---

    def open(
        self, source: Host, life: Life | None, name: str, port: int, answer: asyncio.Future[SimulatedStream]
    ) -> None:
        target = self.hosts.get(source.name if name in ("127.0.0.1", "localhost") else name)
        if target is None:
            answer.set_exception(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
            return
        if self.is_open(source, target) and self.is_open(target, source):
            self.later(self.delay(source, target), self._accept, source, life, target, port, answer)
            self._perhaps_again(source, life, target, port)
        elif Fault.CUT in (self.link(source.name, target.name).fault, self.link(target.name, source.name).fault):
            unreachable = OSError(errno.EHOSTUNREACH, "No route to host")
            self.later(self.delay(source, target), _refuse, answer, unreachable)

    def _perhaps_again(self, source: Host, life: Life | None, target: Host, port: int) -> None:
        """Occasionally open a duplicate connection that no client uses."""
        link = self.links.get((source.name, target.name))
        if link is not None and link.is_doubled(self._rng):
            nobody: asyncio.Future[SimulatedStream] = self.loop.create_future()
            nobody.cancel()
            self.later(self.delay(source, target), self._accept, source, life, target, port, nobody)

    def _accept(
        self, source: Host, life: Life | None, target: Host, port: int, answer: asyncio.Future[SimulatedStream]
    ) -> None:
        if not target.is_up or not self.is_open(source, target) or not self.is_open(target, source):
            return
        listener = self.listeners.get((target.name, port))
        if listener is None:
            refused = ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed ('{target.name}', {port})")
            self.later(self.delay(target, source), _refuse, answer, refused)
            return
        self._connection_count += 1
        source.next_port += 1
        here = End(self, self._connection_count, source, life, f"{target.name}:{port}")
        there = End(self, self._connection_count, target, listener.life, f"{source.name}:{source.next_port}")
        here.other, there.other = there, here
        self._ends[here] = self._ends[there] = None
        self.trace.note("network", f"connection {here.number}: {there.peer} to {here.peer}", b"")
        delay = self.delay(target, source)
        there.last_arrival = self.loop.time() + delay  # no data overtakes the answer
        self.later(delay, _connected, here, answer)
        there.accepted(listener.on_client)


def _refuse(answer: asyncio.Future[SimulatedStream], error: OSError) -> None:
    if not answer.done():
        answer.set_exception(error)


def _connected(end: End, answer: asyncio.Future[SimulatedStream]) -> None:
    if answer.done() or end.is_dead:
        end.die(is_quiet=False)
    else:
        end.is_handed_over = True
        answer.set_result(SimulatedStream(end))


class End:
    """One end of a connection: its unsent and received data, and how it ended."""

    def __init__(self, internet: Internet, number: int, host: Host, life: Life | None, peer: str) -> None:
        self.number = number
        self.host = host
        self.life = life
        self.peer = peer
        self.other: End
        self.unsent = bytearray()
        self.arrived = bytearray()
        self.is_eof = False
        """True if the peer will send no more."""
        self.is_closing = False
        """True if this end will send only what is queued."""
        self.is_gone = False
        """True if this end has forgotten the connection."""
        self.is_handed_over = False
        """True once the process has accepted the connection; before that, the kernel handles it."""
        self.is_paused = False
        self.last_arrival = 0.0
        self._receiver: Receiver | None = None
        self._internet = internet
        self._sent: deque[tuple[Kind, bytes]] = deque()
        self._lost_count = 0
        """Number of sent packets that a black hole swallowed."""
        self._in_flight = 0
        self._unreported = 0
        """Bytes consumed here but not yet reported: the peer's window is smaller by them."""
        self._is_severed = False
        self._is_ended = False
        """True once the last packet is sent."""
        self._is_congested = False
        self._error: OSError | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_dead(self) -> bool:
        return self.life is not None and self.life.is_dead

    @property
    def is_frozen(self) -> bool:
        return self.life is not None and self.life.is_frozen

    def __repr__(self) -> str:
        return f"<connection {self.number} of {self.host.name} to {self.peer}>"

    # --- calls of the process ---

    def write(self, data: Buffer) -> None:
        if self.is_gone or self.is_closing:
            return
        if not self.unsent and self._in_flight + len(memoryview(data)) <= WINDOW:
            self._hand_to_kernel(bytes(data))
            return
        self.unsent += memoryview(data)
        self._pump()
        if len(self.unsent) > QUEUE_MAX and not self._is_congested:
            self._is_congested = True
            self._tell("congested")

    def take(self, n: int) -> bytes:
        data = bytes(memoryview(self.arrived)[:n])
        del self.arrived[:n]
        self._unreported += len(data)
        if self.other.unsent:  # runs as another process, and not inside a callback of this one
            self._internet.later(0, self._report)
        else:
            self._report()
        return data

    async def changed(self) -> None:
        """Wait until data has arrived or was sent, or the connection has ended."""
        waiter = self._internet.loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if not self.is_gone and not self.is_closing:
            self.is_closing = True
            self._pump()

    def abort(self) -> None:
        if not self.is_gone and not self._is_ended:
            self.is_closing = self._is_ended = True
            self.unsent.clear()
            self._send(Kind.RST)
            self._internet.later(0, self._lose, None)

    def die(self, is_quiet: bool) -> None:
        """The process has died; data not yet passed to its kernel is lost."""
        self.is_gone = True
        if is_quiet:
            self._internet.later(KEEPALIVE_SECONDS, self.other.time_out)
        else:
            self._send(Kind.RST if self.arrived else Kind.FIN)

    def resume(self) -> None:
        self.is_paused = False
        self._internet.later(0, self.hand_over)

    # --- events of the network ---

    def accepted(self, on_client: Callable[[Client], Receiver]) -> None:
        def accept() -> None:
            self.is_handed_over = True
            self._receiver = on_client(SimulatedClient(self))
            if self.is_gone:  # all these events happened while the process was suspended
                self._tell("closed")
            elif self.arrived or self.is_eof:
                self._internet.later(0, self.hand_over)

        self._run(accept)

    def sever(self) -> None:
        self._is_severed = True
        self._sent.clear()
        self._internet.later(self._internet.delay(self.other.host, self.host), self._lose, _reset())

    def time_out(self) -> None:
        """Close the connection if the peer's kernel is silent or has forgotten it; not while we send."""
        if not self._sent:
            self._lose(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))

    def send_again(self) -> None:
        count, self._lost_count = self._lost_count, 0
        for _ in range(count):
            self._schedule()
        self._internet.later(self._internet.delay(self.other.host, self.host), self.other._report)

    def _pump(self) -> None:
        """Pass as much data to the kernel as it accepts."""
        while self.unsent and self._in_flight < WINDOW:
            piece = bytes(memoryview(self.unsent)[: WINDOW - self._in_flight])
            del self.unsent[: len(piece)]
            self._hand_to_kernel(piece)
        if self.is_closing and not self.unsent and not self.is_gone and not self._is_ended:
            self._is_ended = True
            self._send(Kind.FIN)
            self._internet.later(0, self._lose, None)
        elif self._is_congested and len(self.unsent) <= QUEUE_MAX // 4:
            self._is_congested = False
            self._tell("drained")

    def _hand_to_kernel(self, piece: bytes) -> None:
        self._in_flight += len(piece)
        for packet in self._internet.split(piece):
            self._send(Kind.DATA, packet)

    def _send(self, kind: Kind, data: bytes = b"") -> None:
        if not self._is_severed:
            self._sent.append((kind, data))
            self._schedule()

    def _schedule(self) -> None:
        """Schedule the arrival of the first packet in flight: TCP keeps the order."""
        loop = self._internet.loop
        delay = self._internet.delay(self.host, self.other.host)
        self.last_arrival = max(self.last_arrival, loop.time() + delay)
        loop.call_at(self.last_arrival, self._deliver, context=Context())

    def _deliver(self) -> None:
        if self._is_severed or not self._sent:
            return
        if not self._internet.is_open(self.host, self.other.host) or not self.other.host.is_up:
            self._lost_count += 1
            return
        kind, data = self._sent.popleft()
        self._internet.trace.note(self.other.host.name, f"receives {self.number} {kind}", data)
        self.other._arrive(kind, data)
        if self.is_gone and not self._sent:
            self._internet.forget(self)

    def _arrive(self, kind: Kind, data: bytes) -> None:
        if self.is_gone:
            if kind is Kind.DATA:  # the kernel reports that it has no such connection
                self._send(Kind.RST)
        elif kind is Kind.RST:
            self._lose(_reset())
        elif kind is Kind.FIN:
            self.is_eof = True
            self.hand_over()
        else:
            self.arrived += data
            self.hand_over()

    def hand_over(self) -> None:
        """Call the server with the received data; a client reads it itself."""
        if self._receiver is None:
            self._wake()
        elif not self.is_gone and not self.is_paused and not self.is_closing and not self.is_frozen:
            if self.arrived:
                data = self.take(len(self.arrived))
                self._run(self._receiver.received, data)
            if self.is_eof and not self.arrived:
                self.close()

    def _report(self) -> None:
        """Tell the peer that the window has grown by the consumed bytes."""
        if self._unreported and self._internet.is_open(self.host, self.other.host):
            self.other._in_flight -= self._unreported
            self._unreported = 0
            if self.other.unsent and not self.other.is_gone:
                self.other._pump()
                self.other._wake()

    def _lose(self, error: OSError | None) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        self._error = error
        self.unsent.clear()
        self._wake()
        self._tell("closed")
        if not self._sent:
            self._internet.forget(self)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _tell(self, method: str) -> None:
        if self._receiver is not None:
            self._run(getattr(self._receiver, method))

    def _run(self, call: Callable[..., Any], *args: object) -> None:
        """Run as the process itself, if it lives; it may be inside another callback."""
        life = self.life
        if life is None or LIFE.get() is life:
            call(*args)
        elif life.is_frozen:
            self._internet.loop.call_soon(call, *args, context=life.context.copy())
        elif not life.is_dead:
            try:
                life.context.run(call, *args)
            except Died:
                return
            except Exception as error:
                self._internet.loop.call_exception_handler({"message": f"in {life.name}", "exception": error})


def _reset() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


class SimulatedStream:
    """A simulated Stream."""

    def __init__(self, end: End) -> None:
        self._end = end

    async def read(self, n: int) -> bytes:
        end = self._end
        while not end.arrived and not end.is_eof and not end.is_gone:
            await end.changed()
        end.check()
        return end.take(n) if end.arrived else b""

    def write(self, data: Buffer) -> None:
        self._end.write(data)

    async def drain(self) -> None:
        end = self._end
        while len(end.unsent) > STREAM_QUEUE_MAX and not end.is_gone:
            await end.changed()
        end.check()
        if end.is_gone:
            raise ConnectionResetError("Connection lost")

    def deliver(self, receive: Callable[[bytes], None], ended: Callable[[], None]) -> bool:
        return False

    def abort(self) -> None:
        self._end.abort()

    async def close(self) -> None:
        self._end.close()
        while not self._end.is_gone:
            await self._end.changed()


class SimulatedClient:
    """A simulated Client."""

    def __init__(self, end: End) -> None:
        self._end = end

    @property
    def peer(self) -> str:
        return self._end.peer

    @property
    def queued(self) -> int:
        return len(self._end.unsent)

    def write(self, data: Buffer) -> None:
        self._end.write(data)

    def pause_reading(self) -> None:
        self._end.is_paused = True

    def resume_reading(self) -> None:
        self._end.resume()

    def close(self) -> None:
        self._end.close()

    def abort(self) -> None:
        self._end.abort()


class SimulatedListener:
    """A simulated Listener."""

    def __init__(
        self, internet: Internet, host: str, port: int, life: Life | None, on_client: Callable[[Client], Receiver]
    ) -> None:
        self.port: int | None = port
        self.life = life
        self.on_client = on_client
        self._internet = internet
        self._address = host, port

    async def close(self) -> None:
        if self._internet.listeners.get(self._address) is self:
            del self._internet.listeners[self._address]


class SimulatedNetwork:
    """The Network of one life on one host."""

    def __init__(self, internet: Internet, host: Host, life: Life | None) -> None:
        self._internet = internet
        self._host = host
        self._life = life

    async def connect(
        self,
        host: str,
        port: int | None,
        *,
        timeout: float,
        tls: Tls | None = None,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Stream:
        assert tls is None, "TLS is not simulated"
        assert port is not None, "Unix sockets are not simulated"
        self._enter()
        answer: asyncio.Future[SimulatedStream] = self._internet.loop.create_future()
        self._internet.open(self._host, self._life, host, port, answer)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            raise TimeoutError(f"connection to {host}:{port} timed out after {timeout:g} s") from error
        except asyncio.CancelledError:
            # The connection may have been made just now, and nothing else refers to it; the real network closes it,
            # too.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().abort()
            raise

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
        assert tls is None, "TLS is not simulated"
        assert port is not None, "Unix sockets are not simulated"
        self._enter()
        if host not in (self._host.name, "0.0.0.0"):
            raise OSError(errno.EADDRNOTAVAIL, f"Cannot assign requested address: {host}")
        if port == 0:
            self._host.next_port += 1
            port = self._host.next_port
        address = self._host.name, port
        if address in self._internet.listeners:
            raise OSError(errno.EADDRINUSE, f"Address already in use: {host}:{port}")
        listener = SimulatedListener(self._internet, *address, self._life, on_client)
        self._internet.listeners[address] = listener
        return listener

    def _enter(self) -> None:
        if self._life is not None and self._life.is_dead:
            raise Died
        assert LIFE.get() is self._life, f"network of {self._life} used by {LIFE.get()}: see Simulation.on"


def _check(network: SimulatedNetwork) -> Network:
    """Let the type checker compare the class with the protocol."""
    return network
