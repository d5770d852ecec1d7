"""Watches what is reported of a set under chaos, all the time: no trouble without a finding, and no false alarm."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from threading import Event, Thread
from typing import Final

from flowstone.iproto.uri import parse_uri
from flowstone.observation.explanation import explain
from flowstone.observation.survey import Survey
from flowstone.outside import production
from tests.chaos.seats import Seats
from tests.observation.promise import ANSWER_SECONDS, Promise, broken_promises

LOOK_SECONDS: Final = 1.0


class Watcher:
    """Looks at all members every second, in a thread. `found` counts the findings of all looks by kind."""

    def __init__(self, seats: Seats) -> None:
        self.found: Counter[str] = Counter()
        self.looks = 0
        self.problem: Exception | None = None
        self._seats = seats
        self._promise = Promise()
        self._ending = Event()
        self._thread = Thread(target=self._run, daemon=True)

    @property
    def violations(self) -> list[str]:
        told = [f"what is reported is not true: {broken}" for broken in self._promise.broken]
        return told if self.problem is None else [*told, f"the watcher failed: {self.problem!r}"]

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
                sets = await survey.look()
                findings = explain(sets)
                self._promise.look(sets, findings, time.monotonic())
                self.looks += 1
                self.found.update({finding.kind.value for finding in findings})
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await survey.close()


def broken_reports(seats: Seats) -> list[str]:
    """Of a set that is at rest."""
    return [f"what is reported is not true: {broken}" for broken in broken_promises([m.address for m in seats.members])]
