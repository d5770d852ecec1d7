"""Ten thousand mutated streams, to a replica and to masters: each is answered or rejected.

Honest peers are served throughout, and memory and time stay bounded.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Final

import pytest

from flowstone.errors import FlowstoneError
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import WriteVersion, put, remove
from flowstone.limestone.format.messages import (
    ACK,
    Blob,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    Message,
    SessionBegin,
    SessionBeginAck,
    encode,
    wire_entry,
)
from flowstone.limestone.format.wire_extensions import Action, Hello, HelloAck, Prepare
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.settings import Settings
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.store.recovery import recover
from flowstone.outside import Client, Outside
from tests.limestone import recorded
from tests.limestone.format.test_hostile_files import bounded
from tests.limestone.mutations import mutated
from tests.limestone.peer import MASTER, Master, row, session
from tests.simulation.simulation import Simulation

TO_REPLICA: Final = 8000
TO_MASTER: Final = 2000
AT_ONCE: Final = 20
MESSAGE_SIZE_MAX: Final = 1 << 16
ENDPOINT: Final = Endpoint("replica", 4000)
SECRET: Final = "sesame"


def master_streams() -> list[bytes]:
    """Return the streams of masters on one connection: recorded ones, and ones with our extensions."""
    found = [path.read_bytes()[:2000] for path in sorted(recorded.HERE.rglob("*.m2r.bin"))]
    version = WriteVersion(1, 1)
    entries = (wire_entry(put(1, b"key", b"value" * 9, version)), wire_entry(remove(2, b"gone", version)))
    blob = Blob(7, b"content")
    with_blob = wire_entry(put(3, b"b", b"", version, (7,)), (blob,))
    log: list[Message] = [
        LogChannelCreate(0),
        LogEntries(1, entries, 7),
        LogEntries(2, (*entries, with_blob), 1),
        LogEntries(2, (), 6),
    ]
    hello = extensions.encode(Hello(MASTER, 3, 0, bytes(extensions.NONCE_SIZE)))
    prepare = [extensions.encode(Prepare(action, 1)) for action in Action]
    control = [encode(SessionBegin()), hello, *prepare, encode(GroupCommit(1)), encode(GroupCommit(2))]
    return [*found, b"".join(map(encode, log)), b"".join(control), *(encode(SessionBegin()) + each for each in control)]


class Outcome:
    """Number of connections by the way they ended."""

    def __init__(self) -> None:
        self.answered = 0
        self.closed = 0


async def attack(outside: Outside, data: bytes, outcome: Outcome) -> None:
    """Send the stream on one connection, and wait for the answer, with a time limit."""
    stream = await outside.network.connect(ENDPOINT.host, ENDPOINT.port, timeout=10)
    stream.write(data)
    said = b""
    try:
        async with asyncio.timeout(1.0):
            while piece := await stream.read(1 << 16):
                said += piece
            outcome.closed += 1
    except (TimeoutError, OSError):
        pass
    outcome.answered += bool(said)
    await stream.close()


async def honest(outside: Outside, number: int, secret: str | None) -> None:
    """Write a session as an honest master, after earlier masters have left."""
    async with asyncio.timeout(60):
        while True:
            master = Master(outside.network, ENDPOINT)
            try:
                await master.begin()
                ack = await master.hello(secret=secret, durable_epoch=number)
                await master.prepare(Action.RESUME if ack.durable_epoch else Action.SEED, ack.durable_epoch)
                break
            except (AssertionError, OSError):
                await outside.clock.sleep(0.5)
        log = await master.open(5)
        epoch = ack.durable_epoch + 1
        await log.acknowledged(session(epoch, row(f"honest {number}", "v", epoch)))
        await master.commit(epoch)
        await master.close()


@pytest.mark.parametrize(("compatible", "secret"), [(False, None), (False, SECRET), (True, None)])
def test_replica_survives_mutated_streams(compatible: bool, secret: str | None) -> None:
    streams, rng, outcome = master_streams(), random.Random(7), Outcome()
    count = TO_REPLICA // 4 if secret is not None or compatible else TO_REPLICA // 2

    async def start(outside: Outside) -> Replica:
        replica = Replica(
            outside, "/replica", ENDPOINT, compatible=compatible, secret=secret, message_size_max=MESSAGE_SIZE_MAX
        )
        await replica.start()
        return replica

    async def scenario(stage: Simulation) -> None:
        stage.build("replica")
        replica = await stage.launch("replica", start)
        for number in range(count // AT_ONCE):
            batch = [mutated(rng.choice(streams), rng, streams) for _ in range(AT_ONCE)]
            await asyncio.gather(*(attack(stage.outside, data, outcome) for data in batch))
            if number % 20 == 0 and not compatible:
                await honest(stage.outside, number, secret)
        if not compatible:  # a valid attack may have cleared earlier data
            await honest(stage.outside, count, secret)
        await stage.outside.clock.sleep(1.0)  # until the replica has noticed that the last masters left
        assert not replica.status().channels
        await stage.stop("replica")
        found = recover(stage.look("replica"), "/replica", repairs=False)
        keys = [entry.key for entry in found.snapshot.rows()]
        if not compatible:
            assert any(key.startswith(b"honest") for key in keys)
        if secret is not None:
            assert all(key.startswith(b"honest") for key in keys)
            assert not stage.look("replica").kind("/replica/blob")

    with bounded():
        Simulation(f"hostile/{compatible}/{secret}").run(scenario)
    assert outcome.answered > count // 10
    assert outcome.closed > count // 10


class HostileReplica:
    """Answers each message with an error as a replica may send it, or with a mutated answer."""

    def __init__(self, stage: Simulation, rng: random.Random) -> None:
        self.stage = stage
        self.rng = rng
        self.count = 0
        nonce = bytes(extensions.NONCE_SIZE)
        ours = SessionBeginAck(extensions.offer(nonce))
        hello = HelloAck(MASTER, None, 0, bytes(extensions.TOKEN_SIZE))
        control = [encode(SessionBeginAck()), encode(ours), ACK, extensions.encode(hello)]
        self.whole = [b"".join(control[:2] + [ACK] * 4), encode(SessionBeginAck()) + ACK * 8, ACK * 8]
        self.whole += [encode(ours) + extensions.encode(hello) + ACK * 5]
        self.whole += [path.read_bytes()[:2000] for path in sorted(recorded.HERE.rglob("*.r2m.bin"))]

    def __call__(self, client: Client) -> HostileClient:
        self.count += 1
        return HostileClient(client, self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        data = mutated(self.rng.choice(self.whole), self.rng, self.whole)
        while data:
            size = self.rng.choice((2, 34, 82, 300, len(data)))
            yield data[:size]
            data = data[size:]


class HostileClient:
    """Answers each message with the next piece, and closes when there is none."""

    def __init__(self, client: Client, pieces: Iterator[bytes]) -> None:
        self._client = client
        self._pieces = pieces

    def received(self, data: bytes) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            self._client.close()
        else:
            self._client.write(piece)

    def congested(self) -> None:
        pass

    def drained(self) -> None:
        pass

    def closed(self) -> None:
        pass


@pytest.mark.parametrize("compatible", [False, True])
def test_master_survives_mutated_answers(compatible: bool) -> None:
    rng, ends = random.Random(8), {"done": 0, "refused": 0}

    async def write(outside: Outside, number: int) -> None:
        """Write a few sessions with a store that may fail; its directory is used again."""
        settings = Settings("/master", (ENDPOINT,), on_lost=rng.choice(("fail", "degrade")), compatible=compatible)
        store = AsyncDatastore(outside, settings)
        try:
            channel = await store.create_channel()
            await store.ready()
            epoch = store.last_epoch + 1
            await store.switch_epoch(epoch)
            for _ in range(2):
                await channel.begin_session()
                channel.add_entry(1, b"%d" % number, b"v", WriteVersion(epoch, 1))
                await channel.end_session()
                epoch += 1
                await store.switch_epoch(epoch)
            ends["done"] += 1
        except FlowstoneError:
            ends["refused"] += 1
        finally:
            await store.shutdown()

    async def scenario(stage: Simulation) -> None:
        replica = HostileReplica(stage, rng)
        stage.internet.hosts["replica"] = stage.internet.hosts["scenario"]
        await stage.outside.network.listen("scenario", ENDPOINT.port, replica)
        number = 0
        while replica.count < TO_MASTER // 2:
            number += 1
            async with asyncio.timeout(1000):
                await write(stage.outside, number)
        found = recover(stage.outside.disk, "/master", repairs=False)
        assert found.snapshot.rows()

    with bounded():
        Simulation(f"hostile replica/{compatible}").run(scenario)
    assert ends["done"] > 10
    assert ends["refused"] > 10
