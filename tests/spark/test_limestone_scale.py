"""Source `limestone` on many entries, and during writes of a master: states, compaction, and each epoch once.

At full scale there are 2 million entries in 8 files, otherwise some thousands.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession

import flowstone.spark
from flowstone.limestone.format.entries import WriteVersion
from flowstone.limestone.format.names import is_pwal
from flowstone.limestone.store.blocking import Datastore
from flowstone.limestone.store.compaction import write_here
from flowstone.limestone.store.recovery import recover
from flowstone.outside import production
from flowstone.spark.restoration.limestone_compact import writer
from tests.conftest import FULL
from tests.spark.limestone_directories import WrittenDirectory, clear, snippet

FILES = 8
SESSIONS = 25
ENTRIES = 10_000 if FULL else 100
"""Number of entries per session."""

KEYS = FILES * SESSIONS * ENTRIES // 4
DISK = production().disk

_PUT = np.dtype(
    [("kind", "u1"), ("sizes", "<u4", 2), ("storage", "<u8"), ("key", "S12"), ("version", "<u8", 2), ("value", "S40")]
)
_REMOVE = np.dtype([("kind", "u1"), ("size", "<u4"), ("storage", "<u8"), ("key", "S12"), ("version", "<u8", 2)])


def session(random: np.random.Generator, epoch: int, channel: int) -> bytes:
    """Return the entries of a session, an eighth of which are removes."""
    count = ENTRIES
    removes = count // 8
    puts, gone = np.zeros(count - removes, _PUT), np.zeros(removes, _REMOVE)
    for rows in (puts, gone):
        rows["storage"] = random.choice([1, 2, 3, 1 << 33], len(rows))
        rows["key"] = np.char.zfill(random.integers(KEYS, size=len(rows)).astype("S12"), 12)
        rows["version"][:, 0] = random.integers(max(1, epoch - 1), epoch + 1, len(rows))  # some entries are late
        rows["version"][:, 1] = random.integers(1 << 63, size=len(rows), dtype=np.uint64) * 2 + channel % 2
    puts["kind"], puts["sizes"], gone["kind"], gone["size"] = 1, (12, 40), 5, 12
    puts["value"] = np.char.zfill(random.integers(1 << 40, size=len(puts)).astype("S40"), 40)
    return puts.tobytes() + gone.tobytes()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory with clearings, a session that is not durable, and a torn tail."""
    written = WrittenDirectory(tmp_path_factory.mktemp("limestone") / "d")
    random = np.random.default_rng(1)
    for channel in range(FILES):
        parts: list[bytes] = []
        for epoch in range(1, SESSIONS + 1):
            empty = snippet(epoch)
            parts += [empty[:9], session(random, epoch, channel), empty[9:]]
            if channel == 3 and epoch in (7, 19):
                parts.append(snippet(epoch, clear(2 if epoch == 7 else 3, epoch, 1 << 62)))
        parts += [snippet(SESSIONS + 1)[:9], session(random, SESSIONS + 1, channel)]
        data = b"".join(parts)
        written.append(f"pwal_{channel:04d}", data[:-7] if channel % 2 else data)
    written.durable(SESSIONS)
    return written.path


def test_state_equals_the_cursor_of_the_directory(spark: SparkSession, directory: str) -> None:
    flowstone.spark.register(spark)
    frame = spark.read.format("limestone").option("mode", "state").load(directory)
    state = frame.select("storage_id", "key", "value").toArrow()
    cursor = recover(DISK, directory, repairs=False).snapshot.cursor()
    rows = pa.table(
        [pa.array(column) for column in zip(*((row.storage_id, row.key, row.value) for row in cursor), strict=True)],
        names=state.column_names,
    )
    order = [("storage_id", "ascending"), ("key", "ascending")]
    assert state.num_rows > KEYS // 2
    assert state.sort_by(order).cast(rows.schema).equals(rows.sort_by(order))
    changes = spark.read.format("limestone").option("columns", "_commit_version").load(directory)
    assert changes.count() == FILES * SESSIONS * ENTRIES + 2


def test_compaction_on_spark_equals_the_local_one(spark: SparkSession, directory: str, tmp_path: Path) -> None:
    inputs = [name for name in sorted(os.listdir(directory)) if is_pwal(name)]
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    expected = write_here(DISK, directory, inputs, SESSIONS, here)
    assert writer(spark)(DISK, directory, inputs, SESSIONS, there) == expected
    assert Path(here).read_bytes() == Path(there).read_bytes()


# --- a writing master ---------------------------------------------------------------------------------------------

EPOCHS = 400 if FULL else 60
RESTARTS = 5


def until(condition: Callable[[], bool], seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, "timed out"
        time.sleep(0.05)


class Master:
    """Writes sessions on two channels, epoch after epoch, and compacts occasionally, in its own threads."""

    def __init__(self, path: str) -> None:
        self.store = Datastore(path)
        self.channels = [self.store.create_channel() for _ in range(2)]
        self.store.ready()
        self.written: list[tuple[int, int, bytes]] = []
        self.reached = 0
        self.allowed = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        compaction: threading.Thread | None = None
        for epoch in range(1, EPOCHS + 1):
            self.allowed.acquire()
            self.store.switch_epoch(epoch)
            for number, channel in enumerate(self.channels):
                channel.begin_session()
                for entry in range(epoch % 7):
                    key = b"%d-%d-%d" % (epoch, number, entry)
                    channel.add_entry(number, key, b"x" * entry * 100, WriteVersion(epoch, entry))
                    self.written.append((epoch, number, key))
                channel.end_session()
            self.reached = epoch
            if epoch % 20 == 10 and (compaction is None or not compaction.is_alive()):
                compaction = threading.Thread(target=self.store.compact, daemon=True)
                compaction.start()
        self.store.switch_epoch(EPOCHS + 1)
        if compaction is not None:
            compaction.join(60)

    def let(self, epochs: int) -> None:
        """Let the master write this number of further epochs."""
        self.allowed.release(epochs)

    def close(self) -> None:
        self.let(EPOCHS)
        self._thread.join(120)
        self.store.shutdown()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    found = Master(str(tmp_path / "log"))
    yield found
    found.close()


def test_each_durable_epoch_is_delivered_once_during_writes_rotation_and_compaction(
    spark: SparkSession, tmp_path: Path, master: Master
) -> None:
    flowstone.spark.register(spark)
    batches: dict[int, pa.Table] = {}

    def keep(frame: DataFrame, number: int) -> None:
        batches[number] = frame.toArrow()  # a repeated batch replaces the earlier one

    def delivered() -> int:
        return max((pc.max(each["_commit_version"]).as_py() or 0 for each in list(batches.values())), default=0)

    source = spark.readStream.format("limestone").option("columns", "_commit_version,storage_id,key")

    def run(wanted: int) -> None:
        frame = source.option("maxRowsPerTrigger", 100).load(str(tmp_path / "log"))
        writing = frame.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writing.foreachBatch(keep).start()
        try:
            master.let(EPOCHS // (RESTARTS + 1))
            until(lambda: query.exception() is not None or delivered() >= wanted, 120)
            assert query.exception() is None
        finally:
            query.stop()

    for number in range(1, RESTARTS + 2):
        run(number * (EPOCHS // (RESTARTS + 1)) - 4)  # some of the last epochs are not durable, or empty
    master.let(EPOCHS)
    until(lambda: master.store.durable_epoch >= EPOCHS, 60)
    rest = source.load(str(tmp_path / "log")).writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = rest.trigger(availableNow=True).foreachBatch(keep).start()
    query.awaitTermination(120)
    whole: Any = pa.concat_tables(batches.values()).to_pylist()
    found = sorted((row["_commit_version"], row["storage_id"], row["key"]) for row in whole)
    assert found == sorted(master.written)
    assert any(name == "pwal_0000.compacted" for name in os.listdir(tmp_path / "log"))
