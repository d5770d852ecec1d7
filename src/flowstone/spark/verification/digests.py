"""Two sides as data frames, compared by Spark: digests of all rows first, then the keys whose tuples differ.

The frame of a side has the columns of `SIDE_COLUMNS`. A digest is a sum over rows of two 64-bit hashes: row order does
not matter, and no row cancels another. Digests are kept per space and bucket of keys, so that only differing buckets
are compared key by key. They detect damage and bugs, not tuples forged to match a given hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from flowstone.spark.collect import rows_of
from flowstone.spark.verification.tuple_differences import same_values

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SIDE_COLUMNS: Final = "space_id LONG, sort_key BINARY, tuple BINARY, wrong STRING"
"""`sort_key` is the primary key as bytes that sort in key order.

`wrong` describes a contradiction within the side, else it is null. A row whose `tuple` is null only reports a
contradiction.
"""

BUCKETS: Final = 64

MISSING_IN_A, MISSING_IN_B, DIFFERS, TWICE, ENCODED = "missing in A", "missing in B", "differs", "twice", "encoded"
"""The kinds of differences of a key. `ENCODED` means equal values in a longer encoding, which is no difference."""

DIFFERENCE_COLUMNS: Final = (
    "space_id LONG, sort_key BINARY, kind STRING, count_a LONG, count_b LONG, a BINARY, b BINARY"
)

_SECOND_SEED: Final = 0x464C4F57
_HALF: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SpaceDigest:
    """The rows of one space on both sides, the rows in which a side contradicts itself, and the differing buckets."""

    space_id: int
    rows_a: int
    rows_b: int
    wrong_a: int
    wrong_b: int
    differing_buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose tuples differ. `a` and `b` are the tuples; None if a side has no tuple."""

    space_id: int
    sort_key: bytes
    kind: str
    count_a: int
    count_b: int
    a: bytes | None
    b: bytes | None


def compare_digests(a: DataFrame, b: DataFrame) -> list[SpaceDigest]:
    """Compare both sides in one pass; return the digests ordered by space id."""
    from pyspark.sql import functions as f

    rows = _tagged(a, b).withColumn("bucket", _bucket())
    first, second = f.xxhash64("sort_key", "tuple"), f.xxhash64(f.lit(_SECOND_SEED), "tuple", "sort_key")
    # Sum 32-bit halves, because a sum of 64-bit hashes would overflow.
    halves = [
        half for each in (first, second) for half in (each.bitwiseAND(f.lit(_HALF)), f.shiftrightunsigned(each, 32))
    ]
    is_row = f.col("tuple").isNotNull()
    sums = [f.sum(f.when(is_row & (f.col("is_a") == is_a), half)).alias(f"sum_{number}_{is_a}")
            for number, half in enumerate(halves) for is_a in (True, False)]  # fmt: skip
    counts = [
        f.count_if(f.col("is_a") & is_row).alias("rows_a"),
        f.count_if(~f.col("is_a") & is_row).alias("rows_b"),
        f.count_if(f.col("is_a") & f.col("wrong").isNotNull()).alias("wrong_a"),
        f.count_if(~f.col("is_a") & f.col("wrong").isNotNull()).alias("wrong_b"),
    ]
    by_bucket = rows.groupBy("space_id", "bucket").agg(*counts, *sums)
    is_same = f.col("rows_a") == f.col("rows_b")
    for number in range(len(halves)):
        is_same = is_same & f.col(f"sum_{number}_True").eqNullSafe(f.col(f"sum_{number}_False"))
    by_space = by_bucket.groupBy("space_id").agg(
        *(f.sum(name).alias(name) for name in ("rows_a", "rows_b", "wrong_a", "wrong_b")),
        f.sort_array(f.collect_list(f.when(~is_same, f.col("bucket")))).alias("buckets"),
    )
    found = [
        SpaceDigest(
            row["space_id"], row["rows_a"], row["rows_b"], row["wrong_a"], row["wrong_b"], tuple(row["buckets"])
        )
        for row in rows_of(by_space)
    ]
    return sorted(found, key=lambda digest: digest.space_id)


def differing_keys(spark: SparkSession, a: DataFrame, b: DataFrame, buckets: Mapping[int, Sequence[int]]) -> DataFrame:
    """Return the keys in the given buckets whose tuples are not the same bytes, with the kind of difference."""
    from pyspark.sql import functions as f

    places = spark.createDataFrame(
        [(space_id, bucket) for space_id, each in buckets.items() for bucket in each], "space_id LONG, bucket LONG"
    )
    rows = _tagged(a, b).where(f.col("tuple").isNotNull()).withColumn("bucket", _bucket())
    rows = rows.join(f.broadcast(places), ["space_id", "bucket"], "left_semi")
    is_a = f.col("is_a")
    keys = rows.groupBy("space_id", "sort_key").agg(
        f.count_if(is_a).alias("count_a"),
        f.count_if(~is_a).alias("count_b"),
        f.first(f.when(is_a, f.col("tuple")), ignorenulls=True).alias("a"),
        f.first(f.when(~is_a, f.col("tuple")), ignorenulls=True).alias("b"),
    )
    once = (f.col("count_a") == 1) & (f.col("count_b") == 1)
    kind = (
        f.when((f.col("count_a") > 1) | (f.col("count_b") > 1), TWICE)
        .when(f.col("count_a") == 0, MISSING_IN_A)
        .when(f.col("count_b") == 0, MISSING_IN_B)
        .otherwise(DIFFERS)
    )
    differing = keys.where(~(once & f.col("a").eqNullSafe(f.col("b")))).withColumn("kind", kind)
    names = [name.split()[0] for name in DIFFERENCE_COLUMNS.split(", ")]
    return differing.select(*names).mapInArrow(_by_value, DIFFERENCE_COLUMNS)


def first_differences(differences: DataFrame, limit: int) -> list[Difference]:
    """Return the first `limit` differences by space and key, without differences of encoding only."""
    from pyspark.sql import functions as f

    wanted = differences.where(f.col("kind") != ENCODED).orderBy("space_id", "sort_key").limit(limit)
    return [
        Difference(row["space_id"], row["sort_key"], row["kind"], row["count_a"], row["count_b"], row["a"], row["b"])
        for row in rows_of(wanted)
    ]


def counts_by_kind(differences: DataFrame) -> dict[int, dict[str, int]]:
    """Count the keys of each space by kind of difference."""
    counts: dict[int, dict[str, int]] = {}
    for row in rows_of(differences.groupBy("space_id", "kind").count()):
        counts.setdefault(row["space_id"], {})[row["kind"]] = row["count"]
    return counts


def _tagged(a: DataFrame, b: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return a.withColumn("is_a", f.lit(True)).unionByName(b.withColumn("is_a", f.lit(False)))


def _bucket() -> Column:
    from pyspark.sql import functions as f

    return f.pmod(f.xxhash64("sort_key"), f.lit(BUCKETS))


def _by_value(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In executors: mark tuples whose bytes differ but whose values are equal as `ENCODED`."""
    for batch in batches:
        kinds = [
            ENCODED if kind == DIFFERS and a is not None and b is not None and same_values(a, b) else kind
            for kind, a, b in zip(*(batch.column(name).to_pylist() for name in ("kind", "a", "b")), strict=True)
        ]
        place = batch.schema.get_field_index("kind")
        yield batch.set_column(place, "kind", pa.array(kinds, pa.string()))
