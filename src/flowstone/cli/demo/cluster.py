"""The replica set of `flowstone demo`: three `flowstone serve` processes that elect a leader and can be killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flowstone.cli.demo.replication import LOGIN, NAMES, free_port
from flowstone.client.connection import Connection
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.outside import production

SECONDS: Final = 60.0
STOP_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.05
OPTIONS: Final = {
    "FLOWSTONE_ELECTION_MODE": "candidate",
    "FLOWSTONE_REPLICATION_TIMEOUT": "0.25",
    "FLOWSTONE_ELECTION_TIMEOUT": "1",
    "FLOWSTONE_REPLICATION_SYNCHRO_TIMEOUT": "20",
}
"""Options of all nodes: timeouts that make a failover quick, and let synchronous transactions outlast it."""


class NotReady(FlowstoneError):
    """A process of the demo ended, or did not reach the expected state in time."""


@dataclass(frozen=True)
class DemoStatus:
    """The status of a node, from its `box.info`."""

    state: str
    term: int
    vclock: dict[int, int]
    is_writable: bool


@dataclass
class DemoMember:
    """A node process. Its port and its directory stay the same when it is restarted."""

    name: str
    directory: Path
    port: int
    peers: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def uri(self) -> Uri:
        return parse_uri(f"{LOGIN[0]}:{LOGIN[1]}@{self.address}")

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        arguments = ["serve", f"--listen={self.address}", f"--work-dir={self.directory}"]
        secrets = {"FLOWSTONE_USER": ":".join(LOGIN), "FLOWSTONE_REPLICATION": self.peers}
        with self.log.open("ab") as log:
            # A new session: Ctrl-C must reach the demo only, which stops its nodes itself.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flowstone.cli", *arguments],
                env=os.environ | OPTIONS | secrets,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the process without a warning, as the failure of a machine does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    async def status(self) -> DemoStatus | None:
        """Return the status; None if the node does not answer."""
        if not self.is_running:
            return None
        try:
            async with await Connection.open(production(), self.uri, timeout=2) as connection:
                info: dict[str, Any] = (await call(connection, "box.info"))[0]
        except FlowstoneError:
            return None
        election = info["election"]
        return DemoStatus(election["state"], election["term"], dict(info["vclock"]), not info["ro"])


@dataclass
class Cluster:
    """The three nodes, with their files in `directory`."""

    directory: Path
    members: list[DemoMember] = field(init=False)

    def __post_init__(self) -> None:
        self.members = [DemoMember(name, self.directory / name, free_port()) for name in NAMES]
        peers = ",".join(f"{LOGIN[0]}:{LOGIN[1]}@{member.address}" for member in self.members)
        for member in self.members:
            member.peers = peers

    def start(self) -> None:
        for member in self.members:
            member.start()

    def stop(self) -> None:
        """Stop all nodes at once, so that none waits for another."""
        for member in self.members:
            if member.is_running and member.process is not None:
                member.process.terminate()
        for member in self.members:
            member.stop()

    async def leader(self, seconds: float = SECONDS) -> DemoMember:
        """Wait for a leader that is writable, and return it; raise NotReady if none appears within `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for member in self.members:
                status = await member.status()
                if status is not None and status.is_writable and status.state == "leader":
                    return member
            self._check()
            await asyncio.sleep(POLL_SECONDS)
        raise NotReady(f"no leader within {seconds:g} s", hint=f"see {self.members[0].log}")

    async def statuses(self) -> dict[str, DemoStatus | None]:
        found = await asyncio.gather(*(member.status() for member in self.members))
        return dict(zip(NAMES, found, strict=True))

    async def until_equal(self, seconds: float = SECONDS) -> dict[int, int]:
        """Wait until all running nodes have the same vclock, and return it, without component 0 (local rows)."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            places = [status.vclock for status in (await self.statuses()).values() if status is not None]
            running = sum(member.is_running for member in self.members)
            shared = [{number: lsn for number, lsn in place.items() if number} for place in places]
            if len(shared) == running and all(place == shared[0] for place in shared):
                return shared[0]
            await asyncio.sleep(POLL_SECONDS)
        raise NotReady(f"nodes did not reach the same vclock within {seconds:g} s")

    def _check(self) -> None:
        if not any(member.is_running for member in self.members):
            said = self.members[0].log.read_text(errors="replace").splitlines()[-1:]
            raise NotReady(f"all nodes have exited; last log line of {self.members[0].name}: {' '.join(said)}")


async def call(connection: Connection, name: str, *arguments: Any) -> Any:
    body = {Key.FUNCTION_NAME.value: name, Key.TUPLE.value: arguments}
    return (await connection.request(RequestType.CALL, pack(body)))[Key.DATA]
