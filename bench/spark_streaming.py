"""A live server's changes into a noop sink: the lag while it writes, and the rate for a backlog.

The source is a real Tarantool on the same machine, which writes by itself, half of it updates, in transactions of ten.
The lag of a row is the time from the assignment of its LSN to the end of its batch. `python -m
bench.spark_streaming --seconds 15 --backlog 1000000` is a short run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

from bench.measure import Result
from flowstone.spark import register
from flowstone.spark.spark_session import session
from tests.node.archived_server import RealServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CORES: Final = 2
SECONDS: Final = 60.0
WARM_UP_SECONDS: Final = 10.0
RATE: Final = 130_000
BACKLOG: Final = 5_000_000
STEADY_MIN, LAG_MAX, BACKLOG_MIN = 120_000, 2.0, 250_000
KEYS: Final = 400_000
SAMPLE_SECONDS: Final = 0.05
CONF: Final = {"spark.sql.streaming.numRecentProgressUpdates": "100000"}
"""Spark keeps the progress of 100 batches by default: on a fast machine those cover a third of the run."""

COLUMNS: Final = "id,name,amount,price,note,_operation,_operations_msgpack,_commit_version,_commit_timestamp,_lsn"
"""The columns needed to follow a table; JSON of operations and keys is for people."""

SETUP: Final = f"""
box.schema.user.create('replicator', {{password='secret', if_not_exists=true}})
box.schema.user.grant('replicator', 'replication', nil, nil, {{if_not_exists=true}})
local orders = box.schema.space.create('orders', {{if_not_exists=true, format={{
    {{'id', 'unsigned'}}, {{'name', 'string'}}, {{'amount', 'unsigned'}}, {{'price', 'number'}},
    {{'note', 'string'}}}}}})
orders:create_index('pk', {{if_not_exists=true}})
local fiber, clock = require('fiber'), require('clock')
count = 0
local function transaction()
    box.begin()
    for i = 1, 5 do
        count = count + 2
        local id = count % {KEYS}
        orders:replace{{id, 'customer ' .. id, id % 1000, id + 0.5, 'note ' .. id % 1000}}
        orders:update(id, {{{{'+', 'amount', 1}}, {{'=', 'note', 'changed'}}}})
    end
    box.commit()
end
function write(changes)
    for i = 1, changes / 10 do transaction() end
end
is_writing = false
function write_steadily(rate)
    is_writing = true
    for part = 1, 8 do  -- commits of several fibers share a write to the log
        fiber.create(function()
            local start, done = clock.monotonic(), 0
            while is_writing do
                transaction()
                done = done + 10
                local ahead = done / (rate / 8) - (clock.monotonic() - start)
                if ahead > 0.005 then fiber.sleep(ahead) end
            end
        end)
    end
end
"""


@dataclass(frozen=True)
class Batch:
    """The LSNs after `first` up to `last`, done at `at` by the monotonic clock."""

    first: int
    last: int
    at: float


class Watched:
    """Positions of the server's log over time."""

    def __init__(self, server: RealServer) -> None:
        self._server = server
        self.times: list[float] = []
        self.lsns: list[int] = []
        self._end = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        import tarantool

        connection = tarantool.connect("127.0.0.1", self._server.port)
        while not self._end.wait(SAMPLE_SECONDS):
            (lsn,) = connection.eval("return box.info.lsn").data
            self.times.append(time.time())
            self.lsns.append(lsn)
        connection.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def written_at(self, lsn: int) -> float:
        number = min(bisect_left(self.lsns, lsn), len(self.lsns) - 1)
        before = max(number - 1, 0)
        span = self.lsns[number] - self.lsns[before]
        part = (lsn - self.lsns[before]) / span if span else 0.0
        return self.times[before] + part * (self.times[number] - self.times[before])


def run(work: Path, seconds: float = SECONDS, backlog: int = BACKLOG, rate: int = RATE) -> Iterator[Result]:
    """First while the server writes, then its backlog."""
    cfg = "memtx_memory=536870912, wal_max_size=67108864, checkpoint_interval=0"
    with (
        RealServer(work / "server", setup=SETUP, cfg=cfg) as server,
        session("bench", master=f"local[{CORES}]", conf=CONF) as spark,
    ):
        register(spark)
        steady, lag = _steady(spark, server, work, seconds, rate)
        what = f"Spark: changes of a live Tarantool into a noop sink, {CORES} cores in all"
        yield Result(
            f"{what}, while it writes", f"{steady:,.0f}/s", "", None, f"≥ {STEADY_MIN:,}/s", steady >= STEADY_MIN
        )
        yield Result(f"{what}, median lag", f"{lag:.1f} s", "", None, f"≤ {LAG_MAX:g} s", lag <= LAG_MAX)
        drained = _backlog(spark, server, work, backlog)
        text = f"≥ {BACKLOG_MIN:,}/s"
        yield Result(f"{what}, a backlog", f"{drained:,.0f}/s", "", None, text, drained >= BACKLOG_MIN)


def _query(spark: SparkSession, server: RealServer, work: Path, *, is_once: bool = False) -> StreamingQuery:
    source = spark.readStream.format("tarantool").options(
        uri=server.uri,
        space="orders",
        columns=COLUMNS,
        startingOffsets="latest",
        spoolLocation=str(work / "spool"),
    )
    query = source.load().writeStream.format("noop").option("checkpointLocation", str(work / "checkpoint"))
    return query.trigger(availableNow=True).start() if is_once else query.start()


def _steady(spark: SparkSession, server: RealServer, work: Path, seconds: float, rate: int) -> tuple[float, float]:
    """Return the processed changes per second, and the median lag of their rows."""
    query = _query(spark, server, work)
    watched = Watched(server)
    server.eval("write(1000)")
    while not _batches(query):  # once everything is loaded and compiled
        server.eval("write(10)")
        time.sleep(0.2)
    server.eval("write_steadily(...)", rate)
    time.sleep(WARM_UP_SECONDS)
    begin = time.time()
    time.sleep(seconds)
    server.eval("is_writing = false")
    end = time.time()
    time.sleep(2 * LAG_MAX)
    batches = [batch for batch in _batches(query) if begin <= batch.at <= end]
    query.stop()
    watched.close()
    lags: list[float] = []
    for batch in batches:
        step = max(1, (batch.last - batch.first) // 50)
        lags += [batch.at - watched.written_at(lsn) for lsn in range(batch.first + 1, batch.last + 1, step)]
    changes = sum(batch.last - batch.first for batch in batches)
    return changes / (end - begin), statistics.median(lags) if lags else float("inf")


def _backlog(spark: SparkSession, server: RealServer, work: Path, changes: int) -> float:
    _query(spark, server, work, is_once=True).awaitTermination()
    server.eval("write(...)", changes)
    start = time.perf_counter()
    _query(spark, server, work, is_once=True).awaitTermination()
    return changes / (time.perf_counter() - start)


def _batches(query: StreamingQuery) -> list[Batch]:
    found = []
    for progress in query.recentProgress:
        source = progress["sources"][0]
        first, last = _lsn(source["startOffset"]), _lsn(source["endOffset"])
        if last > first > 0:
            took = progress["durationMs"]["triggerExecution"] / 1000
            found.append(Batch(first, last, _seconds(progress["timestamp"]) + took))
    return found


def _lsn(offset: Any) -> int:
    found = json.loads(offset) if isinstance(offset, str) else offset
    return max((sum(lsns.values()) for key, lsns in (found or {}).items() if "-" in key), default=0)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--backlog", type=int, default=BACKLOG)
    parser.add_argument("--rate", type=int, default=RATE, help="changes per second that the server writes at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flowstone-bench-") as work:
        for result in run(Path(work), options.seconds, options.backlog, options.rate):
            print(f"{result.what}: {result.ours} (promised {result.target})", flush=True)


if __name__ == "__main__":
    main()
