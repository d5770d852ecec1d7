"""Lakes for the tests of mirrors: contents of tables, and mirrors in the test's own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from flowstone.iproto.msgpack import unpack
from flowstone.lake.masks import Masking
from flowstone.spark.lake import Lake
from flowstone.spark.mirror.choice import MirrorChoice
from flowstone.spark.mirror.mirror_run import LakePlace, MirrorOptions, MirrorRun
from flowstone.spark.mirror.progress import MirrorEvent


def mirror_once(
    spark: SparkSession, sources: Sequence[Any], lake: Path, *, spool: Path | None = None, **options: Any
) -> list[MirrorEvent]:
    """Mirror everything that is available and return the events."""
    told: list[MirrorEvent] = []
    options.setdefault("choice", MirrorChoice())
    options.setdefault("masking", Masking())
    place = LakePlace.of(
        str(lake),
        str(spool) if spool is not None else None,
        is_masked=bool(options["masking"]),
        has_live=any(not isinstance(each, str) for each in sources),
    )
    MirrorRun(spark, sources, place, MirrorOptions(once=True, **options), on_event=told.append).run()
    return told


def rows_of(lake: Path, name: str, *, version: int | None = None, several_sets: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a table as any reader of Delta sees them, by key."""
    table = Lake.open(str(lake), several_sets=several_sets).table(name)
    assert table is not None, f"no table {name}"
    rows: list[dict[str, Any]] = DeltaTable(table.path, version=version).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["_key"])


def tuples_of(lake: Path, name: str, *, version: int | None = None) -> list[Any]:
    """Return the tuples of a table, as values."""
    return [unpack(row["_tuple"]) for row in rows_of(lake, name, version=version)]


def names_in(lake: Path) -> list[str]:
    return sorted(Lake.open(str(lake)).tables())
