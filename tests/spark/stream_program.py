"""A driver that streams a server's changes into files, to be killed.

Its arguments are the URI, the directory, and the maximum rows of a batch. Each batch is a file with its number, written
atomically; a rewritten batch must have the same rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame

from flowstone.spark import register
from flowstone.spark.spark_session import session


def main(uri: str, directory: Path, batch_rows: str) -> None:
    def keep(batch: DataFrame, number: int) -> None:
        rows = batch.select("_space", "_tuple", "_operation", "_lsn", "_commit_version").collect()
        ask_jvm()  # PySpark takes partial results for complete if the JVM dies while it sends rows
        text = json.dumps(
            sorted([row["_lsn"], row["_commit_version"], row["_operation"], row["_tuple"]] for row in rows)
        )
        path = directory / f"{number}.json"
        if path.exists() and path.read_text() != text:
            path.rename(directory / f"{number}.differs")
        temporary = directory / f"{number}.new"
        temporary.write_text(text)
        temporary.rename(path)

    with session("stream", master="local[1]", memory="600m") as spark:
        register(spark)
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        ask_jvm = jvm.java.lang.System.nanoTime
        source = spark.readStream.format("tarantool").options(uri=uri, spoolLocation=str(directory / "spool"))
        query = source.option("maxRowsPerTrigger", batch_rows).load().writeStream.foreachBatch(keep)
        started = query.option("checkpointLocation", str(directory / "checkpoint")).start()
        (directory / "jvm").write_text(str(jvm.java.lang.ProcessHandle.current().pid()))
        sys.stdout.write("streaming\n")
        sys.stdout.flush()
        started.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
