"""Errors as users of a query see them: one sentence before Spark's stack, and no partial results.

The tests cover all sources and the writer. At CI scale each path of an error to the user (from planning, from a task,
from the reader of a stream) is tried once or twice; at full scale every error with every source.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from flowstone.outside import production
from flowstone.spark import register
from tests import real_tarantool
from tests.conftest import FULL
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import insert, whole
from tests.spark.live_servers import create, rows_of, run

NOBODY = "127.0.0.1:1"
UNREACHABLE = "cannot connect to 127.0.0.1:1: connection refused"
LOGIN = "rejects user 'limited': Incorrect password supplied for user 'limited'"
NO_SPACE = "no space 'nope' "
NOT_REPLICATING = (
    "rejects replication to user 'limited': Read access to space '_schema' is denied for user 'limited'; "
    "'limited' lacks the role replication: box.schema.user.grant('limited', 'replication')"
)
PREAMBLE = 500
"""Maximum length of Spark's own text before our message: query and task."""


def message_of(work: Callable[[], Any], expected: str) -> str:
    """Return the user's message, in which the expected sentence must come before all stacks, of Python and of Java."""
    with pytest.raises(PySparkException) as caught:
        work()
    text = str(caught.value)
    assert expected in text, text[:2000]
    before = text.split(expected)[0]
    assert "Traceback" not in before, before
    assert "\n\tat " not in before, before
    assert len(before) < PREAMBLE, before
    return text


@pytest.fixture(autouse=True)
def sources(spark: SparkSession) -> None:
    register(spark)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    archive = WrittenArchive(production().disk, str(tmp_path_factory.mktemp("logs") / "archive"))
    archive.define_orders()
    archive.write(whole(insert(3, 3, "three")))
    archive.save()
    return archive.directory


def always(*cases: Any) -> list[Any]:
    return list(cases)


def at_full_scale(*cases: Any) -> list[Any]:
    return list(cases) if FULL else []


# --- batch reads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        *always(({"space": "nope"}, NO_SPACE)),
        *at_full_scale(
            (
                {"startingOffset": "latest"},
                "source 'xlog' has no option 'startingoffset'; did you mean startingOffsets?",
            ),
            ({"columns": "nope"}, "no column 'nope'; known columns: "),
            ({"path": "/nowhere"}, "/nowhere"),
        ),
    ],
)
def test_batch_of_an_archive_reports_the_expected_sentence(
    spark: SparkSession, archive: str, options: dict[str, str], expected: str
) -> None:
    message_of(lambda: spark.read.format("xlog").options(**{"path": archive, **options}).load().collect(), expected)


@pytest.mark.parametrize(
    ("user", "options", "expected"),
    [
        *always(
            ("limited:wrong@", {"space": "orders"}, LOGIN),
            # Only the task that requests the snapshot learns that this user may not have it.
            (
                "limited:pass@",
                {"space": "orders"},
                "rejects a snapshot request of user 'limited': Read access to universe",
            ),
        ),
        *at_full_scale(
            ("", {"space": "nope"}, NO_SPACE),
            (
                "",
                {"space": "orders", "colums": "id"},
                "source 'tarantool' has no option 'colums'; did you mean columns?",
            ),
            ("", {"space": "orders", "columns": "nope"}, "no column 'nope'; known columns: id, name, amount"),
            ("", {"space": "orders", "startingOffsets": "latest"}, "startingOffsets does not apply to a batch query"),
            ("", {"uri": NOBODY}, UNREACHABLE),
            ("", {"uri": "u:secret@host:nothing"}, "uri: "),
        ),
    ],
)
def test_batch_of_a_live_server_reports_the_expected_sentence(
    spark: SparkSession, real_server: str, user: str, options: dict[str, str], expected: str
) -> None:
    given = {"uri": f"{user}{real_server}", **options}
    text = message_of(lambda: spark.read.format("tarantool").options(**given).load().collect(), expected)
    assert "pass@" not in text
    assert "secret" not in text


# --- streams ------------------------------------------------------------------------------------------------------


def stream(spark: SparkSession, directory: Path, **options: str) -> None:
    given = {"spoolLocation": str(directory / "spool"), **options}
    source = spark.readStream.format("tarantool").options(**given).load()
    query = source.writeStream.format("noop").option("checkpointLocation", str(directory / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()


@pytest.mark.parametrize(
    ("user", "options", "expected"),
    [
        *always(("", {"uri": NOBODY}, UNREACHABLE)),
        *at_full_scale(
            ("", {"space": "nope"}, "nope"),
            ("limited:wrong@", {}, "Incorrect password supplied for user 'limited'"),
            (
                "limited:pass@",
                {},
                NOT_REPLICATING,
            ),
            (
                "",
                {"readMode": "select", "space": "orders"},
                "readMode does not apply to a stream; use it with spark.read",
            ),
            ("", {"maxRowsPerTrigger": "0"}, "maxRowsPerTrigger is '0'; use a whole number above 0"),
        ),
    ],
)
def test_stream_of_a_live_server_reports_the_expected_sentence(
    spark: SparkSession, real_server: str, tmp_path: Path, user: str, options: dict[str, str], expected: str
) -> None:
    message_of(lambda: stream(spark, tmp_path, **{"uri": f"{user}{real_server}", **options}), expected)
    assert not list(tmp_path.rglob("*.snap"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of a few kilobytes, which needs root."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk_of_a_spool_is_one_clear_error(spark: SparkSession, real_server: str, small_disk: Path) -> None:
    """The query's checkpoint is elsewhere; no part of the snapshot may look complete."""
    (small_disk / "ballast").write_bytes(b"\x00" * 20 * 1024)
    message_of(
        lambda: stream(spark, small_disk.parent, uri=real_server, spoolLocation=str(small_disk / "spool")),
        "No space left on device",
    )
    assert not list(small_disk.rglob("*.snap"))


# --- writing ------------------------------------------------------------------------------------------------------


def frame(spark: SparkSession, rows: int = 3) -> DataFrame:
    return spark.range(1, rows + 1).selectExpr("id", "concat('n', id) as name", "1.5D as amount")


@pytest.mark.parametrize(
    ("user", "options", "expected"),
    [
        *always(("", {"space": "nope"}, NO_SPACE)),
        *at_full_scale(
            (
                "",
                {"space": "empty", "onConflict": "upsert"},
                "onConflict is 'upsert'; use replace, insert or skip",
            ),
            ("", {"space": "pairs"}, "space 'pairs' has no field 'id'; its fields are: a, b, c"),
            ("", {"space": "empty", "uri": NOBODY}, UNREACHABLE),
            ("limited:wrong@", {"space": "empty"}, LOGIN),
            ("limited:pass@", {"space": "empty"}, "no space 'empty' at "),
        ),
    ],
)
def test_writer_reports_mistakes_before_the_first_row(
    spark: SparkSession, real_server: str, user: str, options: dict[str, str], expected: str
) -> None:
    given = {"uri": f"{user}{real_server}", **options}
    message_of(lambda: frame(spark).write.format("tarantool").options(**given).mode("append").save(), expected)
    assert not rows_of(real_server, 515)


def test_rejected_row_is_one_clear_error(spark: SparkSession, real_server: str) -> None:
    """A trigger rejects the row, so the error cannot be detected earlier."""
    create(real_server, 770, "guarded", [("id", "unsigned"), ("name", "string"), ("amount", "number")])
    run(
        real_server,
        "box.space.guarded:before_replace(function(_, new) if new[1] == 2 then error('not this one') end end)",
    )
    options = {"uri": real_server, "space": "guarded"}
    work = frame(spark).coalesce(1).write.format("tarantool").options(**options).mode("append")
    text = message_of(work.save, "row with key 2 of space 'guarded' was rejected by 127.0.0.1:")
    assert "not this one (ER_PROC_LUA, 32)" in text
    assert (2,) not in {row[:1] for row in rows_of(real_server, 770)}


def test_full_disk_of_a_server_is_one_clear_error(spark: SparkSession, tmp_path: Path, tarantool: object) -> None:
    """The server's log cannot grow: the server rejects rows, and stores none of the rejected ones."""
    limited = tmp_path / "limited"
    limited.write_text("#!/bin/sh\ntrap '' XFSZ\nulimit -f 40\nexec tarantool \"$@\"\n")
    limited.chmod(0o755)
    with real_tarantool.serve(tmp_path / "server", binary=str(limited), cfg="wal_max_size=1e9, log_level=1,") as server:
        create(server.uri, 512, "orders", [("id", "unsigned"), ("name", "string"), ("amount", "number")])
        options = {"uri": server.uri, "space": "orders"}
        work = frame(spark, 20_000).coalesce(1).write.format("tarantool").options(**options).mode("append")
        text = message_of(work.save, f"of space 'orders' was rejected by {server.uri}: Failed to write to disk")
        key = int(text.split("row with key ")[1].split(" ")[0])
        there = [row[0] for row in rows_of(server.uri, 512)]
        assert 0 < len(there) < 20_000
        assert key not in there
