"""The mirror into Delta: beside Spark writing the same rows, beside the server's own snapshots, and for minutes under
changes of random keys.

One real server has all rows; everything else runs in one Spark session on this machine, the steady part as the command
in a process of its own, whose memory is watched. `python -m bench.spark_mirror --rows 200000 --seconds 30` is short.
"""

from __future__ import annotations

import argparse
import json
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.measure import Result, alternate, seconds
from flowstone.iproto.greeting import GREETING_SIZE
from flowstone.iproto.uri import parse_uri
from flowstone.replication.messages import FetchSnapshot, encode_fetch_snapshot
from flowstone.spark.mirror.mirror_run import LakePlace, MirrorOptions, MirrorRun
from flowstone.spark.spark_session import session
from tests.interop.member import RealMember
from tests.served_node import resident_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS: Final = 2_000_000
SECONDS: Final = 300.0
RATE: Final = 40_000
ROUNDS: Final = 3
DIRECTORY_RATIO, LIVE_RATIO = 0.5, 0.7
LAG_SECONDS: Final = 10.0
FILES_MAX: Final = 200
FLAT: Final = 1.2
"""Maximum memory at the end, relative to that after a third of the time."""

START_SECONDS: Final = 180.0
QUIET_SECONDS: Final = 1.0
WEIGH_SECONDS: Final = 0.5
WARM_UP: Final = 0.1
"""The part of the time that is ignored."""

FILL_LUA: Final = """
local rows = ...
local format = {{'id', 'unsigned'}, {'name', 'string'}, {'amount', 'unsigned'}, {'flag', 'boolean'}, {'note', 'string'}}
box.schema.space.create('orders', {id = 512, format = format}):create_index('pk')
for first = 1, rows, 1000 do
    box.begin()
    for i = first, math.min(first + 999, rows) do
        box.space.orders:insert{i, 'customer ' .. i, i * 7 % 1000, i % 2 == 0, 'note ' .. i % 1000}
    end
    box.commit()
end
box.snapshot()
"""

LOAD_LUA: Final = """
local rows, rate, seconds = ...
local fiber, clock = require('fiber'), require('clock')
loaded = 0
fiber.create(function()
    local space, started = box.space.orders, clock.monotonic()
    while clock.monotonic() - started < seconds do
        local due = math.floor((clock.monotonic() - started) * rate)
        while loaded < due do
            box.begin()
            for _ = 1, 20 do
                local key = math.random(rows)
                if key % 2 == 0 then
                    space:update(key, {{'+', 3, 1}, {'=', 5, 'changed'}})
                else
                    space:replace{key, 'customer ' .. key, 0, true, 'replaced'}
                end
            end
            box.commit()
            loaded = loaded + 20
        end
        fiber.sleep(0.005)
    end
end)
"""


def run(directory: Path, rows: int = ROWS, steady_seconds: float = SECONDS) -> Iterator[Result]:
    with ExitStack() as stack:
        server = RealMember("server", directory / "server", "tarantool", memtx_memory=2 * 1024**3, checkpoint_count=10)
        stack.callback(server.stop)
        server.start()
        server.eval(FILL_LUA, rows)
        with session("bench", memory="1g") as spark:
            yield _directory_beside_parquet(spark, _snapshot_of(server, directory / "snapshot"), directory, rows)
            yield _live_beside_fetch_snapshot(spark, server, directory, rows)
        yield from _steady(server, directory, rows, steady_seconds)


def _snapshot_of(server: RealMember, directory: Path) -> Path:
    directory.mkdir()
    shutil.copy(server.files("snap")[-1], directory)
    return directory


def _mirror(spark: SparkSession, source: Any, lake: Path) -> None:
    if lake.exists():
        shutil.rmtree(lake)
    place = LakePlace.of(str(lake), None, is_masked=False, has_live=not isinstance(source, str))
    MirrorRun(spark, [source], place, MirrorOptions(once=True)).run()


def _directory_beside_parquet(spark: SparkSession, source: Path, directory: Path, rows: int) -> Result:
    """The peer writes the mirror's rows, with all columns, from Parquet."""
    lake, copy, written = directory / "lake", str(directory / "copy"), str(directory / "written")

    def mirror() -> None:
        _mirror(spark, str(source), lake)

    def write() -> None:
        spark.read.parquet(copy).write.mode("overwrite").parquet(written)

    mirror()  # warm: kernels, code of the JVM, file in the page cache
    _check(spark, lake, rows).write.parquet(copy)
    write()
    ours, peer = alternate(ROUNDS, lambda: seconds(mirror), lambda: seconds(write))
    _check(spark, lake, rows)
    return _compared(
        f"a `.snap` of {rows / 1e6:g} M rows mirrored into Delta",
        rows,
        ours,
        peer,
        "Spark writing the same rows from Parquet",
        DIRECTORY_RATIO,
    )


def _live_beside_fetch_snapshot(spark: SparkSession, server: RealMember, directory: Path, rows: int) -> Result:
    lake = directory / "live"
    source = [parse_uri(server.uri)]
    ours, peer = alternate(ROUNDS, lambda: seconds(lambda: _mirror(spark, source, lake)), lambda: _fetch(server))
    _check(spark, lake, rows)
    return _compared(
        f"a live server with {rows / 1e6:g} M rows mirrored into Delta",
        rows,
        ours,
        peer,
        "its FETCH_SNAPSHOT alone",
        LIVE_RATIO,
    )


def _compared(what: str, rows: int, ours: float, peer: float, name: str, promise: float) -> Result:
    ratio = peer / ours
    return Result(what, _rate(rows, ours), f"{name}: {_rate(rows, peer)}", ratio, f"≥ {promise:g}×", ratio >= promise)


def _rate(rows: int, taken: float) -> str:
    return f"{rows / taken / 1000:.0f} k rows/s"


def _table(lake: Path) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(lake / "orders")


def _check(spark: SparkSession, lake: Path, rows: int) -> Any:
    """Return the table's files as a frame. A mirror that lost rows has no valid result."""
    frame = spark.read.parquet(*_table(lake).file_uris())
    found = frame.count()
    if found != rows:
        raise RuntimeError(f"the lake has {found} of {rows} rows")
    return frame


def _fetch(server: RealMember) -> float:
    """Return the seconds from the request to the last byte; the data is discarded."""
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        greeting = b""
        while len(greeting) < GREETING_SIZE:
            greeting += connection.recv(GREETING_SIZE - len(greeting))
        started = last = time.perf_counter()
        connection.sendall(encode_fetch_snapshot(FetchSnapshot(), is_2_6=True))
        while select.select([connection], [], [], QUIET_SECONDS)[0] and connection.recv_into(buffer):
            last = time.perf_counter()
    return last - started


# --- minutes of changes ---------------------------------------------------------------------------


class Watched:
    """A `flowstone mirror --json` process: its progress, and the memory of its driver, Java and Python separately."""

    def __init__(self, server: RealMember, lake: Path) -> None:
        command = [sys.executable, "-m", "flowstone.cli", "mirror", "--json", "--compact-every", "60"]
        command += ["--vacuum-after", "0.01", server.uri, str(lake)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.progress: list[tuple[float, dict[str, Any]]] = []
        self.memory: list[tuple[float, int]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "progress":
                self.progress.append((time.monotonic(), event))

    def weigh(self) -> None:
        """The driver is this process and its JVM, the child of it; workers are children of that."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the mirror ended with {self.process.returncode}")
        size = 0
        for pid in (self.process.pid, *_children(self.process.pid)):
            with suppress(ProcessLookupError, FileNotFoundError):  # a child that has just exited
                size += resident_bytes(pid)
        self.memory.append((time.monotonic(), size))

    def wait(self, what: str, is_there: Any) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (self.progress and is_there(self.progress[-1][1])):
            if self.process.poll() is not None:
                raise RuntimeError(f"the mirror ended with {self.process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {START_SECONDS:g} s: {what}; {self.progress[-1:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._reader.join(10)


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has exited
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


@contextmanager
def _watched(server: RealMember, lake: Path) -> Iterator[Watched]:
    mirror = Watched(server, lake)
    try:
        yield mirror
    finally:
        mirror.stop()


def _steady(server: RealMember, directory: Path, rows: int, steady_seconds: float) -> Iterator[Result]:
    lake = directory / "steady"
    with _watched(server, lake) as mirror:
        mirror.wait("the snapshot is loaded", lambda progress: _has(progress, server.vclock()))
        began = time.monotonic()
        server.eval(LOAD_LUA, rows, RATE, steady_seconds)
        while time.monotonic() < began + steady_seconds:
            mirror.weigh()
            time.sleep(WEIGH_SECONDS)
        ended = time.monotonic()
        loaded = int(server.eval("return loaded"))
        mirror.wait("all changes are there", lambda progress: _has(progress, server.vclock()))
        warm = began + steady_seconds * WARM_UP
        steady = [event for at, event in mirror.progress if warm < at < ended and event["lag"] is not None]
        lags = [event["lag"] for event in steady]
        behind = [event["lag_lsn"] / RATE for event in steady]
    what = f"{loaded / steady_seconds / 1000:.0f} k changes/s of random keys merged into {rows / 1e6:g} M rows"
    lag = statistics.median(lags)
    worst = max(lags)
    yield Result(
        f"{what} for {steady_seconds:g} s",
        f"median lag {lag:.1f} s",
        f"worst {worst:.1f} s; rows behind: {statistics.median(behind):.1f} s",
        target=f"≤ {LAG_SECONDS:g} s, {RATE / 1000:g} k/s",
        holds=lag <= LAG_SECONDS and loaded >= 0.97 * RATE * steady_seconds,
    )
    files = len(_table(lake).file_uris())
    on_disk = sum(1 for _ in (lake / "orders").rglob("*.parquet"))
    yield Result(
        "files of that table at the end",
        f"{files}",
        f"{on_disk} on disk, with those of older versions",
        target=f"≤ {FILES_MAX}",
        holds=files <= FILES_MAX,
    )
    third = began + (ended - began) / 3
    early = statistics.median(size for at, size in mirror.memory if warm < at <= third)
    late = statistics.median(size for at, size in mirror.memory if at >= ended - (ended - began) / 3)
    yield Result(
        f"memory of the driver (Java and Python) over {loaded / 1e6:.1f} M changes",
        f"{late / 1e6:.0f} MB at the end",
        f"{early / 1e6:.0f} MB in the first third",
        late / early,
        f"≤ {FLAT:g}×",
        late / early <= FLAT,
    )


def _has(progress: dict[str, Any], vclock: dict[int, int]) -> bool:
    places = progress["positions"].values()
    return bool(places) and all(
        place.get(str(number), 0) >= lsn for place in places for number, lsn in vclock.items() if number
    )


def main() -> None:
    from bench.__main__ import line

    parser = argparse.ArgumentParser(prog="python -m bench.spark_mirror", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the table (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of changes (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flowstone-bench-") as work:
        for result in run(Path(work), options.rows, options.seconds):
            print(line(result), flush=True)


if __name__ == "__main__":
    main()
