"""`make bench`: runs the benchmarks, prints the table and writes it into the documentation, and its headlines
into the README.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench import (
    applications,
    client,
    limestone,
    logs,
    own_writers,
    replication,
    serving,
    spark_mirror,
    spark_sources,
    spark_streaming,
    synchronous,
)
from bench.measure import Result
from tests import real_tarantool

PARTS = (
    "logs",
    "serving",
    "applications",
    "client",
    "replication",
    "synchronous",
    "limestone",
    "spark_sources",
    "spark_streaming",
    "spark_mirror",
    "own_writers",
)
SHORT_ROWS, SHORT_SECONDS = 200_000, 20.0
"""Rows for the Spark parts with --short: enough to check that they run, not to compare."""

ROOT = Path(__file__).parent.parent
PAGE, README = ROOT / "docs" / "reference" / "performance.md", ROOT / "README.md"
HEADLINES = (
    "decode `.xlog`, 100 rows",
    "`cat --format json`",
    "REPLACE, one connection",
    "SELECT by key, one connection",
    "rows of a real master applied",
    "synchronous INSERT with quorum 2, 500 in flight, one",
    "commits of three members",
    "Limestone: recovery",
    "Spark: changes of a live Tarantool into a noop sink, 2 cores in all, while",
    "a `.snap` of 2 M rows mirrored",
)
"""Prefixes of the lines that the README shows, too."""
MARKERS = re.compile(r"(<!-- bench -->\n).*?(<!-- /bench -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="measure one part, and leave the pages alone")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per log (default: %(default)s)")
    parser.add_argument(
        "--short", action="store_true", help="little data for the parts about Spark; implies --no-pages"
    )
    parser.add_argument("--no-pages", action="store_true", help="leave the pages alone")
    options = parser.parse_args()
    if options.only not in ("limestone", "own_writers") and not real_tarantool.available():
        sys.exit("bench: the real Tarantool (Debian package tarantool) is missing, so there is nothing to compare with")
    results = []
    with tempfile.TemporaryDirectory(prefix="flowstone-bench-") as work:
        runs: dict[str, Callable[[Path], Iterator[Result]]] = {
            "logs": partial(logs.run, rows=options.rows),
            "serving": serving.run,
            "applications": applications.run,
            "client": client.run,
            "replication": replication.run,
            "synchronous": synchronous.run,
            "limestone": partial(limestone.run, entries=options.rows),
            "own_writers": own_writers.run,
            **spark_parts(options.short),
        }
        for part in [options.only] if options.only else PARTS:
            for result in runs[part](Path(work) / part):
                print(line(result), flush=True)
                results.append(result)
    if not (options.no_pages or options.only or options.short):
        write_table(PAGE, results)
        write_table(README, [result for result in results if result.what.startswith(HEADLINES)])
    broken = [result.what for result in results if not result.holds]
    if broken:
        sys.exit("bench: below what is promised: " + "; ".join(broken))


def spark_parts(is_short: bool) -> dict[str, Callable[[Path], Iterator[Result]]]:
    if not is_short:
        return {
            "spark_sources": spark_sources.run,
            "spark_streaming": spark_streaming.run,
            "spark_mirror": spark_mirror.run,
        }
    return {
        "spark_sources": partial(spark_sources.run, rows=SHORT_ROWS),
        "spark_streaming": partial(spark_streaming.run, seconds=SHORT_SECONDS, backlog=SHORT_ROWS),
        "spark_mirror": partial(spark_mirror.run, rows=SHORT_ROWS, steady_seconds=SHORT_SECONDS),
    }


def write_table(page: Path, results: list[Result]) -> None:
    table = "\n".join([*HEAD, *(line(result) for result in results)]) + "\n"
    text, count = MARKERS.subn(lambda match: match[1] + table + match[2], page.read_text())
    if count != 1:
        sys.exit(f"bench: {page.name} has no place for the table (<!-- bench --> … <!-- /bench -->)")
    page.write_text(text)


HEAD = ["| what | Flowstone | beside it | ratio | promised |", "|---|---|---|---|---|"]


def line(result: Result) -> str:
    ratio = "" if result.ratio is None else f"**{result.ratio:.{2 if result.ratio < 2 else 1}f}×**"
    return f"| {result.what} | {result.ours} | {result.peer} | {ratio} | {result.target} |"


if __name__ == "__main__":
    main()
