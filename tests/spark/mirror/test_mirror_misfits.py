"""Values that do not fit their columns: the mirror goes on, and the quarantine has each of them once."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from flowstone.cli import run as run_command
from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.columns.column_types import WrongType
from flowstone.iproto.constants import RequestType
from flowstone.lake.quarantine import Quarantine
from flowstone.lake.table_schema import LakeError
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake
from flowstone.spark.mirror.field_types import FieldTypes
from flowstone.spark.mirror.progress import MirrorMisfits, MirrorProgress
from flowstone.spark.mirror.start_checks import OtherSettings
from tests import real_tarantool
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, define, define_key, insert, statement, truncate, whole
from tests.spark.lakes import mirror_once, rows_of
from tests.spark.live_servers import create, run
from tests.spark.live_servers import insert as insert_into
from tests.spark.mirror_process import MirrorProcess

LAYOUT = (("id", "unsigned"), ("big", "unsigned"), ("amount", "decimal"), ("note", "string"))
LATIN = "caf\udce9"
TYPES = ColumnOptions(decimal_scale=4)
FITTING = (7, Decimal("1.2345"), "fits")
MISFITS = {
    2: (2**64 - 1, Decimal("1.5"), "big"),
    3: (3, Decimal("1.23456"), "precise"),
    4: (4, Decimal(4), LATIN),
    5: (2**63, Decimal("1.23456"), LATIN),
}
EXPECTED = [
    ("[2]", "big", "18446744073709551615", "too_large"),
    ("[3]", "amount", '"1.23456"', "too_precise"),
    ("[4]", "note", r'"caf\udce9"', "not_utf8"),
    ("[5]", "amount", '"1.23456"', "too_precise"),
    ("[5]", "big", "9223372036854775808", "too_large"),
    ("[5]", "note", r'"caf\udce9"', "not_utf8"),
]
SHOWN = [
    (1, 7, Decimal("1.2345"), "fits"),
    (2, None, Decimal("1.5000"), "big"),
    (3, 3, None, "precise"),
    (4, 4, Decimal("4.0000"), None),
    (5, None, None, None),
]


def quarantined(lake: Path) -> list[dict[str, Any]]:
    rows = Quarantine(str(lake), {}).rows().to_pylist()
    return sorted(rows, key=lambda row: (row["version"], row["key"], row["field"]))


def shown(lake: Path, name: str = "orders") -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name, _ in LAYOUT) for row in rows_of(lake, name)]


def of(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.write(whole(define(1, 512, "orders", *LAYOUT), define_key(2, 512)))
    return written


def snapshot(*rows: tuple[Any, ...]) -> list[tuple[int, Any]]:
    layout = [{"name": name, "type": kind} for name, kind in LAYOUT]
    return [
        (272, ("version", 2, 11, 1)),
        (280, (512, 1, "orders", "memtx", 0, {}, layout)),
        (288, (512, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])),
        *((512, row) for row in rows),
    ]


def write_misfits(archive: WrittenArchive, lsn: int) -> None:
    archive.write(whole(insert(lsn, 1, *FITTING)))
    archive.write(whole(*(insert(lsn + key - 1, key, *values) for key, values in MISFITS.items())))
    archive.save()


def test_misfits_of_a_snapshot_are_null_and_quarantined(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.snapshot(VClock({1: 2}), snapshot((1, *FITTING), *((key, *row) for key, row in MISFITS.items())), 50.0)
    archive.save()
    told = mirror_once(spark, [archive.directory], lake, types=TYPES)
    rows = quarantined(lake)
    assert shown(lake) == SHOWN
    assert of(rows, "key", "field", "value", "reason") == EXPECTED
    assert {(row["space"], row["space_id"], row["replicaset_uuid"]) for row in rows} == {("orders", 512, UUID)}
    assert {(row["position"], row["version"], row["lsn"]) for row in rows} == {('{"1": 2}', 2, None)}
    assert {row["time"].timestamp() for row in rows} == {102.0}  # the newest change before the snapshot
    assert {row["healed_at"] for row in rows} == {None}
    assert {row["field"]: row["type"] for row in rows} == {
        "big": "BIGINT", "amount": "DECIMAL(38, 4)", "note": "STRING"
    }  # fmt: skip
    assert {row["_key"] for row in rows} == {row["_key"] for row in rows_of(lake, "orders")[1:]}
    progress = [event for event in told if isinstance(event, MirrorProgress)][-1]
    assert (progress.quarantine_rows, progress.tables["orders"].misfits) == (6, 6)


@pytest.mark.parametrize("driver_rows", [0, 1000])
@pytest.mark.parametrize("history", [False, True])
def test_misfits_of_changes_are_null_and_quarantined_with_their_change(
    spark: SparkSession,
    archive: WrittenArchive,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver_rows: int,
    history: bool,
) -> None:
    monkeypatch.setattr("flowstone.spark.mirror.batch.DRIVER_ROWS", driver_rows)
    lake = tmp_path / "lake"
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES, history=history)
    write_misfits(archive, 3)
    told = mirror_once(spark, [archive.directory], lake, types=TYPES, history=history)
    rows = quarantined(lake)
    assert shown(lake) == SHOWN
    assert of(rows, "key", "field", "value", "reason") == EXPECTED
    assert of(rows, "replica_id", "lsn") == [(1, 4), (1, 5), (1, 6), (1, 7), (1, 7), (1, 7)]
    assert [row["time"].timestamp() for row in rows] == [107.0] * 6  # the time of their transaction
    assert {row["position"] for row in rows} == {'{"1": 7}'}
    reports = {(each.field, each.reason, each.rows) for each in told if isinstance(each, MirrorMisfits)}
    assert reports == {("big", "too_large", 2), ("amount", "too_precise", 2), ("note", "not_utf8", 2)}


def test_misfits_of_the_transaction_that_creates_a_space_are_quarantined(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    layout = whole(define(3, 600, "late", *LAYOUT), define_key(4, 600), insert(5, 1, 2**63, 1, "x", space=600))
    archive.write(layout)
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert of(quarantined(lake), "space", "key", "field", "version") == [("late", "[1]", "big", 5)]


def test_report_of_misfits_is_a_sentence_that_names_field_reason_and_key() -> None:
    text = "2 values of orders.big do not fit the column (too_large), first key [2]; see the quarantine of the lake"
    assert str(MirrorMisfits("orders", "big", "too_large", 2, "[2]")) == text
    assert str(MirrorMisfits("orders", "big", "too_large", 1, "[2]")).startswith("1 value of orders.big does not fit")


def test_misfits_of_a_field_are_reported_once_a_minute(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    archive.save()
    lake = tmp_path / "lake"
    mirror_once(spark, [archive.directory], lake)
    for lsn in range(3, 9):
        archive.write(whole(insert(lsn, lsn, 2**63, 1, "x")))
    archive.save()
    told = mirror_once(spark, [archive.directory], lake, max_rows=1)
    assert [event.rows for event in told if isinstance(event, MirrorMisfits)] == [1]
    assert [event for event in told if isinstance(event, MirrorProgress)][-1].tables["orders"].misfits == 6


def test_corrected_row_leaves_the_record_in_the_quarantine(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    write_misfits(archive, 3)
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    archive.write(
        whole(*(statement(RequestType.REPLACE, 8 + key, {0x10: 512, 0x21: (key, *FITTING)}) for key in MISFITS))
    )
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    assert {row[1:] for row in shown(lake)} == {FITTING}
    assert len(quarantined(lake)) == 6


def test_on_misfit_stop_is_an_error_that_names_the_key_until_misfits_are_accepted(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES, on_misfit="stop")
    write_misfits(archive, 3)
    problem = r"space 'orders', tuple with _key x'.*': field 'big' is above 2\^63-1"
    with pytest.raises(LakeError, match=problem) as error:
        mirror_once(spark, [archive.directory], lake, types=TYPES, on_misfit="stop")
    assert "unsignedAs" in (error.value.hint or "")
    assert shown(lake) == []
    assert not (lake / "_quarantine").exists()
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    assert shown(lake) == SHOWN
    assert of(quarantined(lake), "key", "field", "value", "reason") == EXPECTED


@pytest.mark.parametrize("max_rows", [1, 500_000])
def test_crash_between_the_quarantine_and_the_table_duplicates_nothing(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """The repeated batch may also be another one, with fewer rows."""
    lake = tmp_path / "lake"
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    write_misfits(archive, 3)
    with monkeypatch.context() as patched:
        patched.setattr("deltalake.DeltaTable.create_write_transaction", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mirror_once(spark, [archive.directory], lake, types=TYPES)
    assert of(quarantined(lake), "key", "field", "value", "reason") == EXPECTED
    assert shown(lake) == []
    mirror_once(spark, [archive.directory], lake, types=TYPES, max_rows=max_rows)
    assert of(quarantined(lake), "key", "field", "value", "reason") == EXPECTED
    assert shown(lake) == SHOWN


def interrupt(*args: Any, **how: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["create_table_with_add_actions", "save"])
def test_crash_during_the_first_load_duplicates_no_misfit(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    lake = tmp_path / "lake"
    archive.snapshot(VClock({1: 2}), snapshot((1, *FITTING), *((key, *row) for key, row in MISFITS.items())))
    archive.save()
    name = "flowstone.spark.lake.Lake.save" if place == "save" else f"flowstone.lake.embedded_table.{place}"
    with monkeypatch.context() as patched:
        patched.setattr(name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            mirror_once(spark, [archive.directory], lake, types=TYPES)
    assert len(quarantined(lake)) == 6
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    assert of(quarantined(lake), "key", "field", "value", "reason") == EXPECTED
    assert shown(lake) == SHOWN


def test_crash_after_a_table_and_before_the_progress_keeps_its_misfits(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    write_misfits(archive, 3)
    with monkeypatch.context() as patched:
        patched.setattr("flowstone.spark.lake.Lake.save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mirror_once(spark, [archive.directory], lake, types=TYPES)
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    assert of(quarantined(lake), "key", "field", "value", "reason") == EXPECTED


def test_new_format_quarantines_rows_that_do_not_fit_and_heals_those_that_fit(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    write_misfits(archive, 3)
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    other = (("id", "unsigned"), ("big", "any"), ("amount", "any"), ("note", "string"))
    archive.write(whole(define(20, 512, "orders", *other)))
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    healed = {(row["key"], row["field"]) for row in quarantined(lake) if row["healed_at"] is not None}
    assert healed == {("[2]", "big"), ("[3]", "amount"), ("[5]", "big"), ("[5]", "amount")}
    assert rows_of(lake, "orders")[1]["big"] == "18446744073709551615"
    archive.write(whole(define(21, 512, "orders", *LAYOUT)))
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    rows = [row for row in quarantined(lake) if row["healed_at"] is None]
    assert sorted(of(rows, "key", "field", "value", "reason")) == EXPECTED
    assert len(quarantined(lake)) == 10


def test_value_that_a_migration_replaces_is_no_misfit_of_the_new_format(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, 7, 1, "12")), whole(insert(4, 2, 7, 1, "13")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    numbers = [statement(RequestType.REPLACE, 4 + key, {0x10: 512, 0x21: (key, 7, 1, 11 + key)}) for key in (1, 2)]
    archive.write(whole(*numbers, define(7, 512, "orders", *LAYOUT[:3], ("note", "unsigned"))))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert [row["note"] for row in rows_of(lake, "orders")] == [12, 13]
    assert quarantined(lake) == []


def test_misfits_of_several_replica_sets_name_their_set(spark: SparkSession, tmp_path: Path) -> None:
    other_uuid = "bbbbbbbb-0000-4000-8000-000000000002"
    archives = [
        WrittenArchive(production().disk, str(tmp_path / name), uuid=uuid)
        for name, uuid in (("a", UUID), ("b", other_uuid))
    ]
    lake = tmp_path / "lake"
    for number, each in enumerate(archives):
        each.write(whole(define(1, 512, "orders", *LAYOUT), define_key(2, 512)))
        each.write(whole(insert(3, number, 2**63 + number, 1, "x")))
        each.save()
    mirror_once(spark, [each.directory for each in archives], lake)
    found = of(quarantined(lake), "replicaset_uuid", "key", "value", "position")
    assert found == [(UUID, "[0]", str(2**63), '{"1": 3}'), (other_uuid, "[1]", str(2**63 + 1), '{"1": 3}')]
    archives[0].write(whole(define(4, 512, "orders", *LAYOUT, ("more", "any"))))
    archives[0].save()
    mirror_once(spark, [each.directory for each in archives], lake)
    assert len(quarantined(lake)) == 2


SERVER_ROWS = [(key, *values) for key, values in MISFITS.items()]


@pytest.mark.real
def test_killed_mirror_of_a_real_server_quarantines_each_misfit_once(
    java: None, tarantool: Any, tmp_path: Path
) -> None:
    """Misfits in the snapshot and in later changes, with kills right after the first report of a misfit."""
    lake = tmp_path / "lake"
    with real_tarantool.serve(tmp_path / "server") as server:
        create(server.uri, 512, "orders", LAYOUT)
        create(server.uri, 513, "plain", (("id", "unsigned"), ("name", "string")))
        insert_into(server.uri, 512, [(1, *FITTING), *SERVER_ROWS])
        run(server.uri, "box.snapshot()")
        arguments = ["--trigger-seconds=0", "--max-rows=40", "--decimal-scale=4", server.uri, str(lake)]
        mirror = MirrorProcess(arguments, tmp_path)
        mirror.wait_for("its first load", lambda event: event["event"] == "snapshot" and event["rows"] is not None)
        for turn in range(3):
            rows = [(key + 10 * (1 + step + 20 * turn), *each) for step in range(20) for key, *each in SERVER_ROWS]
            insert_into(server.uri, 512, rows)
            insert_into(server.uri, 513, [(turn, "goes on")])
            if turn < 2:
                mirror.wait_for("a misfit", lambda event: event["event"] == "misfits")
                mirror.kill()
                mirror = MirrorProcess(arguments, tmp_path)
        position = run(server.uri, "return box.info.vclock")[0]
        mirror.wait_until({int(number): lsn for number, lsn in dict(position).items()})
        assert mirror.stop() == 0
    found = quarantined(lake)
    assert len({*of(found, "key", "field")}) == len(found) == 6 * 61
    assert {*of(found, "field", "value", "reason")} == {each[1:] for each in EXPECTED}
    assert [row["name"] for row in rows_of(lake, "plain")] == ["goes on"] * 3
    assert len(rows_of(lake, "orders")) == 1 + 4 * 61
    assert sum(None in row for row in shown(lake)) == 4 * 61


# --- types of single columns ---

WIDE = FieldTypes.parse(["orders.big=decimal(20,0)", "orders.amount=decimal(38,6)", "orders.note=binary"])
WIDE_SHOWN = [
    (1, Decimal(7), Decimal("1.234500"), b"fits"),
    (2, Decimal(2**64 - 1), Decimal("1.500000"), b"big"),
    (3, Decimal(3), Decimal("1.234560"), b"precise"),
    (4, Decimal(4), Decimal("4.000000"), b"caf\xe9"),
    (5, Decimal(2**63), Decimal("1.234560"), b"caf\xe9"),
]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_declared_types_hold_what_default_types_do_not(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, is_loaded: bool
) -> None:
    lake = tmp_path / "lake"
    if is_loaded:
        archive.snapshot(VClock({1: 2}), snapshot((1, *FITTING), *((key, *row) for key, row in MISFITS.items())))
        archive.save()
    else:
        write_misfits(archive, 3)
    mirror_once(spark, [archive.directory], lake, field_types=WIDE)
    assert shown(lake) == WIDE_SHOWN
    assert quarantined(lake) == []
    archive.write(whole(insert(30, 6, 2**63, Decimal("9.999999"), LATIN)))
    archive.save()
    mirror_once(spark, [archive.directory], lake)  # the lake remembers its types
    assert shown(lake)[-1] == (6, Decimal(2**63), Decimal("9.999999"), b"caf\xe9")
    assert quarantined(lake) == []


def test_types_of_a_lake_change_by_retype_only(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    archive.save()
    mirror_once(spark, [archive.directory], lake, field_types=FieldTypes.parse(["orders.big=double"]))
    for text, was in (("orders.big=decimal(20,0)", "double"), ("orders.note=binary", "no declared type")):
        with pytest.raises(OtherSettings, match=f"created with {was} for {text.partition('=')[0]}; change .* --retype"):
            mirror_once(spark, [archive.directory], lake, field_types=FieldTypes.parse([text]))
    mirror_once(spark, [archive.directory], lake, field_types=FieldTypes.parse(["orders.big=double"]))


@pytest.mark.parametrize(
    ("retype", "field_types", "problem"),
    [
        ("orders.nope=bigint", "", "--retype: space 'orders' has no field 'nope'; did you mean note"),
        ("order.big=bigint", "", r"--retype: no space 'order'; did you mean orders\?"),
        ("orders.note=bigint", "", "cannot hold a field of type string; use binary, string"),
        ("orders.big=bigint", "orders.big=double", "orders.big is given by both --type and --retype; omit --type"),
    ],
)
def test_unsuitable_retype_changes_nothing(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, retype: str, field_types: str, problem: str
) -> None:
    lake = tmp_path / "lake"
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    before = rows_of(lake, "orders")
    given = FieldTypes.parse([field_types] if field_types else [])
    with pytest.raises(WrongType, match=problem):
        mirror_once(spark, [archive.directory], lake, retype=FieldTypes.parse([retype]), field_types=given)
    assert rows_of(lake, "orders") == before


def test_types_of_a_new_lake_are_checked_before_anything_is_created(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.save()
    with pytest.raises(WrongType, match=r"--type: no space 'other'; known spaces: .*orders"):
        mirror_once(spark, [archive.directory], lake, field_types=FieldTypes.parse(["other.id=bigint"]))
    with pytest.raises(WrongType, match=r"--retype: .* has no tables yet; use --type for a new lake"):
        mirror_once(spark, [archive.directory], lake, retype=FieldTypes.parse(["orders.big=double"]))
    assert not lake.exists()


@pytest.mark.parametrize("history", [False, True])
def test_retype_rewrites_the_table_and_heals_its_misfits(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, history: bool
) -> None:
    lake = tmp_path / "lake"
    write_misfits(archive, 3)
    other = whole(define(20, 600, "other", *LAYOUT), define_key(21, 600), insert(22, 1, 2**63, 1, "x", space=600))
    archive.write(other, whole(statement(RequestType.REPLACE, 23, {0x10: 512, 0x21: (5, 2**63, 1, LATIN)})))
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES, history=history)
    versions = {name: table.version for name, table in Lake.open(str(lake)).tables().items()}
    retype = FieldTypes.parse(["orders.big=decimal(20,0)", "orders.note=binary"])
    told = mirror_once(spark, [archive.directory], lake, types=TYPES, retype=retype, history=history)
    assert "table orders retyped" in [str(event) for event in told]
    current = [row for row in rows_of(lake, "orders") if row.get("_is_current", True)]
    assert [(row["big"], row["note"]) for row in current] == [(each[1], each[3]) for each in WIDE_SHOWN]
    left = [row for row in quarantined(lake) if row["healed_at"] is None]
    assert {*of(left, "space", "field")} == {("orders", "amount"), ("other", "big")}
    after = {name: table.version for name, table in Lake.open(str(lake)).tables().items()}
    assert after["other"] == versions["other"], "other tables are not touched"
    progress = [event for event in told if isinstance(event, MirrorProgress)][-1]
    assert progress.quarantine_rows == len(left)
    archive.write(whole(insert(30, 6, 2**64 - 2, 1, LATIN)))
    archive.save()
    mirror_once(spark, [archive.directory], lake, types=TYPES, history=history)
    assert rows_of(lake, "orders")[-1]["big"] == Decimal(2**64 - 2)


def test_retype_to_a_narrower_type_quarantines_what_no_longer_fits(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    write_misfits(archive, 3)
    mirror_once(spark, [archive.directory], lake, field_types=WIDE)
    mirror_once(spark, [archive.directory], lake, retype=FieldTypes.parse(["orders.big=bigint"]))
    assert [row[1] for row in shown(lake)] == [7, None, 3, 4, None]
    assert of(quarantined(lake), "key", "field", "reason") == [("[2]", "big", "too_large"), ("[5]", "big", "too_large")]


@pytest.mark.parametrize(
    "place",
    ["flowstone.lake.embedded_table.EmbeddedTable.retype", "flowstone.lake.quarantine.Quarantine.heal"],
)
def test_interrupted_retype_is_finished_by_the_next_start(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    lake = tmp_path / "lake"
    write_misfits(archive, 3)
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    with monkeypatch.context() as patched:
        patched.setattr("flowstone.spark.mirror.progress.Meter.healed", lambda self, count: None)
        if place.endswith("heal"):
            patched.setattr("flowstone.spark.mirror.mirror_run.MirrorRun._heal", lambda self: None)
        patched.setattr(place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            mirror_once(spark, [archive.directory], lake, types=TYPES, retype=WIDE)
    mirror_once(spark, [archive.directory], lake, types=TYPES)
    assert shown(lake) == WIDE_SHOWN
    assert {row["healed_at"] is None for row in quarantined(lake)} == {False}


def test_type_is_ignored_when_the_field_can_no_longer_have_it(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    write_misfits(archive, 3)
    mirror_once(spark, [archive.directory], lake, field_types=WIDE)
    layout = (("id", "unsigned"), ("big", "map"), ("amount", "decimal"))
    archive.write(whole(truncate(20), define(21, 512, "orders", *layout), insert(22, 1, {"a": 1}, 1)))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    (row,) = rows_of(lake, "orders")
    assert (row["big"], row["amount"], row["_extra"]) == ('{"a":1}', Decimal("1.000000"), None)


def test_file_and_options_of_the_command_declare_types(archive: WrittenArchive, tmp_path: Path, java: None) -> None:
    write_misfits(archive, 3)
    config, lake = tmp_path / "mirror.toml", tmp_path / "lake"
    config.write_text("[types.orders]\nbig = 'decimal(20,0)'\nnote = 'binary'\n")
    wrong = ["mirror", "--once", "--config", str(config), "--type", "orders.note=string", archive.directory, str(lake)]
    assert run_command(wrong) == 2
    arguments = ["--once", f"--config={config}", "--type=orders.amount=decimal(38,6)", archive.directory, str(lake)]
    mirror = MirrorProcess(arguments, tmp_path)
    mirror.process.wait(300)
    assert mirror.stop() == 0, mirror.said()
    assert shown(lake) == WIDE_SHOWN
