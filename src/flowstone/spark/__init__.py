"""The data pipeline: settled changes and states of logs as Arrow batches, for Apache Spark through PySpark.

Only the data sources themselves import pyspark. Modules that define columns, options and offsets, or turn rows into
batches, need neither Spark nor a JVM. Rows are never handled one by one in Python where a batch can be. Exports the
public names lazily: importing the package does not import pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.lazy import lazy_names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flowstone.columns.column_types import WrongType
    from flowstone.lake.masks import WrongMask
    from flowstone.lake.table import AnotherWriter
    from flowstone.lake.table_schema import LakeError
    from flowstone.spark.index.limestone_index import EpochLost, NotDurable
    from flowstone.spark.index.log_index import DataLoss, EndsEarlier, NotSettled
    from flowstone.spark.lake_status import LakeTableStatus, lake_tables
    from flowstone.spark.mirror.choice import WrongChoice
    from flowstone.spark.mirror.mirror import Mirror
    from flowstone.spark.mirror.progress import (
        MirrorCaughtUp,
        MirrorDataLoss,
        MirrorEvent,
        MirrorMisfits,
        MirrorOpened,
        MirrorProgress,
        MirrorSnapshot,
        MirrorStopped,
        MirrorTable,
        SourceStatus,
        TableProgress,
    )
    from flowstone.spark.mirror.sources import MirrorBusy
    from flowstone.spark.mirror.start_checks import OtherSettings, WrongPlace
    from flowstone.spark.restoration.archive_restore import OutputTaken, Restored, RestoredSpace, VinylSpaces
    from flowstone.spark.restoration.restore import restore
    from flowstone.spark.sources.options import WrongOption
    from flowstone.spark.spark_session import SparkJobFailed, SparkUnavailable, session
    from flowstone.spark.verification.report import ShownDifference, SideReport, SpaceResult, VerifyReport, WrongRow
    from flowstone.spark.verification.sides import SideError
    from flowstone.spark.verification.tuple_differences import FieldDifference
    from flowstone.spark.verification.verify import verify

__all__ = [
    "AnotherWriter",
    "DataLoss",
    "EndsEarlier",
    "EpochLost",
    "FieldDifference",
    "LakeError",
    "LakeTableStatus",
    "Mirror",
    "MirrorBusy",
    "MirrorCaughtUp",
    "MirrorDataLoss",
    "MirrorEvent",
    "MirrorMisfits",
    "MirrorOpened",
    "MirrorProgress",
    "MirrorSnapshot",
    "MirrorStopped",
    "MirrorTable",
    "NotDurable",
    "NotSettled",
    "OtherSettings",
    "OutputTaken",
    "Restored",
    "RestoredSpace",
    "ShownDifference",
    "SideError",
    "SideReport",
    "SourceStatus",
    "SpaceResult",
    "SparkJobFailed",
    "SparkUnavailable",
    "TableProgress",
    "VerifyReport",
    "VinylSpaces",
    "WrongChoice",
    "WrongMask",
    "WrongOption",
    "WrongPlace",
    "WrongRow",
    "WrongType",
    "lake_tables",
    "register",
    "restore",
    "session",
    "verify",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AnotherWriter": ".lake.table",
        "DataLoss": "index.log_index",
        "EndsEarlier": "index.log_index",
        "EpochLost": "index.limestone_index",
        "FieldDifference": "verification.tuple_differences",
        "LakeError": ".lake.table_schema",
        "LakeTableStatus": "lake_status",
        "Mirror": "mirror.mirror",
        "MirrorBusy": "mirror.sources",
        "MirrorCaughtUp": "mirror.progress",
        "MirrorDataLoss": "mirror.progress",
        "MirrorEvent": "mirror.progress",
        "MirrorMisfits": "mirror.progress",
        "MirrorOpened": "mirror.progress",
        "MirrorProgress": "mirror.progress",
        "MirrorSnapshot": "mirror.progress",
        "MirrorStopped": "mirror.progress",
        "MirrorTable": "mirror.progress",
        "NotDurable": "index.limestone_index",
        "NotSettled": "index.log_index",
        "OtherSettings": "mirror.start_checks",
        "OutputTaken": "restoration.archive_restore",
        "Restored": "restoration.archive_restore",
        "RestoredSpace": "restoration.archive_restore",
        "ShownDifference": "verification.report",
        "SideError": "verification.sides",
        "SideReport": "verification.report",
        "SourceStatus": "mirror.progress",
        "SpaceResult": "verification.report",
        "SparkJobFailed": "spark_session",
        "SparkUnavailable": "spark_session",
        "TableProgress": "mirror.progress",
        "VerifyReport": "verification.report",
        "VinylSpaces": "restoration.archive_restore",
        "WrongChoice": "mirror.choice",
        "WrongMask": ".lake.masks",
        "WrongOption": "sources.options",
        "WrongPlace": "mirror.start_checks",
        "WrongRow": "verification.report",
        "WrongType": ".columns.column_types",
        "lake_tables": "lake_status",
        "restore": "restoration.restore",
        "session": "spark_session",
        "verify": "verification.verify",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def register(spark: SparkSession) -> None:
    """Register the formats `xlog`, `tarantool` and `limestone` with a Spark session.

    All three can be read, `tarantool` can also be written. In a local session whose Python is not configured,
    executors use the Python that calls this function. Elsewhere they need flowstone installed in the Python that
    `PYSPARK_PYTHON` or `spark.pyspark.python` names. A second call has no effect.

    Args:
        spark: The session, classic or Spark Connect.

    Example:
        flowstone.spark.register(spark)
        spark.read.format("tarantool").option("uri", "db1:3301").option("space", "orders").load()
    """
    from flowstone.spark.registration import register_sources

    register_sources(spark)
