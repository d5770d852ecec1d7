"""The fast path, slab by slab, gives the same result as the tracker, transaction by transaction."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.history.log_reading import Reading
from flowstone.history.selection import Selection
from flowstone.outside import production
from flowstone.replication.settled_position import SettledTracker
from flowstone.xlog import reader
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import LogTransaction
from tests.history.logs import SYNC_FLAGS, Log

WAIT_SYNC = 2
STEPS = st.sampled_from(["async", "async", "sync", "behind", "confirm", "rollback"])


@pytest.fixture(autouse=True)
def _a_few_blocks_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_SIZE", 150)


def written(directory: Path, steps: list[str]) -> str:
    """Return a log that a server could have written: verdicts name pending transactions."""
    waiting: list[int] = []
    with Log(directory) as log:
        for step in steps:
            if step == "sync":
                waiting.append(log.insert(512, log.lsn, flags=SYNC_FLAGS))
            elif step == "confirm" and waiting:
                log.confirm(waiting.pop(0))
            elif step == "rollback" and waiting:
                log.rollback(waiting[0])
                waiting.clear()
            elif step in ("async", "behind"):
                log.insert(513, log.lsn, flags=WAIT_SYNC if waiting else 0)
    return log.path


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=40))
def test_settled_rows_equal_those_of_the_tracker_alone(steps: list[str]) -> None:
    with TemporaryDirectory() as directory:
        path = written(Path(directory), steps)
        reading = Reading(production(), [path], selection=Selection(show_system=True), settled=True)
        read = [row.lsn for piece in reading.pieces() for row in piece.slab.rows(piece.rows)]
        tracker: SettledTracker[LogTransaction] = SettledTracker()
        kept: list[int] = []
        withdrawn = 0
        with LogFile.open(production().disk, path) as log:
            for transaction in log.transactions():
                for decision in tracker.push(transaction):
                    if decision.kept:
                        kept += [row.lsn for row in decision.transaction.rows]
                    else:
                        withdrawn += len(decision.transaction.rows)
    assert read == kept
    assert reading.report.rows_rolled_back == withdrawn
    assert reading.report.rows_pending == sum(len(transaction.rows) for transaction in tracker.pending)


def test_verdict_after_a_gap_does_not_settle_transactions_before_it(tmp_path: Path) -> None:
    """The transaction may have been rolled back in the gap."""
    log = Log(tmp_path)
    log.insert(512, 1, flags=SYNC_FLAGS)
    first = log.path
    log.writer = log.writer.rotate()
    log.rollback(1)
    log.writer = log.writer.rotate()
    kept = log.insert(512, 3, flags=SYNC_FLAGS)
    confirm = log.confirm(kept)
    log.writer.close()
    reading = Reading(production(), [first, log.path], settled=True, force=True)
    assert lsns(reading) == [kept, confirm]
    assert reading.report.rows_pending == 1


def test_verdict_after_damage_does_not_settle_transactions_before_it(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.insert(512, 1, flags=SYNC_FLAGS)
        log.insert(513, 2)  # settled at once
        start = log.writer.size
        log.rollback(1)
        end = log.writer.size
        kept = log.insert(512, 4, flags=SYNC_FLAGS)
        confirm = log.confirm(kept)
    path = Path(log.path)
    data = bytearray(path.read_bytes())
    data[(start + end) // 2 + 8] ^= 0xFF
    path.write_bytes(data)
    reading = Reading(production(), [log.path], settled=True, force=True)
    assert lsns(reading) == [2, kept, confirm]
    assert reading.report.skipped
    assert reading.report.rows_pending == 1


def lsns(reading: Reading) -> list[int]:
    return [row.lsn for piece in reading.pieces() for row in piece.slab.rows(piece.rows)]
