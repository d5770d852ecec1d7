"""`flowstone.spark.lake_tables`: the tables of a lake, for programs that read them. Needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath

from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake, is_living


@dataclass(frozen=True, slots=True)
class LakeTableStatus:
    """A table of a lake.

    `path` is what readers of Delta open. `positions` has, by UUID of the replica set, the position up to which the
    table contains its changes.
    """

    path: str
    version: int
    row_count: int
    positions: dict[str, VClock]


def lake_tables(
    lake: str | PathLike[str], *, storage_options: Mapping[str, str] | None = None
) -> dict[str, LakeTableStatus]:
    """Return the tables of a lake by space name, without tables of dropped spaces.

    Args:
        lake: Path or URL of the lake.
        storage_options: Options for a lake in object storage, as in deltalake.

    Returns:
        The tables. Empty if there is no lake.

    Raises:
        LakeError: A table is damaged.

    Example:
        for name, table in flowstone.spark.lake_tables("/lake/shop").items():
            print(name, table.row_count, table.positions)
    """
    found = Lake.open(fspath(lake), storage_options=storage_options)
    # Not `Lake.tables`, whose caller must know whether the lake holds several replica sets.
    tables = [EmbeddedTable.open(f"{found.path}/{name}", found.storage_options) for name in found.directories()]
    return {
        table.schema.space.name: LakeTableStatus(table.path, table.version, table.row_count, table.positions)
        for table in tables
        if table is not None and is_living(table.schema)
    }
