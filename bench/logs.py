"""Log files: columnar decode beside the real server's recovery, `flowstone cat` beside `tarantoolctl cat`, memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from bench.measure import Result, alternate, child, million_rows_per_second, seconds
from flowstone.columns.log_batches import TypedShape
from flowstone.history.log_reading import Reading
from flowstone.history.selection import Selection
from flowstone.outside import production
from tests import real_tarantool
from tests.history.logs import multiply
from tests.history.test_memory import LIMIT_MB, SCAN

ROUNDS = 5
DIRECTORY_BYTES = 2 * 1024**3
DECODE_RATIO, CAT_RATIO = 2, 10

GENERATE = """
box.cfg{{log='server.log', wal_max_size=8*1024*1024*1024, memtx_memory=2*1024*1024*1024, checkpoint_count=100}}
local ffi, fiber = require('ffi'), require('fiber')
local s = box.schema.space.create('people', {{format={{
    {{'id', 'unsigned'}}, {{'name', 'string'}}, {{'email', 'string'}}, {{'amount', 'double'}},
    {{'age', 'unsigned'}}}}}})
s:create_index('pk')
local function insert(n)
    s:insert{{n, 'name'..n, 'user'..n..'@example.com', ffi.cast('double', n % 9999991 / 100), n % 90}}
end
local per_transaction, next_id = {per_transaction}, 0
local writers = {{}}
for w = 1, 20 do
    writers[w] = fiber.new(function()
        while next_id < {rows} do
            local first = next_id
            next_id = first + per_transaction
            box.begin()
            for n = first + 1, math.min(first + per_transaction, {rows}) do insert(n) end
            box.commit()
        end
    end)
    writers[w]:set_joinable(true)
end
for _, writer in ipairs(writers) do writer:join() end
{after}
os.exit(0)
"""

RECOVER = """
local clock = require('clock')
local start = clock.monotonic()
box.cfg{log='server.log', memtx_memory=2*1024*1024*1024, wal_mode='none'}
local taken = clock.monotonic() - start
print(taken, box.space.people and box.space.people:len() or 0)
os.exit(0)
"""


def run(work: Path, rows: int) -> Iterator[Result]:
    """Run every benchmark of this module, with its files below `work`."""
    logs = {
        "`.xlog`, 100 rows per transaction": _log(work / "batched", rows, 100),
        "`.xlog`, 1 row per transaction": _log(work / "single", rows, 1),
        "`.snap`": _snapshot(work / "snapshot", rows),
    }
    baseline = min(_recovery_seconds(_empty(work / "empty")) for _ in range(3))
    for name, path in logs.items():
        yield _decode_beside_recovery(name, path, rows, baseline)
    path = logs["`.xlog`, 100 rows per transaction"]
    yield _cat_beside_tarantoolctl(path, rows)
    yield _start_up(path)
    yield _memory(work / "large", logs["`.xlog`, 1 row per transaction"])


def _log(directory: Path, rows: int, per_transaction: int) -> Path:
    real_tarantool.run(GENERATE.format(rows=rows, per_transaction=per_transaction, after=""), directory)
    return max(directory.glob("*.xlog"), key=lambda path: path.stat().st_size)


def _snapshot(directory: Path, rows: int) -> Path:
    real_tarantool.run(GENERATE.format(rows=rows, per_transaction=100, after="box.snapshot()"), directory)
    snapshot = max(directory.glob("*.snap"))
    for other in directory.iterdir():
        if other.suffix in (".snap", ".xlog") and other.name < snapshot.name:
            other.unlink()
    return snapshot


def _empty(directory: Path) -> Path:
    real_tarantool.run("box.cfg{log='server.log'} os.exit(0)", directory)
    return directory


def _recovery_seconds(directory: Path, rows: int = 0) -> float:
    taken, found = real_tarantool.run(RECOVER, directory).split()
    if int(found) != rows:
        raise RuntimeError(f"the real server recovered {found} of {rows} rows")
    return float(taken)


def _decode(path: Path, rows: int) -> None:
    """Typed, on one core: chunks are decoded where they are read."""
    reading = Reading(production(), [str(path)], selection=Selection(spaces=("people",)), workers=0)
    decoded = sum(batch.num_rows for batch in map(TypedShape().batch, reading.pieces()))
    if decoded != rows:
        raise RuntimeError(f"decoded {decoded} of {rows} rows")


def _decode_beside_recovery(name: str, path: Path, rows: int, baseline: float) -> Result:
    _decode(path, rows)  # warm: kernels loaded, file in the page cache
    ours, real = alternate(
        ROUNDS, lambda: seconds(lambda: _decode(path, rows)), lambda: _recovery_seconds(path.parent, rows) - baseline
    )
    return Result(
        f"decode {name} into typed Arrow columns, one core",
        million_rows_per_second(rows, ours),
        f"recovery: {million_rows_per_second(rows, real)}",
        real / ours,
        f"≥ {DECODE_RATIO}",
        real / ours >= DECODE_RATIO,
    )


def _cat_beside_tarantoolctl(path: Path, rows: int) -> Result:
    """Their output is discarded, so that neither waits for the disk; before, it is kept once, to be counted."""
    output = path.parent / "cat.json"

    def cat(program: str, file: IO[bytes] | int) -> None:
        command = [program, "cat", str(path), "--format", "json"]
        subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, check=True)

    contenders = (str(Path(sys.executable).with_name("flowstone")), "tarantoolctl")
    for program in contenders:
        with output.open("wb") as file:
            cat(program, file)
        if _lines(output) != rows:
            raise RuntimeError(f"{program} printed {_lines(output)} of {rows} rows")
    output.unlink()
    ours, real = alternate(3, *(partial(seconds, partial(cat, program, subprocess.DEVNULL)) for program in contenders))
    return Result(
        "`cat --format json` of 1 M rows, start-up included",
        f"{ours:.2f} s",
        f"`tarantoolctl cat`: {real:.1f} s",
        real / ours,
        f"≥ {CAT_RATIO}",
        real / ours >= CAT_RATIO,
    )


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _start_up(path: Path) -> Result:
    """Time to the first typed batch in a fresh process."""
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from bench.logs import _first_batch; _first_batch(sys.argv[1])\n"
        "print(time.perf_counter() - start)"
    )
    seconds = min(float(child(code, str(path))) for _ in range(3))
    return Result("first typed batch of a fresh process", f"{seconds:.2f} s", "")


def _first_batch(path: str) -> None:
    reading = Reading(production(), [path], selection=Selection(spaces=("people",)))
    next(map(TypedShape().batch, reading.pieces()))


def _memory(directory: Path, log: Path) -> Result:
    """Repeat the log of one row per transaction until it fills DIRECTORY_BYTES."""
    multiply(log, directory, DIRECTORY_BYTES)
    result = child(SCAN, str(directory)).split()
    size = sum(path.stat().st_size for path in directory.iterdir())
    shutil.rmtree(directory)
    return Result(
        f"peak memory of decoding a directory of {size / 1e9:.1f} GB ({int(result[0]) / 1e6:.0f} M rows)",
        f"{result[1]} MB",
        "",
        target=f"< {LIMIT_MB} MB",
        holds=int(result[1]) < LIMIT_MB,
    )
