"""Verify over small archives: chosen spaces, allowed differences, several origins, past moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from flowstone.box.schema import UnknownSpace
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import NotSettled
from flowstone.spark.sources.options import AsOf
from flowstone.spark.verification.comparison import VerifyOptions, key_of
from flowstone.spark.verification.report import VerifyReport
from flowstone.spark.verification.sides import LogSide
from tests.node.archived_rows import SYNC, confirm, rollback
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import INSERT, SCHEMA, define, define_key, delete, insert, truncate, update, whole
from tests.spark.comparisons import verify_sides

Archives = Callable[..., LogSide]


@pytest.fixture
def archived(tmp_path: Path) -> Archives:
    """Return archives of spaces `orders` and `other`, LSN 1 to 4, followed by these transactions."""

    def write(name: str, *transactions: bytes) -> LogSide:
        written = WrittenArchive(production().disk, str(tmp_path / name))
        written.define_orders()
        written.write(whole(define(3, 513, "other", ("id", "unsigned")), define_key(4, 513)))
        for each in transactions:
            written.write(each)
        written.save()
        return LogSide(str(tmp_path / name))

    return write


def found(spark: SparkSession, a: LogSide, b: LogSide, **options: object) -> VerifyReport:
    return verify_sides(spark, a, b, VerifyOptions(wait=0.0, **options))  # type: ignore[arg-type]


def raw(lsn: int, space: int, data: bytes) -> bytes:
    return whole(Row(INSERT, 1, lsn=lsn, timestamp=100.0 + lsn, body=b"\x82\x10" + pack(space) + b"\x21" + data))


def test_order_of_rows_and_longer_encodings_are_no_differences(spark: SparkSession, archived: Archives) -> None:
    """Each log has the rows of the other server in order of arrival; rolled-back rows are in neither state.

    Longer encodings of numbers and lengths are counted, but are not differences.
    """
    ours, theirs = whole(insert(5, 1, "a")), whole(insert(1, 2, "b", origin=2))
    withdrawn = whole(insert(6, 9, "never"), flags=SYNC), rollback(7, 6)
    kept = whole(insert(8, 10, "kept"), flags=SYNC), confirm(9, 8), whole(update(10, 1, ("=", 2, "changed")))
    short = raw(11, 513, b"\x92\x01\xa1x"), raw(12, 513, b"\x92\x02\xa1y")
    long = raw(11, 513, b"\x92\xcd\x00\x01\xd9\x01x"), raw(12, 513, b"\xdc\x00\x02\x02\xa1y")
    a = archived("a", ours, theirs, *withdrawn, *kept, *short)
    b = archived("b", theirs, ours, *withdrawn, *kept, *long)
    report = found(spark, a, b)
    assert report.is_equal
    assert report.a.position == {1: 12, 2: 1}
    assert {space.name: (space.rows_a, space.encoded) for space in report.spaces if space.rows_a} == {
        "_space": (2, 0), "_index": (2, 0), "orders": (3, 0), "other": (2, 2)
    }  # fmt: skip


def test_chosen_spaces_are_compared_with_only_their_definitions(spark: SparkSession, archived: Archives) -> None:
    a = archived("a", whole(insert(5, 1, "a")), whole(insert(6, 7, space=513)))
    b = archived("b", whole(insert(5, 1, "b")), whole(insert(6, 7, space=513)))
    report = found(spark, a, b, spaces=("other",))
    assert report.is_equal
    assert [(space.name, space.rows_a) for space in report.spaces] == [("_space", 1), ("_index", 1), ("other", 1)]
    with pytest.raises(UnknownSpace, match="unknown space 'none'"):
        found(spark, a, b, spaces=("none",))


def test_diverged_logs_are_equal_at_an_earlier_position(spark: SparkSession, archived: Archives) -> None:
    a = archived("a", whole(insert(5, 1, "a")), whole(insert(6, 2, "b")), whole(truncate(7)))
    b = archived("b", whole(insert(5, 1, "a")), whole(insert(6, 2, "B")), whole(delete(7, 1)))
    report = found(spark, a, b, limit=0)
    assert (report.is_equal, report.difference_count, report.differences) == (False, 1, ())
    assert found(spark, a, b, at=AsOf(vclock=VClock({1: 5}))).is_equal
    with pytest.raises(NotSettled, match="not a position between two settled transactions"):
        found(spark, a, b, at=AsOf(vclock=VClock({1: 9})))


def test_key_is_shown_by_its_parts() -> None:
    assert key_of(SCHEMA, 512, pack([7, "x"])) == "[7]"
    assert key_of(SCHEMA, 513, pack([7, "x"])) is None
    assert key_of(SCHEMA, 512, b"\x92") is None
    assert key_of(SCHEMA, 512, None) is None
