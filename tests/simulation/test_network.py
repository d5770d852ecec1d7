"""The simulated network: streams, latency, cut links, black holes, and the death of processes and machines."""

from __future__ import annotations

import asyncio

import pytest

from flowstone.outside import Client, Listener, Stream
from flowstone.outside.network import KEEPALIVE_SECONDS, QUEUE_MAX
from tests.simulation.loop import Life
from tests.simulation.network import WINDOW
from tests.simulation.simulation import Machine, Simulation, simulated


class Echo:
    """A server that echoes its input, and records its events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.heard = bytearray()
        self.clients: list[Client] = []
        self.answers = True

    def accept(self, client: Client) -> Echo:
        self.clients.append(client)
        return self

    def received(self, data: bytes) -> None:
        self.heard += data
        if self.answers:
            self.clients[-1].write(data)

    def congested(self) -> None:
        self.events.append("congested")

    def drained(self) -> None:
        self.events.append("drained")

    def closed(self) -> None:
        self.events.append("closed")


class Place:
    """A host `a` with an echo server at port 1, whose life can end."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.echo = Echo()
        self.life = Life("a")
        self.machine = Machine(sim, "a")
        self.network = self.machine.outside(self.life).network

    async def listen(self) -> Place:
        work = self.network.listen("a", 1, self.echo.accept)
        await self.sim.loop.create_task(work, context=self.life.context.copy())
        return self

    async def connect(self, *, timeout: float = 10) -> Stream:
        return await self.sim.outside.network.connect("a", 1, timeout=timeout)

    def die(self, *, is_quiet: bool) -> None:
        self.life.is_dead = True
        self.machine.host.is_up = not is_quiet
        self.sim.internet.end_of_life(self.life, is_quiet=is_quiet)


async def read_exactly(stream: Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await stream.read(size - len(data))
        assert piece, "closed"
        data += piece
    return data


@simulated(seeds=range(5))
async def test_bytes_arrive_in_order_after_a_latency(sim: Simulation) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    wanted = b"".join(number.to_bytes(4, "big") for number in range(1000))
    for start in range(0, len(wanted), 40):
        stream.write(wanted[start : start + 40])
    before = sim.now
    assert await read_exactly(stream, len(wanted)) == wanted
    assert 0.0002 < sim.now - before < 0.1
    await stream.close()
    await sim.until(lambda: place.echo.events == ["closed"])
    assert await stream.read(1) == b""


@simulated()
async def test_connection_to_a_port_without_a_listener_is_refused(sim: Simulation) -> None:
    place = Place(sim)
    with pytest.raises(ConnectionRefusedError):
        await place.connect()
    with pytest.raises(OSError, match="not known"):
        await sim.outside.network.connect("nowhere", 1, timeout=1)
    place.machine.host.is_up = False
    before = sim.now
    with pytest.raises(TimeoutError, match="connection to a:1 timed out after 10 s"):
        await place.connect()
    assert sim.now == before + 10


@simulated()
async def test_port_is_bound_once_and_released(sim: Simulation) -> None:
    network = sim.outside.network
    echo = Echo()
    first: Listener = await network.listen("scenario", 0, echo.accept)
    assert first.port
    with pytest.raises(OSError, match="in use"):
        await network.listen("scenario", first.port, echo.accept)
    with pytest.raises(OSError, match="Cannot assign"):
        await network.listen("elsewhere", 1, echo.accept)
    await first.close()
    await (await network.listen("scenario", first.port, echo.accept)).close()


@simulated()
async def test_stalled_reader_blocks_the_writer(sim: Simulation) -> None:
    place = await Place(sim).listen()
    place.echo.answers = False
    stream = await place.connect()
    await sim.until(lambda: place.echo.clients)
    client, events = place.echo.clients[0], place.echo.events
    place.life.context.run(client.write, bytes(WINDOW))
    assert (client.queued, events) == (0, [])
    place.life.context.run(client.write, bytes(QUEUE_MAX + 1))
    assert (client.queued, events) == (QUEUE_MAX + 1, ["congested"])
    await read_exactly(stream, WINDOW + QUEUE_MAX + 1)
    await sim.sleep(1)
    assert (client.queued, events) == (0, ["congested", "drained"])
    client.pause_reading()
    stream.write(bytes(2 * WINDOW))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await stream.drain()
    client.resume_reading()
    await stream.drain()
    await sim.until(lambda: len(place.echo.heard) == 2 * WINDOW)


@simulated()
async def test_cut_resets_connections_and_refuses_new_ones_until_healed(sim: Simulation) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    stream.write(b"lost")
    sim.cut("a", "scenario")
    with pytest.raises(ConnectionResetError):
        await stream.read(1)
    with pytest.raises(ConnectionResetError):
        await stream.drain()
    with pytest.raises(OSError, match="No route"):
        await place.connect()
    await sim.until(lambda: place.echo.events == ["closed"])
    assert not place.echo.heard
    sim.heal()
    await (await place.connect()).close()


@simulated(seeds=range(5))
async def test_black_hole_drops_silently_and_retransmits_when_healed(sim: Simulation) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    stream.write(b"one ")
    assert await read_exactly(stream, 4) == b"one "
    sim.black_hole("scenario", "a")
    for _ in range(10):
        stream.write(b"two ")
        await sim.sleep(0.0007)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(KEEPALIVE_SECONDS / 2):
            await stream.read(1)
    with pytest.raises(TimeoutError):
        await place.connect(timeout=10)
    assert place.echo.events == []
    sim.heal()
    stream.write(b"three")
    assert await read_exactly(stream, 45) == b"two " * 10 + b"three"


@simulated()
async def test_black_hole_may_affect_one_direction(sim: Simulation) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    sim.black_hole("a", "scenario", is_one_way=True)
    stream.write(b"heard, not answered")
    await sim.until(lambda: len(place.echo.heard) == 19)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await stream.read(1)


@simulated()
async def test_kernel_closes_connections_of_a_killed_process(sim: Simulation) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    place.die(is_quiet=False)
    assert await stream.read(1) == b""
    with pytest.raises(ConnectionRefusedError):
        await place.connect()
    assert place.echo.events == []


@simulated()
async def test_connections_of_a_machine_that_lost_power_are_reset_when_it_is_back(sim: Simulation) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    place.die(is_quiet=True)
    stream.write(b"?")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1000):
            await stream.read(1)
    sim.internet.boot(place.machine.host)
    with pytest.raises(ConnectionResetError):
        await stream.read(1)


@pytest.mark.parametrize("is_black_hole", [False, True])
@simulated()
async def test_waiting_reader_learns_of_a_power_loss_by_keepalive(sim: Simulation, is_black_hole: bool) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    before = sim.now
    if is_black_hole:
        sim.black_hole("a", "scenario", is_one_way=True)
    else:
        place.die(is_quiet=True)
    with pytest.raises(TimeoutError):
        await stream.read(1)
    assert sim.now == before + KEEPALIVE_SECONDS
    assert place.echo.events == (["closed"] if is_black_hole else [])


@simulated()
async def test_close_sends_what_is_queued_and_abort_does_not(sim: Simulation) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    await sim.until(lambda: place.echo.clients)
    place.life.context.run(place.echo.clients[0].write, b"bye")
    place.life.context.run(place.echo.clients[0].close)
    assert await read_exactly(stream, 3) == b"bye"
    assert await stream.read(1) == b""
    await sim.until(lambda: place.echo.events == ["closed"])
    stream = await place.connect()
    await sim.until(lambda: len(place.echo.clients) == 2)
    place.life.context.run(place.echo.clients[1].abort)
    with pytest.raises(ConnectionResetError):
        await stream.read(1)
    await sim.until(lambda: place.echo.events == ["closed"] * 2)
