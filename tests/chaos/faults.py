"""Faults in a set of processes: each starts, lasts and heals on its own, and reports whether it had an effect.

Two nemeses work concurrently: one on processes and their disks, one on the network. Both are seeded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Final

from flowstone.iproto.errors import TarantoolError
from tests.chaos.seats import OPTIONS, Seats
from tests.interop.client import Client
from tests.interop.member import Member, RealMember
from tests.interop.proxy import Proxy, Way

Fault = Callable[[], bool]

BETWEEN_SECONDS: Final = 1.0
"""Average time between two faults of a nemesis."""

LONG_SECONDS: Final = 4.0
LASTING_SECONDS: Final = 12.0
"""Longer than the watcher waits for a finding about a member that lags: shorter faults do not test what is reported."""

SHORT_SECONDS: Final = 0.3
ANSWER_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 0.001
"""Polling interval for the start of a snapshot: a small one takes some hundredths of a second."""

FELT_SECONDS: Final[float] = OPTIONS["replication_timeout"]
"""A pause of this length skips at least one heartbeat."""

FULL: Final = "No space left on device", "File too large"
"""Error texts of a node about a full disk, and about a file at its size limit."""


class Nemesis:
    """Injects one fault after another until stopped. `counts`: the faults that had an effect."""

    def __init__(self, seats: Seats, rng: Random) -> None:
        self.seats = seats
        self.random = rng
        self.counts: Counter[str] = Counter()
        self.timeline: list[str] = []
        self._hit: list[Member] = []
        self.problem: BaseException | None = None
        self._ending = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def faults(self) -> dict[str, Fault]:
        raise NotImplementedError

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current fault has healed."""
        self._ending.set()
        self._thread.join()

    def look_around(self) -> None:
        """Wait, before each fault, until no fault of its kind is active."""

    def _run(self) -> None:
        faults = self.faults()
        try:
            while not self._ending.wait(self.random.expovariate(1 / BETWEEN_SECONDS)):
                self.look_around()
                self._cause(*self.random.choice(list(faults.items())))
        except BaseException as error:
            self.problem = error

    def _cause(self, name: str, fault: Fault) -> None:
        began, self._hit = datetime.now(UTC), []
        is_felt = fault()
        self.counts[name] += is_felt
        whom = " ".join(member.name for member in self._hit)
        end = "" if is_felt else ", which nobody felt"
        self.timeline.append(f"{began:%T.%f} to {datetime.now(UTC):%T.%f}: {name}, {whom}{end}")

    def wait(self, most: float = LONG_SECONDS) -> None:
        """Wait for the duration of a fault; short ones are frequent."""
        self._ending.wait(self.random.uniform(SHORT_SECONDS, most) * self.random.random())

    def some(self, members: Sequence[Member], most: int) -> list[Member]:
        """Return from one to `most` of the members."""
        return self.pick(members, self.random.randint(1, most))

    def pick(self, members: Sequence[Member], count: int = 1) -> list[Member]:
        self._hit = self.random.sample(members, count)
        return self._hit


class ProcessNemesis(Nemesis):
    """Kills, pauses and stops processes, fills disks, takes snapshots; promotes nodes in sets with elections."""

    def faults(self) -> dict[str, Fault]:
        faults = {
            "one killed": lambda: self._kill(self.pick(self.seats.members)),
            "several killed": lambda: self._kill(self.some(self.seats.members, len(self.seats.members) - 1)),
            "all killed": lambda: self._kill(self.pick(self.seats.members, len(self.seats.members))),
            "paused": lambda: self._pause(self.some(self.seats.members, 2)),
            "stopped": self._stop,
            "full disk": self._fill,
            "snapshot": lambda: self._snapshot(is_killed=False),
            "killed in a snapshot": lambda: self._snapshot(is_killed=True),
        }
        return faults | ({"promoted": self._promote} if self.seats.has_elections else {})

    def look_around(self) -> None:
        """Check that no process has exited by itself. Restart real servers that exited or hang: they are not under
        test.
        """
        for member in [one for one in self.seats.members if not one.is_running]:
            assert isinstance(member, RealMember), f"{member} has ended by itself with {member.exit_code()}"
            self.counts["a real server died by itself"] += 1
            self.seats.start(member)
        if self.seats.help():
            self.counts["a real server's queue stood still"] += 1

    def _kill(self, members: Sequence[Member], is_felt: Callable[[], bool] = lambda: True) -> bool:
        """Kill and restart members. `is_felt` is evaluated while they are down."""
        with self.seats.calm(members):
            for member in members:
                member.kill()
            answer = is_felt()
            self.wait()
            self.seats.start(*members)
        return answer

    def _stop(self) -> bool:
        (member,) = self.pick(self.seats.members)
        with self.seats.calm([member]):
            member.stop()
            # A real server may have exited by itself just before: it is not under test.
            is_fine = isinstance(member, RealMember) or member.exit_code() == 0
            assert is_fine, f"{member} was stopped and ended with {member.exit_code()}"
            self.wait()
            self.seats.start(member)
        return True

    def _pause(self, members: Sequence[Member]) -> bool:
        for member in members:
            member.pause()
        began = time.monotonic()
        self.wait(2 * LONG_SECONDS)
        seconds = time.monotonic() - began
        for member in members:
            member.resume()
        return seconds >= FELT_SECONDS

    def _fill(self) -> bool:
        (member,) = self.pick(self.seats.nodes)
        before = len(member.log())
        disk = self.seats.disks[member]
        try:
            if disk.fill():
                self.wait()
        finally:
            disk.empty()
        said = member.log()[before:]
        return any(text in said for text in FULL)

    def _snapshot(self, *, is_killed: bool) -> bool:
        """Take a snapshot on a node that all members follow: in 2.6, no node knows which logs other members need."""
        (member,) = self.pick(self.seats.nodes)
        if not self.seats.is_followed(member):
            return False
        answers: list[bool] = []
        asking = Thread(target=lambda: answers.append(_ask(member, "box.snapshot")), daemon=True)
        asking.start()
        is_caught = is_killed and self._kill_in_snapshot(member, asking)
        asking.join()
        return is_caught if is_killed else answers == [True]

    def _kill_in_snapshot(self, member: Member, asking: Thread) -> bool:
        """Kill the member shortly after its file is created; effective if the file was incomplete."""
        directory = self.seats.disks[member].directory
        while asking.is_alive() and not unfinished(directory):
            time.sleep(LOOK_SECONDS)
        time.sleep(self.random.uniform(0, 2 * LOOK_SECONDS))
        return self._kill([member], lambda: unfinished(directory))

    def _promote(self) -> bool:
        (member,) = self.pick(self.seats.members)
        return _ask(member, "box.ctl.promote")


def unfinished(directory: Path) -> bool:
    """Return True if `directory` has an unfinished snapshot."""
    return any(directory.glob("*.snap.inprogress"))


def _ask(member: Member, function: str) -> bool:
    """Return True if the member accepted the call."""
    with suppress(TarantoolError, OSError), Client(member.port, seconds=ANSWER_SECONDS) as client:
        client.call(function)
        return True
    return False


class WireNemesis(Nemesis):
    """Cuts, drops, delays and throttles traffic between members, and between clients and members."""

    def faults(self) -> dict[str, Fault]:
        return {
            "wire cut": lambda: self._trouble(self._pair(), Proxy.cut),
            "member cut off": lambda: self._trouble(self._around(), Proxy.cut),
            "black hole": lambda: self._trouble(self._around(), Proxy.hold),
            "follower cut off for long": self._cut_off_for_long,
            "one way only": self._one_way,
            "delayed": lambda: self._trouble(self._around(), lambda wire: wire.delay(self.random.uniform(0.01, 0.4))),
            "clogged": lambda: self._trouble(self._around(), lambda wire: wire.clog(self.random.uniform(100, 5000))),
            "flapping": self._flap,
            "clients cut": lambda: self._trouble(self._door(), Proxy.cut),
            "clients in a black hole": lambda: self._trouble(self._door(), Proxy.hold),
        }

    def _pair(self) -> list[Proxy]:
        """Return the links between two members."""
        one, two = self.pick(self.seats.members, 2)
        return [self.seats.mesh.wire(one, two), self.seats.mesh.wire(two, one)]

    def _around(self) -> list[Proxy]:
        """Return the links between one member and all others."""
        return self.seats.mesh.wires(*self.pick(self.seats.members))

    def _door(self) -> list[Proxy]:
        return [self.seats.doors[member] for member in self.pick(self.seats.members)]

    def _cut_off_for_long(self) -> bool:
        """Isolate a member for long, but not the only writer of synchronous spaces: all its clients would wait."""
        followers = [member for member in self.seats.members if member is not self.seats.master]
        wires = self.seats.mesh.wires(*self.pick(followers))
        return self._trouble(wires, self.random.choice((Proxy.cut, Proxy.hold)), seconds=LASTING_SECONDS)

    def _trouble(
        self, wires: Sequence[Proxy], begin: Callable[[Proxy], object], *, seconds: float | None = None
    ) -> bool:
        before = _troubled(wires)
        for wire in wires:
            begin(wire)
        if seconds is None:
            self.wait()
        else:
            self._ending.wait(seconds)
        for wire in wires:
            wire.heal()
        return _troubled(wires) > before

    def _one_way(self) -> bool:
        """Drop traffic between one member and all others, in one direction."""
        (member,) = self.pick(self.seats.members)
        there, back = self.random.sample(list(Way), 2)
        wires = self.seats.mesh.wires(member)
        own = {self.seats.mesh.wire(member, other) for other in self.seats.mesh.others(member)}
        return self._trouble(wires, lambda wire: wire.hold(there if wire in own else back))

    def _flap(self) -> bool:
        wires = self._around()
        before = _troubled(wires)
        ends = time.monotonic() + self.random.uniform(SHORT_SECONDS, LONG_SECONDS)
        while time.monotonic() < ends and not self._ending.wait(SHORT_SECONDS):
            for wire in wires:
                wire.disconnect()
        return _troubled(wires) > before


def _troubled(wires: Sequence[Proxy]) -> int:
    return sum(wire.troubled for wire in wires)
