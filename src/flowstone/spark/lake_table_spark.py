"""The engine that merges on Spark, where the session has Delta's jars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowstone.spark.lake_table_embedded import EmbeddedTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def has_delta_jars(spark: SparkSession) -> bool:
    """Whether the session can MERGE into Delta tables."""
    return False


class SparkTable(EmbeddedTable):
    """A `LakeTable` whose merges run on Spark."""

    @classmethod
    def open_with(cls, spark: SparkSession, path: str, storage_options: Mapping[str, str]) -> SparkTable | None:
        raise NotImplementedError
