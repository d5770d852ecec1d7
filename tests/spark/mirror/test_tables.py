"""The tables of a mirror follow their spaces, on lakes without Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.update.update import UpdateRules
from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.msgpack import pack, unpack
from flowstone.lake.masks import Masking
from flowstone.lake.table import Moment
from flowstone.lake.table_schema import LakeError
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake
from flowstone.spark.mirror.batch import FoldedTable, Truncation
from flowstone.spark.mirror.choice import MirrorChoice
from flowstone.spark.mirror.progress import MirrorEvent
from flowstone.spark.mirror.start_checks import WrongPlace
from flowstone.spark.mirror.tables import EMPTY, MirrorTables, check_catalog, last_states
from tests.spark.change_rows import ORDERS, UUID
from tests.spark.lakes import rows_of, tuples_of

OTHER_UUID = "bbbbbbbb-0000-4000-8000-000000000002"
NOTHING = cast(SparkSession, None)
MASKED = Masking.parse(["orders.name=redact"])
RULES = UpdateRules(fills_gaps=True)
MOMENT = Moment(5, datetime(2026, 1, 1, tzinfo=UTC))


def states(*rows: tuple[int, tuple[Any, ...] | None]) -> pa.Table:
    """Return states by the LSN of their change; the key is 1 if there is no tuple."""
    tuples = pa.array([None if row is None else pack(row) for _, row in rows], pa.binary())
    whole = pa.array([pack(row or (1, "")) for _, row in rows], pa.binary())
    columns: dict[str, Any] = {
        "sort_key": sort_keys(ORDERS, whole),
        "tuple": tuples,
        "operation": ["replace"] * len(rows),
        "commit_version": [lsn for lsn, _ in rows],
        "commit_timestamp": [lsn * 1_000_000 for lsn, _ in rows],
        "replica_id": [1] * len(rows),
        "lsn": [lsn for lsn, _ in rows],
    }
    return pa.table({each.name: pa.array(columns[each.name], each.type) for each in EMPTY.schema})


def folded(*rows: tuple[int, tuple[Any, ...] | None]) -> FoldedTable:
    found = states(*rows)
    mask = MASKED.of(ORDERS)
    assert mask is not None
    return FoldedTable(found, pa.chunked_array([mask.tuples(found["tuple"])]), len(rows), None)


class Place:
    """Tables in a lake, their exact twins, and the events."""

    def __init__(self, directory: Path, masking: Masking, *, history: bool = False) -> None:
        self.history = history
        self.lake, self.exact = directory / "lake", directory / "exact"
        self.told: list[MirrorEvent] = []
        self.tables = self.opened(masking)

    def opened(self, masking: Masking, types: ColumnOptions | None = None) -> MirrorTables:
        lakes = (Lake.open(str(self.lake)), Lake.open(str(self.exact)))
        how: dict[str, Any] = {"types": types or ColumnOptions(), "history": self.history}
        return MirrorTables(NOTHING, *lakes, masking, MirrorChoice(), **how, on_event=self.told.append)


def test_masked_table_has_a_twin_with_the_exact_tuples(tmp_path: Path) -> None:
    place = Place(tmp_path, MASKED)
    place.tables.create([ORDERS], UUID, VClock({1: 2}), {}, {})
    place.tables.commit(ORDERS, folded((3, (1, "secret")), (4, (2, "more"))), UUID, VClock({1: 4}))
    assert tuples_of(place.lake, "orders") == [(1, "***"), (2, "***")]
    assert tuples_of(place.exact, "orders") == [(1, "secret"), (2, "more")]


def test_space_filled_in_its_first_transaction_is_created_in_one_commit(tmp_path: Path) -> None:
    place = Place(tmp_path, MASKED)
    for tables in (place.tables, place.opened(MASKED)):  # the second time, as if the first mirror had been killed
        made = folded((3, None), (4, (2, "secret")), (5, (3, "more")))
        assert tables.create([ORDERS], UUID, VClock({1: 5}), {512: made}, {}) == {512: 0}
    assert tuples_of(place.lake, "orders") == [(2, "***"), (3, "***")]
    assert tuples_of(place.exact, "orders") == [(2, "secret"), (3, "more")]


def test_history_has_the_intermediate_states_of_the_creating_transaction(tmp_path: Path) -> None:
    place = Place(tmp_path, MASKED, history=True)
    made = folded((3, (1, "first")), (4, (1, "second")), (5, (2, "other")))
    assert place.tables.create([ORDERS], UUID, VClock({1: 5}), {512: made}, {}) == {512: 0}
    rows = sorted(rows_of(place.lake, "orders"), key=lambda row: row["_lsn"])
    names = ("_operation", "_replica_id", "_lsn", "_from_version", "_to_version", "_is_current")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("replace", 1, 3, 3, 4, False),
        ("replace", 1, 4, 4, None, True),
        ("replace", 1, 5, 5, None, True),
    ]
    assert [unpack(row["_tuple"]) for row in rows] == [(1, "***"), (1, "***"), (2, "***")]
    assert tuples_of(place.exact, "orders") == [(1, "second"), (2, "other")]


def test_spaces_missing_in_a_snapshot_are_dropped_with_their_twin(tmp_path: Path) -> None:
    """The same snapshot as when the tables were created, with other spaces chosen, or a later snapshot."""
    for number, history in enumerate((False, True)):
        place = Place(tmp_path / str(number), MASKED, history=history)
        place.tables.create([ORDERS, named("shop", 513)], UUID, VClock({1: 2}), {}, {})
        place.tables.leave([], {513: named("shop", 513)}, OTHER_UUID, VClock({1: 2}), 0)
        assert len(Lake.open(str(place.lake)).tables()) == 2  # no table in the lake belongs to that replica set
        place.tables.leave([], {513: named("shop", 513)}, UUID, VClock({1: 2}), 0)
        assert (list(Lake.open(str(place.lake)).tables()), Lake.open(str(place.exact)).tables()) == (["shop"], {})
        place.tables.leave([], {}, UUID, VClock({1: 3}), 0)
        assert Lake.open(str(place.lake)).tables() == {}
        assert [str(event) for event in place.told[2:]] == ["table orders dropped", "table shop dropped"]


def test_lagging_twin_catches_up_and_the_table_applies_changes_once(tmp_path: Path) -> None:
    place = Place(tmp_path, MASKED)
    place.tables.create([ORDERS], UUID, VClock({1: 2}), {}, {})
    table = Lake.open(str(place.lake)).table("orders")
    assert table is not None
    mask = MASKED.of(ORDERS)
    assert mask is not None
    shown = mask.definition(ORDERS)
    table.merge(states((5, (1, "***"))), shown, VClock({1: 5}), UUID)  # the mirror was killed here
    again = place.opened(MASKED)
    target = again.targets({512: ORDERS}, UUID, {}, RULES)[512]
    assert (target.applied, target.shown) == (VClock({1: 2}), VClock({1: 5}))
    # The batch is smaller than the unfinished one: the table must not move backwards.
    again.commit(ORDERS, folded((4, (1, "older"))), UUID, VClock({1: 4}))
    assert table.version == Lake.open(str(place.lake)).table("orders").version  # type: ignore[union-attr]
    assert tuples_of(place.exact, "orders") == [(1, "older")]
    again.commit(ORDERS, folded((6, (1, "newer"))), UUID, VClock({1: 6}))
    assert tuples_of(place.exact, "orders") == [(1, "newer")]
    assert tuples_of(place.lake, "orders") == [(1, "***")]


def test_batch_without_changes_commits_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, Masking())
    place.tables.create([ORDERS], UUID, VClock({1: 2}), {}, {})
    assert place.tables.commit(ORDERS, None, UUID, VClock({1: 3})) is None
    assert (
        place.tables.commit(ORDERS, FoldedTable(EMPTY, pa.chunked_array([EMPTY["tuple"]]), 0, None), UUID, VClock())
        is None
    )


def test_truncation_keeps_later_rows(tmp_path: Path) -> None:
    place = Place(tmp_path, Masking())
    place.tables.create([ORDERS], UUID, VClock({1: 2}), {}, {})
    place.tables.commit(ORDERS, folded((3, (1, "a")), (4, (2, "b"))), UUID, VClock({1: 4}))
    truncation = Truncation(5, 5, 5_000_000)
    place.tables.commit(ORDERS, folded((6, (3, "c"))), UUID, VClock({1: 6}), truncation=truncation)
    assert tuples_of(place.lake, "orders") == [(3, "c")]
    assert str(place.told[-1]) == "table orders truncated"


def test_masked_space_cannot_be_renamed(tmp_path: Path) -> None:
    place = Place(tmp_path, MASKED)
    place.tables.create([ORDERS], UUID, VClock({1: 2}), {}, {})
    with pytest.raises(LakeError, match="was renamed to 'sales', and --mask names only one of these"):
        place.tables.rename([(ORDERS, msgspec.structs.replace(ORDERS, name="sales"))], UUID, VClock({1: 3}), MOMENT)


def named(name: str, number: int) -> SpaceDefinition:
    return msgspec.structs.replace(ORDERS, name=name, id=number)


def test_name_can_be_reused_in_the_transaction_that_frees_it(tmp_path: Path) -> None:
    place = Place(tmp_path, Masking())
    shop, import_ = named("shop", 512), named("import", 513)
    place.tables.create([shop, import_], UUID, VClock({1: 2}), {}, {})
    for space, text in ((shop, "old"), (import_, "new")):
        place.tables.commit(space, folded((3, (1, text))), UUID, VClock({1: 3}))
    # The space with the smaller id comes last, because its new name belongs to another space until then.
    pairs = [(import_, named("shop", 513)), (shop, named("shop_old", 512))]
    for tables in (place.tables, place.opened(Masking())):  # the second time, as if the first mirror had been killed
        tables.rename(pairs, UUID, VClock({1: 4}), MOMENT)
        assert sorted(Lake.open(str(place.lake)).tables()) == ["shop", "shop_old"]
        assert (tuples_of(place.lake, "shop"), tuples_of(place.lake, "shop_old")) == ([(1, "new")], [(1, "old")])


def test_swapped_names_in_one_transaction_are_refused_before_any_change(tmp_path: Path) -> None:
    place = Place(tmp_path, Masking())
    one, other, third = named("one", 512), named("other", 513), named("third", 514)
    place.tables.create([one, other, third], UUID, VClock({1: 2}), {}, {})
    pairs = [(one, named("other", 512)), (other, named("one", 513)), (third, named("last", 514))]
    with pytest.raises(LakeError, match="swaps the names of spaces 'one' to 'other', 'other' to 'one'"):
        place.tables.rename(pairs, UUID, VClock({1: 4}), MOMENT)
    assert sorted(Lake.open(str(place.lake)).tables()) == ["one", "other", "third"]


def test_later_created_table_has_the_chosen_column_types(tmp_path: Path) -> None:
    place = Place(tmp_path, Masking())
    types = ColumnOptions(unsigned_as="decimal", strings_as="binary")
    place.opened(Masking(), types).create([ORDERS], UUID, VClock({1: 2}), {}, {})
    assert Lake.open(str(place.lake)).tables()["orders"].schema.options == types


def test_all_tables_are_vacuumed_including_those_of_dropped_spaces(tmp_path: Path) -> None:
    place = Place(tmp_path, MASKED)
    sales = msgspec.structs.replace(ORDERS, id=513, name="sales")
    place.tables.create([ORDERS, sales], UUID, VClock({1: 2}), {}, {})
    for lsn in (3, 4):
        for space in (ORDERS, sales):
            place.tables.commit(space, folded((lsn, (1, f"at {lsn}"))), UUID, VClock({1: lsn}))
    place.tables.drop([sales], UUID, VClock({1: 5}), 0)
    place.opened(MASKED).vacuum(0)
    tables = (place.lake / "orders", place.lake / "sales", place.exact / "orders")
    assert [len(list(each.glob("*.parquet"))) for each in tables] == [1, 1, 1]
    place.tables = place.opened(MASKED)
    place.tables.commit(ORDERS, folded((6, (2, "more"))), UUID, VClock({1: 6}))
    place.tables.vacuum(0)
    # The table is at its newest version.
    place.tables.commit(ORDERS, folded((7, (3, "and more"))), UUID, VClock({1: 7}))
    assert tuples_of(place.exact, "orders") == [(1, "at 4"), (2, "more"), (3, "and more")]


def test_deleted_table_is_reported_missing(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="the table of space 'orders' is missing"):
        Place(tmp_path, Masking()).tables.targets({512: ORDERS}, UUID, {}, RULES)


def test_missing_table_of_a_renamed_space_is_reported(tmp_path: Path) -> None:
    sales = msgspec.structs.replace(ORDERS, name="sales")
    with pytest.raises(LakeError, match="the table of space 'orders' is missing; restore its directory"):
        Place(tmp_path, Masking()).tables.leave([(ORDERS, sales)], {512: sales}, UUID, VClock({1: 5}), 0)


def test_catalog_schema_must_exist(spark: SparkSession) -> None:
    check_catalog(spark, "default")
    for name, problem in (("nosuch", "no such schema"), ("no.such.schema", ""), ("a b", "")):
        with pytest.raises(WrongPlace, match=f"--catalog {name}: .*{problem}"):
            check_catalog(spark, name)


def test_last_states_keep_the_last_state_of_each_key() -> None:
    found = last_states(states((1, (1, "a")), (2, (1, "b")), (3, (2, "c")), (4, (3, "d")), (5, (3, "e"))))
    assert [unpack(each)[1] for each in found["tuple"].to_pylist()] == ["b", "c", "e"]
    assert last_states(EMPTY).num_rows == 0
