"""Deliberate bugs in logs, snapshots, recovery, replication, and archives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest.mock import patch
from zlib import crc32

from flowstone.archive.store import ArchiveStore
from flowstone.box.engine.transaction import InteractiveTransaction
from flowstone.node import components as parts
from flowstone.node.downstream.relay_stream import Relay
from flowstone.node.synchro.limbo_driver import LimboDriver
from flowstone.node.wal.replay import Replay
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.settled_position import SettledTracker
from flowstone.replication.vclock import VClock
from flowstone.xlog.writer import LogWriter
from tests.simulation.mutations import CLIENTS_SAW, mutation
from tests.simulation.mutations_elections import DIFFERENT_DATA

UNREADABLE: Final = r"did not start: |does not start: |DamagedFile|LsnUsedTwice|XlogError"


# --- the log ---


@mutation(r"^\w+ has started with rows of \S+ that it would lose with the power now")
def leave_a_recovered_log_unsynced() -> AbstractContextManager[object]:
    """A restarted node sends recovered rows that are only in the kernel's memory."""
    return patch.object(parts, "make_durable", lambda disk, directory, last: None)


@mutation(rf"{UNREADABLE}|{DIFFERENT_DATA}")
@contextmanager
def write_behind_a_failed_write() -> Iterator[None]:
    """The remains of a failed write stay in the file, and the next write follows them."""

    def cut(self: LogWriter, size: int) -> None:
        self.size = size

    def mend(self: LogWriter) -> None:
        self._is_usable = True

    with patch.multiple(LogWriter, _cut=cut, mend=mend):
        yield


@mutation(rf"{UNREADABLE}|{DIFFERENT_DATA}")
def write_behind_a_torn_end() -> AbstractContextManager[object]:
    """A log that was torn in a crash is continued after the tear."""

    def resume(disk: Any, path: str, meta: Any, vclock: Any, size: int) -> LogWriter:
        file = disk.append_to(path)
        file.sync()
        return LogWriter(disk, file, path, meta, dict(vclock), size)

    return patch.object(LogWriter, "resume", resume)


# --- snapshots and recovery ---


@mutation(r"^\w+ had .* confirmed, and now|any more: .*[Ss]plit")
def forget_in_a_snapshot_what_was_confirmed() -> AbstractContextManager[object]:
    """A snapshot contains the owner of the queue, but not its confirmed positions."""

    def checkpoint(self: LimboDriver) -> Promote:
        state = self.limbo.checkpoint()
        return Promote(state.owner_id, 0, state.term, VClock())

    return patch.object(LimboDriver, "checkpoint", checkpoint)


@mutation(rf"{DIFFERENT_DATA}|{CLIENTS_SAW}")
def take_what_waits_for_a_fact_at_the_start() -> AbstractContextManager[object]:
    """After a restart, transactions without a verdict in the log count as confirmed."""
    return patch.object(Replay, "pending", property(lambda self: ()))


@mutation(rf"{DIFFERENT_DATA}|{CLIENTS_SAW}|^listener\d+ |^archive\d+\b")
def take_a_rollback_for_a_confirmation() -> AbstractContextManager[object]:
    """A reader of the log treats rolled-back transactions as committed."""

    def withdraw(self: SettledTracker[Any], lsn: int) -> None:
        for entry in self._queue:
            entry.verdict = True

    return patch.object(SettledTracker, "_withdraw", withdraw)


# --- replication ---


@mutation(rf"{DIFFERENT_DATA}|{CLIENTS_SAW}|^listener\d+ |^archive\d+\b")
def lose_rows_on_the_way() -> AbstractContextManager[object]:
    """A relay sometimes skips rows as if they had been sent."""
    original = Relay._send

    def send(self: Relay, packets: bytes, after: VClock) -> None:
        original(self, b"" if packets and crc32(packets) % 50 == 0 else packets, after)

    return patch.object(Relay, "_send", send)


# --- transactions ---


@mutation(CLIENTS_SAW)
def commit_in_spite_of_a_conflict() -> AbstractContextManager[object]:
    """An interactive transaction does not check whether its reads are still current."""
    return patch.object(InteractiveTransaction, "_validate", lambda self: None)


# --- archives ---


@mutation(r"^archive\d+ has .* for settled, and no verdict on")
def settle_what_an_archive_has() -> AbstractContextManager[object]:
    """An archive reports everything that it has as settled."""
    return patch.object(ArchiveStore, "settled", property(lambda self: self.vclock))
