"""Watches the reports of a set under chaos continuously: no problem without a finding, and no false alarm.

`/health/ready` of the nodes must agree with the findings.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from threading import Event, Thread
from typing import Final

from flowstone.iproto.uri import parse_uri
from flowstone.observation.explanation import explain
from flowstone.observation.survey import Survey
from flowstone.outside import production
from tests.chaos.seats import Seats
from tests.interop.member import Member
from tests.observation.promise import ANSWER_SECONDS, Promise, broken_promises

LOOK_SECONDS: Final = 1.0

EXPLAINED_SECONDS: Final = 8.0
"""Lag that must be explained. Reports promise PROMISE_SECONDS, but few faults last as long; members notice a lost
connection after 2 s (OPTIONS), and rows that come slowly are reported after BEHIND_SECONDS."""


class Watcher:
    """Polls all members every second, in a thread.

    `found` counts the findings of all polls by kind, `probes` the answers of `/health/ready`.
    """

    def __init__(self, seats: Seats) -> None:
        self.found: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()
        self.looks = 0
        self.problem: Exception | None = None
        self._seats = seats
        self._promise = Promise(seconds=EXPLAINED_SECONDS)
        self._ending = Event()
        self._thread = Thread(target=self._run, daemon=True)

    @property
    def violations(self) -> list[str]:
        told = [f"wrong report: {broken}" for broken in self._promise.broken]
        return told if self.problem is None else [*told, f"the watcher failed: {self.problem!r}"]

    @property
    def explained(self) -> int:
        return self._promise.explained

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception as error:
            self.problem = error

    async def _watch(self) -> None:
        uris = [parse_uri(member.address) for member in self._seats.members]
        survey = Survey(production(), uris, timeout=ANSWER_SECONDS)
        try:
            while not self._ending.is_set():
                # concurrently, so that both see the same moment
                sets, ready = await asyncio.gather(survey.look(), readiness(self._seats.nodes))
                findings = explain(sets)
                self._promise.look(sets, findings, time.monotonic(), ready)
                self.looks += 1
                self.probes.update("ready" if is_ready else "not ready" for is_ready in ready.values())
                self.found.update({finding.kind.value for finding in findings})
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await survey.close()


async def readiness(nodes: Sequence[Member]) -> dict[str, bool]:
    """Return the answers of `/health/ready` by address, without nodes that do not answer."""
    answers = await asyncio.gather(*(_probe(node.options["http_listen"]) for node in nodes))
    return {node.address: is_ready for node, is_ready in zip(nodes, answers, strict=True) if is_ready is not None}


async def _probe(address: str) -> bool | None:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET /health/ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    status = answer.split()[1:2]
    return status == [b"200"] if status in ([b"200"], [b"503"]) else None


def broken_reports(seats: Seats) -> list[str]:
    """Return the wrong reports about an idle set."""
    return [f"wrong report: {broken}" for broken in broken_promises([m.address for m in seats.members])]
