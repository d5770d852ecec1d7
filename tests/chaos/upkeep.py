"""The operator of a set under chaos: restarts replication that stopped for an accepted reason.

A real server, and a node in its dialect, stops following when a row cannot be applied or logged: because a disk is
full, or (2.6) because a transaction of another member is pending. For a node any other reason is a violation; real
servers are not under test, and often give no reason.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Final

from flowstone.iproto.errors import TarantoolError
from tests.chaos.seats import Seats
from tests.interop.client import Client
from tests.interop.member import Member, RealMember, by_id

LOOK_SECONDS: Final = 0.5
ANSWER_SECONDS: Final = 10.0
RIGHTLY: Final = {
    "Found uncommitted sync transactions from other instance": "a foreign queue",
    "Failed to write to disk": "a full disk",
    "No space left on device": "a full disk",
    "File too large": "a full disk",
}


class Operator:
    """Polls every member twice a second, in a thread. `resumed`: number of repairs by reason."""

    def __init__(self, seats: Seats) -> None:
        self.resumed: Counter[str] = Counter()
        self.violations: list[str] = []
        self._seats = seats
        self._to_resume: set[Member] = set()
        """They follow no member now: a started repair must be completed, even if the member was down in between."""
        self._ending = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending.wait(LOOK_SECONDS):
                self._notify_changes()
        except Exception as error:
            self.violations.append(f"the operator could not make sense of what a member said: {error!r}")

    def _notify_changes(self) -> None:
        for member in self._seats.members:
            with suppress(TarantoolError, OSError):  # the member is down or busy: the next poll retries
                self._look_at(member)

    def _look_at(self, member: Member) -> None:
        info, configure = ("interop.info", "interop.cfg") if isinstance(member, RealMember) else ("box.info", "box.cfg")
        with Client(member.port, seconds=ANSWER_SECONDS) as client:
            stopped = _stopped(client.call(info))
            for message in stopped:
                self._judge(member, message)
            if stopped:
                self._to_resume.add(member)
                client.call(configure, {"replication": []})
            if member in self._to_resume:
                client.call(configure, {"replication": member.options["replication"]})
                self._to_resume.discard(member)

    def _judge(self, member: Member, message: str) -> None:
        reason = next((reason for text, reason in RIGHTLY.items() if text in message), None)
        if isinstance(member, RealMember):
            reason = "a real server's own"
        elif reason is None:
            self.violations.append(f"{member} follows no more: {message}")
        self.resumed[reason or "another reason"] += 1


def _stopped(info: dict[str, Any]) -> list[str]:
    """Return the reasons of all stopped upstreams."""
    upstreams = (peer.get("upstream") or {} for peer in by_id(info["replication"]).values())
    return [upstream.get("message", "") for upstream in upstreams if upstream.get("status") == "stopped"]
