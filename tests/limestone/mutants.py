"""Deliberate bugs of a Limestone pair, one at a time, that simulated runs must find.

    with MUTANTS["answer_a_session_before_its_sync"]():
        violations = run(seed)

Each is a patch of one decision of the product, removed after the `with`. `ORIGINAL` runs have a model of the original's
master and our replica, `OURS` a master and a replica of ours. Each names the message by which a run finds it: other
messages may come from a patch that no longer fits the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from typing import Any, Final
from unittest.mock import patch

from flowstone.limestone.format import epoch_file, files
from flowstone.limestone.format.epoch_file import EpochWriter
from flowstone.limestone.format.log_scan import FileRepair
from flowstone.limestone.master.propagation import Propagation
from flowstone.limestone.master.replica_link import LinkState, ReplicaLink
from flowstone.limestone.replica.conversations import ControlConversation
from flowstone.limestone.replica.directory import ReplicaDirectory
from flowstone.limestone.replica.log_file_channel import ReceivedSession, ReplicaChannel
from flowstone.limestone.store import recovery
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.store.epochs import Due, EpochRules
from flowstone.outside import Disk
from tests.limestone import original_pair
from tests.limestone.programs import Shape
from tests.simulation.limestone_pair import LimestonePair
from tests.simulation.simulation import Simulation

Make = Callable[[], AbstractContextManager[object]]
Run = Callable[[int], list[str]]


def original(seed: int) -> list[str]:
    return original_pair.run(seed)[0]


def ours(seed: int) -> list[str]:
    """Run a pair of ours alone, with sessions that are in the file long before their end."""
    return _ours(seed, Shape(channels=3, entries=12, pause_seconds=0.3))


def _ours(seed: int, shape: Shape) -> list[str]:
    sim = Simulation(f"mutant/{seed}")

    async def scenario(_: object) -> list[str]:
        pair = LimestonePair(sim, Random(f"{sim.seed}/limestone"), pause_seconds=(0.1, 1.5), shape=shape)
        pair.start()
        await sim.sleep(30)
        return await pair.finish()

    return sim.run(scenario)


@dataclass(frozen=True)
class Mutant:
    """A context manager (`with it():`). `words` is a regular expression for the message of a run that finds the bug."""

    make: Make
    run: Run
    words: str

    def __call__(self) -> AbstractContextManager[object]:
        return self.make()

    def is_found(self, seed: int) -> bool:
        """Return True if a run under the active patch reports it by its message."""
        return any(re.search(self.words, violation) for violation in self.run(seed))


MUTANTS: Final[dict[str, Mutant]] = {}
"""All mutants by name."""


def mutant(run: Run, words: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        MUTANTS[make.__name__] = Mutant(make, run, words)
        return make

    return add


FORGOTTEN: Final = r"epoch \d+ is forgotten|lost epoch \d+"
LOST: Final = r"an acknowledged session of epoch \d+ is lost"
UNFINISHED: Final = r"half of a session|that never ended|beyond repair|it does not start"
DIFFERS: Final = r"differs at epoch \d+"


# --- a replica and its epochs ---


@mutant(original, FORGOTTEN)
def defer_an_epoch_and_keep_the_last_only() -> AbstractContextManager[object]:
    """An epoch with open sessions is acknowledged immediately, and recorded when all of them have ended."""
    record = ControlConversation._record

    async def deferring(self: ControlConversation, master: Any, epoch: int) -> None:
        if master.commits.is_idle:
            await record(self, master, epoch)

    return patch.object(ControlConversation, "_record", deferring)


@mutant(original, UNFINISHED)
def leave_open_sessions_visible() -> AbstractContextManager[object]:
    """The epoch is recorded although it has open sessions, and their markers count."""

    async def hide_unfinished(self: ReplicaDirectory, epoch: int) -> None:
        pass

    return patch.object(ReplicaDirectory, "hide_unfinished", hide_unfinished)


@mutant(original, LOST)
def never_show_hidden_sessions() -> AbstractContextManager[object]:
    """A hidden session stays hidden after its end."""
    hide = ReplicaChannel.hide

    def for_good(self: ReplicaChannel, sessions: list[ReceivedSession]) -> None:
        hide(self, sessions)
        for session in sessions:
            session.is_hidden = False

    return patch.object(ReplicaChannel, "hide", for_good)


@mutant(original, FORGOTTEN)
def acknowledge_an_epoch_before_its_fsync() -> AbstractContextManager[object]:
    """The record of an epoch is appended but not synced."""

    def write(self: EpochWriter, epoch: int) -> None:
        with self._disk.append_to(self._path) as file:
            file.append(epoch_file.record(epoch))

    return patch.object(EpochWriter, "write", write)


# --- a replica and its sessions ---


@mutant(original, rf"{LOST}|{UNFINISHED}")
def acknowledge_a_session_before_its_fsync() -> AbstractContextManager[object]:
    """The end of a session is acknowledged when it is written, before the sync."""

    def flush(self: ReplicaChannel, sync: bool) -> list[ReceivedSession]:
        self._write()
        if not sync:
            return []
        ended, self.ended = self.ended, []
        for session in ended:
            if session.is_hidden:
                self._disk.overwrite(self._path, b"\x02", session.offset)
        self._whole_size = self._size if self.session is None else self.session.offset
        return ended

    return patch.object(ReplicaChannel, "flush", flush)


@mutant(original, rf"{UNFINISHED}|cannot open")
def keep_what_a_lost_master_began() -> AbstractContextManager[object]:
    """An interrupted session stays in the file."""

    def abandon(self: ReplicaChannel) -> None:
        self.flush(False)
        self._whole_size = self._size
        self.session, self.ended = None, []

    return patch.object(ReplicaChannel, "abandon", abandon)


@mutant(original, r"which its master never committed")
def withdraw_nothing() -> AbstractContextManager[object]:
    """Sessions that a dead master has not committed count when the next master commits later epochs."""
    return patch.object(ReplicaDirectory, "_withdraw", lambda self: None)


@mutant(original, r"blob \d+ is missing, or another one")
def store_blobs_without_fsync() -> AbstractContextManager[object]:
    """A blob is written but not synced when its session is acknowledged."""

    def unsynced(disk: Disk, directory: str, name: str, temporary: str, data: bytes) -> None:
        with disk.create(f"{directory}/{temporary}") as file:
            file.append(data)
        disk.rename(f"{directory}/{temporary}", f"{directory}/{name}")

    return patch.object(files, "replace", unsynced)


# --- a pair of ours ---


@mutant(ours, rf"{DIFFERS}|{FORGOTTEN}")
def send_open_sessions_when_catching_up() -> AbstractContextManager[object]:
    """All bytes of a file count as ended sessions."""

    def whole_sizes(self: AsyncDatastore) -> dict[str, int]:
        disk, path = self._outside.disk, self.path
        written = [channel.name for channel in self._channels if channel.has_file]
        return {name: disk.size(f"{path}/{name}") for name in written}

    return patch.object(AsyncDatastore, "finished_sizes", whole_sizes)


@mutant(ours, rf"{DIFFERS}|which has an open session")
def record_an_epoch_with_open_sessions() -> AbstractContextManager[object]:
    """An epoch is recorded at the switch, although sessions of it are open."""
    update = EpochRules._update

    def early(self: EpochRules) -> Due:
        working, self._working = self._working, []
        try:
            return update(self)
        finally:
            self._working = working

    return patch.object(EpochRules, "_update", early)


@mutant(ours, FORGOTTEN)
def report_without_the_replica() -> AbstractContextManager[object]:
    """Durability is reported without waiting for the quorum."""

    async def wait(self: Propagation, waiter: object) -> None:
        pass

    return patch.object(Propagation, "_wait", wait)


@mutant(ours, rf"{DIFFERS}|{FORGOTTEN}")
def count_a_replica_that_is_catching_up() -> AbstractContextManager[object]:
    """A replica counts for the quorum before it has everything that the master has."""

    def has_committed(self: ReplicaLink, epoch: int) -> bool:
        return self.state in (LinkState.LIVE, LinkState.CATCHING_UP)

    return patch.object(ReplicaLink, "has_committed", has_committed)


@mutant(ours, DIFFERS)
def recover_without_marking() -> AbstractContextManager[object]:
    """Sessions after the durable epoch are not marked, and count when later epochs are durable."""
    apply = recovery.apply

    def cut_only(disk: Disk, path: str, changes: FileRepair) -> None:
        apply(disk, path, FileRepair(cut=changes.cut))

    return patch.object(recovery, "apply", cut_only)
