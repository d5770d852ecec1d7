"""Record three real servers that lose their leader with a pending queue: the recording 06-contested-election.

`python -m tests.conversations.record_elections TARANTOOL VERSION` runs the binary TARANTOOL three times on loopback,
with a tap (tap.py) on every connection, and writes the recording of VERSION. Quorum 2; a is instance 1, b 2, c 3.

1. a leads term 2, and its first insert is confirmed.
2. a's insert 2, and an asynchronous one after it, reach b only. a is killed. b is elected; its PROMOTE confirms both.
3. a is restarted, and learns that. With a quorum out of reach, insert 3 of b is rolled back by a timeout.
4. b is isolated; its insert 4 reaches no member. a and c notice that at the same time and contest the next term.
   The winner's PROMOTE rolls insert 4 back when b receives it; b's own row of it becomes a NOP everywhere else.
5. The leader resigns while the other two cannot reach each other: both run in one term, and the leader's vote decides.

Snapshots are taken before the first step and after the last. The winners of the last two steps are not predetermined.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from flowstone.iproto.constants import RequestType
from tests.conversations import recording
from tests.conversations.tap import Tap
from tests.real_tarantool import free_port

SCENARIO = "06-contested-election"
NODES = "abc"
DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.01
HEAD_START_SECONDS = 1.5
"""Longer than a heartbeat interval, shorter than the timeout of a silent peer."""

_CFG = """
local fiber, console = require('fiber'), require('console')
os.remove('console')
console.listen('unix/:./console')
box.cfg{{listen = '127.0.0.1:{port}', log = 'server.log', replication = {{{upstreams}}}, election_mode = '{mode}',
    instance_uuid = '11111111-0000-4000-8000-00000000000{id}', replicaset_uuid = 'aaaaaaaa-0000-4000-8000-000000000006',
    replication_timeout = 1, election_timeout = 2, replication_synchro_quorum = 2, replication_synchro_timeout = 60,
    replication_connect_timeout = 5}}
"""
_PREPARE = """
box.schema.user.create('replicator', {password = 'secret'})
box.schema.user.grant('replicator', 'replication')
box.schema.space.create('sync', {id = 512, is_sync = true}):create_index('pk')
box.schema.space.create('plain', {id = 513}):create_index('pk')
"""


class Node:
    """One server. Commands are sent to its console, and return the value of the expression after `return`."""

    def __init__(self, binary: str, name: str, directory: Path) -> None:
        self.name = name
        self.id = NODES.index(name) + 1
        self.directory = directory / name
        self.port = free_port()
        self._binary = binary
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, upstream_ports: list[int], *, mode: str) -> None:
        self.directory.mkdir(exist_ok=True)
        upstreams = ", ".join(f"'replicator:secret@127.0.0.1:{port}'" for port in upstream_ports)
        script = _CFG.format(port=self.port, id=self.id, upstreams=upstreams, mode=mode)
        (self.directory / "server.lua").write_text(script)
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            self._binary, "server.lua", cwd=self.directory, stdin=pipe, stdout=asyncio.subprocess.DEVNULL
        )
        await until(lambda: self.says("box.info.status == 'running'"))

    async def run(self, command: str) -> str:
        reader, writer = await asyncio.open_unix_connection(self.directory / "console")
        await reader.readuntil(b"\n")
        await reader.readuntil(b"\n")
        writer.write(command.replace("\n", " ").encode() + b"\n")
        answer = (await reader.readuntil(b"\n...\n")).decode()
        writer.close()
        return answer.removeprefix("---\n").removesuffix("...\n").removeprefix("- ").strip()

    async def says(self, condition: str) -> bool:
        try:
            return await self.run(f"return {condition}") == "true"
        except (OSError, asyncio.IncompleteReadError):
            return False

    async def until(self, condition: str) -> None:
        await until(lambda: self.says(condition))

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():  # noqa: ASYNC110 - of another process's making
            await asyncio.sleep(POLL_SECONDS)


class Recorder:
    """The three servers and the six taps between them."""

    def __init__(self, binary: str, directory: Path) -> None:
        self.nodes = {name: Node(binary, name, directory) for name in NODES}
        pairs = [(client, server) for client in NODES for server in NODES if client != server]
        self._start = time.monotonic()
        self.taps = {pair: Tap("-to-".join(pair), free_port(), self.nodes[pair[1]].port, self._clock) for pair in pairs}

    def _clock(self) -> float:
        return time.monotonic() - self._start

    def upstreams(self, name: str) -> list[int]:
        return [self.nodes[name].port, *(tap.port for (client, _), tap in self.taps.items() if client == name)]

    async def prepare(self) -> None:
        """Form a set of three with elections off, and take a snapshot of each."""
        first, *others = self.nodes.values()
        await first.start([first.port], mode="off")
        await first.run(_PREPARE)
        # A queue with an owner rejects registrations without a quorum, so the inserts come later.
        for node in others:
            await node.start([first.port, node.port], mode="off")
        for node in self.nodes.values():
            await node.until(f"box.space.sync ~= nil and #box.space._cluster:select() == {len(NODES)}")
        for node in self.nodes.values():
            await node.run("box.snapshot()")
            await node.stop()

    async def record(self) -> None:
        self._start = time.monotonic()
        await asyncio.gather(*(tap.start() for tap in self.taps.values()))
        modes = {"a": "candidate", "b": "voter", "c": "voter"}
        await asyncio.gather(*(node.start(self.upstreams(name), mode=modes[name]) for name, node in self.nodes.items()))
        await self.first_leader()
        await self.loss_of_the_leader()
        await self.timeout()
        await self.partition()
        await self.resignation()
        for node in self.nodes.values():
            await node.run("box.snapshot()")

    async def first_leader(self) -> None:
        a, b, c = self.nodes.values()
        await a.until("box.info.ro == false and box.info.synchro.queue.owner == 1")
        await a.run("box.space.sync:insert{1, 'by a'}")
        await b.run("box.cfg{election_mode = 'candidate'}")
        for node in (b, c):
            await node.until("box.space.sync:get{1} ~= nil")

    async def loss_of_the_leader(self) -> None:
        a, b, c = self.nodes.values()
        await a.run("box.cfg{replication_synchro_quorum = 3}")
        self.hold("c", "a", "b")
        # c notices the loss first and says so. If its message came last, b would run while reading it, and servers up
        # to 3.8 would count the old vote in that message for the new term: they would need another round.
        await asyncio.sleep(HEAD_START_SECONDS)
        await a.run("fiber = require('fiber') fiber.new(function() box.space.sync:insert{2, 'pending'} end)")
        await a.until("box.info.synchro.queue.len == 1")
        await a.run("fiber.new(function() box.space.plain:insert{1, 'behind it'} end)")
        await a.until("box.info.synchro.queue.len == 2")
        await b.until("box.info.synchro.queue.len == 2")
        await a.kill()
        self.taps["c", "a"].cut()
        self.release("c", "a", "b")
        for node in (b, c):
            await node.until("box.info.synchro.queue.owner == 2 and box.space.plain:get{1} ~= nil")
        await a.start(self.upstreams("a"), mode="candidate")
        await a.until("box.info.synchro.queue.owner == 2 and box.info.synchro.queue.len == 0")
        await b.until("#box.info.replication == 3 and box.info.replication[1].upstream.status == 'follow'")
        await b.until("box.info.replication[1].downstream.status == 'follow'")

    async def timeout(self) -> None:
        _, b, c = self.nodes.values()
        await c.run("box.cfg{election_mode = 'candidate'}")
        await b.run("box.cfg{replication_synchro_quorum = 4, replication_synchro_timeout = 0.1}")
        await b.run("pcall(box.space.sync.insert, box.space.sync, {3, 'too late'})")
        await b.until("box.info.synchro.queue.len == 0")
        await b.run("box.cfg{replication_synchro_quorum = 2, replication_synchro_timeout = 60}")
        for node in self.nodes.values():
            await node.until(
                "box.info.synchro.queue.len == 0 and box.info.vclock[2] == " + await b.run("return box.info.lsn")
            )

    async def partition(self) -> None:
        a, b, c = self.nodes.values()
        self.hold("a", "b")
        self.hold("c", "b")
        await b.run("fiber = require('fiber') fiber.new(function() box.space.sync:insert{4, 'to nobody'} end)")
        await b.until("box.info.synchro.queue.len == 1")
        leads = "box.info.synchro.queue.owner ~= 2 and box.info.election.leader == box.info.synchro.queue.owner"
        for node in (a, c):
            await node.until(leads)
        self.release("a", "b")
        self.release("c", "b")
        await b.until(leads)
        for node in self.nodes.values():
            await node.until(
                "box.info.synchro.queue.len == 0 and box.info.vclock[2] == " + await b.run("return box.info.lsn")
            )

    async def resignation(self) -> None:
        old = await self.leader()
        first, second = (node for node in self.nodes.values() if node is not old)
        term = await old.run("return box.info.election.term")
        for node in (first, second):
            await node.until(f"box.info.replication[{old.id}].downstream.status == 'follow'")
        await old.run(f"box.space.sync:insert{{5, 'by {old.name}'}}")
        self.hold(first.name, second.name)
        self.hold(second.name, first.name)
        await old.run("box.ctl.demote()")
        for node in (first, second):
            await node.until(f"box.info.election.term > {term}")
        await asyncio.sleep(POLL_SECONDS)  # both have written their votes
        self.release(first.name, second.name)
        self.release(second.name, first.name)
        for node in self.nodes.values():
            await node.until(f"box.info.synchro.queue.owner ~= {old.id} and box.info.synchro.queue.owner ~= 0")
        new = await self.leader()
        await new.run(f"box.space.sync:insert{{6, 'by {new.name}'}}")
        for node in self.nodes.values():
            await node.until(
                f"box.space.sync:get{{6}} ~= nil and box.info.vclock[{new.id}] == "
                + await new.run("return box.info.lsn")
            )

    async def leader(self) -> Node:
        leader_id = int(await self.nodes["b"].run("return box.info.election.leader"))
        return next(node for node in self.nodes.values() if node.id == leader_id)

    def hold(self, client: str, *servers: str) -> None:
        for server in servers:
            self.taps[client, server].hold()

    def release(self, client: str, *servers: str) -> None:
        for server in servers:
            self.taps[client, server].release()

    async def close(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes.values()))
        await asyncio.gather(*(tap.close() for tap in self.taps.values()))

    def keep(self, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        for name, node in self.nodes.items():
            files = target / "files" / name
            files.mkdir(parents=True)
            kept = sorted(path for path in node.directory.iterdir() if path.suffix in (".snap", ".xlog"))
            start = next(path for path in kept if path.suffix == ".snap" and path.stem.strip("0"))
            for path in kept:
                if path.stem >= start.stem:
                    shutil.copy(path, files)
        for tap in self.taps.values():
            tap.keep(target, _is_subscription)


def _is_subscription(said: bytes) -> bool:
    """Return True for a SUBSCRIBE: appliers also connect to watch or request ballots."""
    packets = (recording.Packet(False, payload) for payload, _ in recording.split(said, 0, len(said)))
    return any(packet.type == RequestType.SUBSCRIBE for packet in packets)


async def record(binary: str, directory: Path, target: Path) -> None:
    recorder = Recorder(binary, directory)
    try:
        await recorder.prepare()
        await recorder.record()
    finally:
        await recorder.close()
    recorder.keep(target)


async def main(binary: str, version: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        await record(binary, Path(temporary), recording.scenario(version, SCENARIO))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
