"""The rows of a small frame, in the driver: all of them or an error.

PySpark's `collect` is not that: where the JVM dies while it hands rows over, the ones that have come are taken for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """Each row as a mapping of its columns; an Arrow stream says where it ends."""
    rows: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return rows
