"""The followers of a replica set in a run: programs with `flowstone.follow`, and an archive, each on its own machine.

They suffer faults like nodes: kills, power losses, partitions; the archive, which has data, also disk and clock faults.
The archive resumes where it stopped, from another member if its own has left; a program starts anew from any member.
The settled changes that they received are recorded, and compared at the end with the outcomes (`final_history.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Final

import flowstone
from flowstone.archive.archive import Archive
from flowstone.archive.events import ArchiveEvent, Snapshotted
from flowstone.archive.refusals import ArchiveRefused, UpstreamLostTail
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto.row import Row
from flowstone.iproto.uri import parse_uri
from flowstone.outside import Outside
from flowstone.replica.replica import CannotFollow, Replica
from flowstone.replication.vclock import VClock
from tests.simulation.archive_readers import check_readers
from tests.simulation.disk import Loss, Storage
from tests.simulation.disk_faults import READING
from tests.simulation.endings import LIVE_SECONDS, SHOWN_MAX, Led, Left
from tests.simulation.final_history import FinalHistory, Heard, OnDone, contents_of, difference
from tests.simulation.judged import JUDGED_EVERY, judged
from tests.simulation.logs import CONTROL, NOP, NodeLog, read_log
from tests.simulation.lost_rows import wrongly_lost
from tests.simulation.process_faults import jump
from tests.simulation.replay import Contents, replayed
from tests.simulation.simulation import Crashed, Machine

PAUSE_SECONDS: Final = (4.0, 25.0)
"""Seconds between two faults of a follower."""

RETRY_SECONDS: Final = 2.0
HURT_SECONDS_MAX: Final = 5.0

BYTES_LEFT_MAX: Final = 3_000
FAILING: Final = (("append",), ("create",), ("rename",), ("unlink",), ("sync",), ("sync_directory",), READING)
"""Calls that fail on the disk of an archive for a while."""

INTERVALS_MAX: Final = 3
"""Maximum age of the newest snapshot of a healthy archive, in snapshot intervals."""
CONNECT_SECONDS: Final = 30.0


class Followers:
    """Call `start()` when the set is formed, `finish()` while it runs after all faults, then `check()`."""

    def __init__(
        self,
        replica_set: Led,
        rng: Random,
        *,
        listeners: int = 1,
        has_archive: bool = False,
        has_one_order: bool = False,
    ) -> None:
        self._set = replica_set
        self._random = rng
        self._listeners = [Listener(replica_set, f"listener{number + 1}") for number in range(listeners)]
        self._archivers = [Archiver(replica_set, rng)] if has_archive else []
        self._tasks: list[asyncio.Task[None]] = []
        self._has_one_order = has_one_order

    def start(self) -> None:
        """Start the followers and their faults."""
        for follower in self._all():
            rng = Random(self._random.random())
            self._tasks.append(asyncio.get_running_loop().create_task(self._keep_going(follower, rng)))

    def _all(self) -> list[Listener | Archiver]:
        return [*self._listeners, *self._archivers]

    async def finish(self) -> list[str]:
        """Stop the faults; wait until the followers are in sync, and stop them."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        found = [f"{error!r} in a follower" for error in ended if isinstance(error, Exception)]
        self._set.sim.heal()
        for follower in self._all():
            self._set.sim.storage(follower.name).spare()
            found += await self._finish(follower)
        return found

    async def _finish(self, follower: Listener | Archiver) -> list[str]:
        if not self._set.sim.is_running(follower.name):
            await follower.start(self._random.choice(self._set.members))
        target = self._set.sim.node(self._set.members[0])._instance.vclock.without_zero()
        deadline = self._set.sim.now + LIVE_SECONDS
        while not target <= follower.position:
            if self._set.sim.now > deadline:
                return [f"{follower.name} came to {follower.position} only, the set is at {target}"]
            await self._set.sim.sleep(RETRY_SECONDS)
            await follower.tend(self._random.choice(self._set.members))
        found = await follower.linger()
        await follower.stop()
        return found

    async def _keep_going(self, follower: Listener | Archiver, rng: Random) -> None:
        while True:
            await follower.tend(rng.choice(self._set.members))
            await self._set.sim.sleep(rng.uniform(*PAUSE_SECONDS))
            if self._set.sim.is_running(follower.name):
                await self._hurt(follower, rng)

    async def _hurt(self, follower: Listener | Archiver, rng: Random) -> None:
        sim, name = self._set.sim, follower.name
        seconds = rng.uniform(0, HURT_SECONDS_MAX)
        match rng.randrange(8 if isinstance(follower, Archiver) else 5):
            case 0:
                sim.kill(name)
            case 1:
                sim.crash(name, rng.choice([Loss.UNSYNCED, Loss.ANY]))
            case 2:
                sim.crash_after(name, rng.randrange(1, 200), rng.choice(list(Loss)))
            case 3:
                await follower.stop()
            case 4:
                break_link = rng.choice([sim.cut, sim.black_hole])
                break_link(name, follower.upstream)
                await sim.sleep(seconds)
                sim.heal(name, follower.upstream)
                return
            case 5:
                with _wrong_clock(sim.machine(name), jump(rng)):
                    await sim.sleep(3 * seconds)
                return
            case 6:
                with _full(sim.storage(name), rng.randrange(BYTES_LEFT_MAX)):
                    await sim.sleep(seconds)
                return
            case 7:
                operations = rng.choice(FAILING)
                if operations is READING:
                    sim.kill(name)
                with _failing(sim.storage(name), operations):
                    if operations is READING:
                        await follower.start(follower.upstream)
                    await sim.sleep(seconds)
                return
        await sim.sleep(seconds)

    def check(self, left: Left) -> list[str]:
        """Compare the received changes with the outcomes in the directories of all nodes, past and present."""
        history = FinalHistory(left.logs, left.departed)
        heard = [each for listener in self._listeners for each in listener.heard]
        found = [wrong for each in heard for wrong in each.check(history, has_one_order=self._has_one_order)]
        found += [each for listener in self._listeners for each in listener.violations]
        for archiver in self._archivers:
            found += [*archiver.check(history), *archiver.check_lost(history, left)]
        return [*history.conflicts, *found]


@contextmanager
def _wrong_clock(machine: Machine, seconds: float) -> Iterator[None]:
    machine.wall_skew += seconds
    try:
        yield
    finally:
        machine.wall_skew -= seconds


@contextmanager
def _full(storage: Storage, left: int) -> Iterator[None]:
    """Fill the disk up to `left` bytes."""
    taken = max(storage.room - left, 0)
    storage.room -= taken
    try:
        yield
    finally:
        storage.room += taken


@contextmanager
def _failing(storage: Storage, operations: Iterable[str]) -> Iterator[None]:
    storage.broken.update(operations)
    try:
        yield
    finally:
        storage.broken.clear()


class Listener:
    """A program with `flowstone.follow`; `heard` has what it received, one piece per life."""

    def __init__(self, replica_set: Led, name: str) -> None:
        self.name = name
        self.upstream = ""
        self.heard: list[Heard] = []
        self.violations: list[str] = []
        self._set = replica_set
        self._sim = replica_set.sim
        self._replica: Replica | None = None
        self._sim.build(name)

    @property
    def position(self) -> VClock:
        return self._replica.vclock if self._replica is not None else VClock()

    async def tend(self, upstream: str) -> None:
        """Keep the program running and following a member."""
        if self._sim.is_running(self.name) and self.upstream not in self._set.members:
            await self.stop()
        if not self._sim.is_running(self.name):
            await self.start(upstream)

    async def start(self, upstream: str) -> None:
        self.upstream, self._replica = upstream, None
        with suppress(CannotFollow, Crashed):
            await self._sim.launch(self.name, self._follow)

    async def _follow(self, outside: Outside) -> Replica:
        uri = parse_uri(self._sim.uri(self.upstream))
        replica = Replica(outside, uri, connect_timeout=CONNECT_SECONDS)
        await replica.start()
        heard = Heard(f"{self.name} of {self.upstream}", replica.vclock, _contents(replica))
        self.heard.append(heard)
        self._replica = replica

        @replica.on_change
        def changed(changes: list[flowstone.SettledChange]) -> None:
            for change in changes:
                is_of_tuple = change.type != "DROP"  # the space had no tuples
                if is_of_tuple and change.space_id is not None and change.space_id >= FIRST_USER_SPACE_ID:
                    old, new = (None if image is None else image.raw for image in (change.old, change.new))
                    heard.told.append(OnDone((change.replica_id, change.lsn), old, new))
                    self._check_decided(change.replica_id, change.lsn)

        @replica.on_resync
        def leapt(before: VClock, after: VClock) -> None:
            heard.leaps.append((before, after))

        return replica

    def _check_decided(self, replica_id: int, lsn: int) -> None:
        """Check that the member that sent a change had decided it before."""
        if not self._sim.is_ready(self.upstream):
            return
        pending = self._sim.node(self.upstream)._instance.queue.limbo.pending
        if any(entry.origin_id == replica_id and entry.first_lsn <= lsn <= entry.lsn for entry in pending):
            self.violations.append(
                f"{self.name} was told of {(replica_id, lsn)} while it waited for a verdict on {self.upstream}"
            )

    async def linger(self) -> list[str]:
        """Wait until the program is in sync."""
        return []

    async def stop(self) -> None:
        replica = self._replica
        with suppress(Crashed):
            await self._sim.stop(self.name)
            if replica is not None:
                self.heard[-1].end, self.heard[-1].end_contents = replica.vclock, _contents(replica)


def _contents(replica: Replica) -> Contents:
    return contents_of((number, list(space.tuples())) for number, space in replica.box.spaces.items())


class ArchiveProcess:
    """An archive that runs until it is stopped or gives up."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._running = asyncio.get_running_loop().create_task(archive.run())
        # The process may be killed before anyone reads why it gave up.
        self._running.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def failure(self) -> BaseException | None:
        """The error with which the archive gave up; None while it runs."""
        return self._running.exception() if self._running.done() and not self._running.cancelled() else None

    async def stop(self) -> None:
        self.archive.stop()
        with suppress(FlowstoneError, OSError):
            await self._running


class Archiver:
    """An archive that resumes in its directory, or starts a new one if its upstream lacks rows that it has."""

    def __init__(self, replica_set: Led, rng: Random) -> None:
        self._set = replica_set
        self._sim = replica_set.sim
        self._interval = rng.choice([10.0, 1000.0])
        self._process: ArchiveProcess | None = None
        self._names: list[str] = []
        self._settled = VClock()
        self._snapshot_at = 0.0
        self._failure_count = 0
        """Number of disk failures that have been accounted for."""
        self._lost: list[tuple[str, UpstreamLostTail]] = []
        """Each case in which an upstream lacked rows, as text and as the error."""
        self.upstream = ""
        self.violations: list[str] = []
        self._begin_anew()
        self._sim.before_death.append(self._before_death)

    @property
    def name(self) -> str:
        return self._names[-1]

    @property
    def position(self) -> VClock:
        return self._process.archive.position if self._process is not None else VClock()

    def _begin_anew(self) -> None:
        self._names.append(f"archive{len(self._names) + 1}")
        self._settled = VClock()
        self._failure_count = 0
        self._sim.build(self.name)

    async def tend(self, upstream: str) -> None:
        """Keep the archive running and following a member."""
        if self._process is not None and (failure := self._process.failure) is not None:
            await self.stop()
            self._judge(failure)
        elif self._sim.is_running(self.name) and self.upstream not in self._set.members:
            await self.stop()
        if not self._sim.is_running(self.name):
            await self.start(self.upstream if self.upstream in self._set.members else upstream)

    async def start(self, upstream: str) -> None:
        self.upstream, self._process = upstream, None
        with suppress(Crashed):
            self._process = await self._sim.launch(self.name, self._archive)

    async def _archive(self, outside: Outside) -> ArchiveProcess:
        uri, directory = self._sim.uri(self.upstream), f"/{self.name}"
        interval = self._interval
        archive = Archive(uri, directory, snapshot_interval=interval, on_event=self._hear, outside=outside)
        return ArchiveProcess(archive)

    def _hear(self, event: ArchiveEvent) -> None:
        if isinstance(event, Snapshotted):
            self._snapshot_at = self._sim.now

    async def linger(self) -> list[str]:
        """Wait until the newest snapshot is recent enough, whatever the clock and the disk did."""
        end = self._sim.now + 2 * self._interval
        while (age := self._sim.now - self._snapshot_at) > INTERVALS_MAX * self._interval:
            if self._sim.now > end:
                return [f"the newest snapshot of {self.name} is of {age:.1f} s ago, they come every {self._interval} s"]
            await self._sim.sleep(RETRY_SECONDS)
        return []

    async def stop(self) -> None:
        self._note()
        with suppress(Crashed):
            await self._sim.stop(self.name)
        self._process = None

    def _judge(self, failure: BaseException) -> None:
        """Check why the archive gave up.

        A disk failure is allowed if the archive can resume; so is an upstream that lacks rows. `check_lost` decides at
        the end whether the set was free to lose these rows.
        """
        failure_count = self._sim.storage(self.name).failure_count
        if _is_of_disk(failure) and failure_count > self._failure_count:
            self._failure_count = failure_count
            return
        what = f"{self.name} of {self.upstream} gave up: {failure}"
        if isinstance(failure, UpstreamLostTail):
            self._lost.append((what, failure))
        else:
            self.violations.append(what)
        self.upstream = ""
        self._begin_anew()

    def _before_death(self, name: str, loss: Loss) -> None:
        if name == self.name:
            self._note()
            self._process = None

    def _note(self) -> None:
        """Check that a settled position stays settled, and that the archive's own log has the verdicts for it."""
        settled = self._process.archive.settled if self._process is not None else VClock()
        if not settled:
            return
        if not self._settled <= settled:
            self.violations.append(f"{self.name} had settled {self._settled}, and now {settled}")
        self._settled = settled
        storage = self._sim.storage(self.name)
        if storage.broken:  # the log is unreadable now; the next check will read it
            return
        log = read_log(self.name, storage)
        undecided = [
            position for position, _, record in log.positions() if record.is_kept is None and not record.is_before_gap
        ]
        early = [(replica_id, lsn) for replica_id, lsn in undecided if lsn <= settled.get(replica_id)]
        if early:
            self.violations.append(f"{self.name} has {settled} for settled, and no verdict on {early[:5]}")

    def check_lost(self, history: FinalHistory, left: Left) -> list[str]:
        """Check that the archive gave up only for rows that the set was free to lose."""
        found = []
        for what, failure in self._lost:
            if wrongs := wrongly_lost(failure.missing, left.logs, left.departed_whole, history):
                found.append(f"{what}; {', '.join(wrongs[:SHOWN_MAX])}")
        return found

    def check(self, history: FinalHistory) -> list[str]:
        """Check that its files match the history; the last directory must be complete."""
        found = self.violations
        for name in self._names:
            if self._sim.storage(name).names:
                log = read_log(name, self._sim.storage(name))
                found += _check_archived(log, history)
                if isinstance(self._sim.seed, int) and self._sim.seed % JUDGED_EVERY == 0:
                    found += judged(name, self._sim.storage(name))
                found += check_readers(log, self._sim.storage(name), history, is_whole=name == self.name)
                if name == self.name:
                    found += _check_whole(log, history)
        return found


def _is_of_disk(failure: BaseException) -> bool:
    """Return True if the error names a file or has advice about the disk."""
    hint = failure.hint if isinstance(failure, ArchiveRefused) else None
    return isinstance(failure, OSError) or (hint or "").startswith(("repair the disk", "free space"))


def _check_archived(log: NodeLog, history: FinalHistory) -> list[str]:
    found = []
    last: dict[int, int] = {}
    for position, row, record in log.positions():
        if position[1] <= last.get(position[0], 0):
            found.append(f"{log.name} has {position} behind {last}")
        last[position[0]] = position[1]
        # A node that had decided already wrote and relayed a NOP in place of the row.
        if record.is_kept and not record.is_nop and position in history.withdrawn:
            found.append(f"{log.name} has {position} for a fact, which was rolled back")
        elif record.is_kept is False and position in history.rows:
            found.append(f"{log.name} has {position} for rolled back, which is a fact")
        elif position in history.rows and not _is_same(history.rows[position], row):
            found.append(f"{log.name} has another row at {position}")
    return found


def _is_same(ours: Row, archived: Row) -> bool:
    """Return True if the rows are equal.

    A late verdict has no effect elsewhere, and archives keep it: its transactions are decided.
    """
    return ours.body == archived.body or (archived.type == NOP and ours.type in CONTROL)


def _check_whole(log: NodeLog, history: FinalHistory) -> list[str]:
    vclock = dict(log.snapshot_vclock)
    for (replica_id, lsn), _, _ in log.positions():
        vclock[replica_id] = max(lsn, vclock.get(replica_id, 0))
    found, expected = replayed(log), history.contents(VClock(vclock))
    ours = {number: tuples for number, tuples in found.items() if number >= FIRST_USER_SPACE_ID and tuples}
    return [f"{log.name} gives {difference(ours, expected)}"] if ours != expected else []
