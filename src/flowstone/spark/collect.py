"""Collect all rows of a small frame in the driver, or fail.

PySpark's `collect` does not guarantee this: if the JVM dies while it sends rows, the rows received so far are taken for
all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """Return each row as a mapping of its columns. Uses an Arrow stream, because it marks its end."""
    rows: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return rows
