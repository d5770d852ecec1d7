"""Comparisons of two open sides, as in `verify`."""

from __future__ import annotations

from pyspark.sql import SparkSession

from flowstone.spark.verification.comparison import VerifyOptions, compare, find_position
from flowstone.spark.verification.report import VerifyReport
from flowstone.spark.verification.sides import Side


def verify_sides(spark: SparkSession, a: Side, b: Side, options: VerifyOptions) -> VerifyReport:
    """Return the report of two open sides."""
    return compare(spark, a, b, find_position(a, b, options), options)
