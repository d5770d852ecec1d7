"""Links that are slow, lossy or clogged, or that duplicate the first packet of a connection."""

from __future__ import annotations

import asyncio
from random import Random

from flowstone.iproto.constants import RequestType
from tests.simulation.link import LATENCY, RETRANSMISSION_SECONDS, RETRANSMISSIONS_MAX, Fault, Link
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_network import Place


def test_healthy_link_has_normal_latency_and_counts_no_effects() -> None:
    link, rng = Link(), Random(0)
    assert all(LATENCY[0] <= link.seconds(5.0, rng) <= LATENCY[1] for _ in range(100))
    assert link.is_open()
    assert not link.is_doubled(rng)
    assert link.hit_count == 0


def test_each_loss_doubles_the_delay() -> None:
    link, rng = Link(loss_probability=0.5), Random(0)
    found = {round(link.seconds(0.0, rng) / RETRANSMISSION_SECONDS) for _ in range(300)}
    assert found == {2**losses - 1 for losses in range(RETRANSMISSIONS_MAX + 1)}
    assert 100 < link.hit_count < 200


def test_packets_on_a_clogged_link_arrive_when_it_opens() -> None:
    link, rng = Link(opens_at=10.0), Random(0)
    assert 4.0 < link.seconds(6.0, rng) < 4.1
    assert link.seconds(11.0, rng) < 0.1
    assert link.hit_count == 1


def test_dropped_packet_is_counted() -> None:
    link = Link(fault=Fault.CUT)
    assert not link.is_open()
    assert link.hit_count == 1


@simulated(seeds=range(3))
async def test_clogged_link_delivers_everything_in_order(sim: Simulation) -> None:
    place = await Place(sim).listen()
    stream = await place.connect()
    link = sim.internet.link("scenario", "a")
    link.opens_at = sim.now + 5
    for piece in (b"one ", b"two ", b"three"):
        stream.write(piece)
        await sim.sleep(1)
    assert not place.echo.heard
    await sim.sleep(3)
    assert place.echo.heard == b"one two three"
    assert link.hit_count >= 3


@simulated(seeds=range(3))
async def test_clogged_link_delays_connection_attempts(sim: Simulation) -> None:
    place = await Place(sim).listen()
    sim.internet.link("scenario", "a").opens_at = 3.0
    await place.connect()
    assert 3.0 < sim.now < 3.1


@simulated(seeds=range(3))
async def test_duplicate_connection_attempt_leaves_the_server_an_unused_connection(sim: Simulation) -> None:
    place = await Place(sim).listen()
    sim.internet.link("scenario", "a").duplicate_probability = 1.0
    stream = await place.connect()
    await sim.until(lambda: place.echo.events == ["closed"])
    assert len(place.echo.clients) == 2
    stream.write(b"still there")
    await sim.until(lambda: place.echo.heard == b"still there")


@simulated(seeds=range(3))
async def test_resumed_process_receives_everything(sim: Simulation) -> None:
    place = await Place(sim).listen()
    old = await place.connect()
    place.life.is_frozen = True
    new = await place.connect()
    gone = await place.connect()
    await gone.close()
    old.write(b"old ")
    await sim.sleep(1)
    new.write(b"new")
    await sim.sleep(1)
    assert not place.echo.heard
    assert len(place.echo.clients) == 1
    sim.loop.thaw(place.life)
    sim.internet.thaw(place.life)
    await sim.until(lambda: len(place.echo.heard) == 7)
    await sim.until(lambda: place.echo.events == ["closed"])
    assert len(place.echo.clients) == 3


@simulated(seeds=range(3))
async def test_resumed_node_continues(sim: Simulation) -> None:
    await sim.start("a")
    client = await sim.client("a")
    sim.freeze("a")
    asked = asyncio.ensure_future(client.request(RequestType.PING))
    other = asyncio.ensure_future(sim.client("a"))
    await sim.sleep(3)
    assert not asked.done()
    sim.thaw("a")
    await asked
    await (await other).request(RequestType.PING)


@simulated(seeds=range(3))
async def test_a_frozen_node_can_be_killed(sim: Simulation) -> None:
    await sim.start("a")
    sim.freeze("a")
    sim.kill("a")
    sim.thaw("a")
    await sim.restart("a")
    await (await sim.client("a")).request(RequestType.PING)
