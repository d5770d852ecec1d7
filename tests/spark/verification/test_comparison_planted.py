"""Verify finds each planted difference, in node, archive and lake, on either side, and no others.

At CI scale the plants of one kind are put into one copy and found together; at full scale each is planted alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from flowstone.cli import run
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.iproto.uri import parse_uri
from flowstone.spark.verification.comparison import VerifyOptions
from flowstone.spark.verification.digests import DIFFERS, MISSING_IN_A
from flowstone.spark.verification.lake_side import LakeSide
from flowstone.spark.verification.report import VerifyReport
from flowstone.spark.verification.sides import LogSide, NodeSide, Side
from tests import served_node
from tests.spark.comparisons import verify_sides
from tests.spark.planted import (
    FITTING,
    NAMES,
    ORDERS,
    PLANTS,
    SEQUENCE_DATA,
    Plant,
    Source,
    as_nop,
    rewrite,
    source,
    with_body,
)
from tests.spark.planted_lakes import LAKE_PLANTS, LakePlant, copied

EVERYTHING = VerifyOptions(wait=0.0, limit=1000)


@dataclass(frozen=True)
class World:
    """A real server with its archive, and a lake of that archive."""

    spark: SparkSession
    source: Source
    lake: Path
    scratch: Path

    def found(self, a: Side, b: Side, options: VerifyOptions = EVERYTHING) -> VerifyReport:
        try:
            return verify_sides(self.spark, a, b, options)
        finally:
            a.close()
            b.close()

    def node(self) -> NodeSide:
        return NodeSide(parse_uri(self.source.server.uri))

    def archive(self) -> LogSide:
        return LogSide(str(self.source.archive))

    def copy(self, name: str) -> Path:
        return self.scratch / name


@pytest.fixture(scope="module")
def world(spark: SparkSession, tarantool: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    scratch = tmp_path_factory.mktemp("planted")
    with source(scratch) as begun:
        yield World(spark, begun, mirror(begun.archive, scratch / "lake"), scratch)


def mirror(archive: Path, lake: Path, *options: str) -> Path:
    """Create the lake of an archive by the command."""
    assert run(["mirror", "--once", *options, str(archive), str(lake)]) == 0
    return lake


def told(report: VerifyReport) -> set[tuple[str, str, str]]:
    return {(each.space, each.key, each.kind) for each in report.differences}


def check_told(
    report: VerifyReport, plants: list[Plant], side: str, more: Collection[tuple[str, str, str]] = ()
) -> None:
    """Check that each plant is reported with its place in the tuple, and nothing else is reported."""
    assert not report.is_equal
    expected = {(NAMES[plant.space_id], plant.key, plant.kind_on(side)) for plant in plants}
    if any(plant.name.startswith("what two rows") for plant in plants):
        expected.add(("events", '["k58"]', DIFFERS))
    assert told(report) == expected | {*more}
    paths = {(each.space, each.key): [field.path for field in each.fields] for each in report.differences}
    for plant in plants:
        if plant.path is not None:
            assert any(path.startswith(plant.path) for path in paths[NAMES[plant.space_id], plant.key]), plant.name


# --- nothing planted ---


def test_identical_sides_have_no_differences(world: World) -> None:
    """A real server is compared with the lake."""
    report = world.found(world.node(), LakeSide(str(world.lake)))
    assert report.is_equal
    assert not report.differences
    assert {space.name for space in report.spaces} == {"_space", "_index", "orders", "events", "pairs", "empty"}
    rows = {space.name: space.rows_b for space in report.spaces}
    assert (rows["orders"], rows["events"], rows["pairs"]) == (129, 124, 130)


@pytest.mark.full_scale(reason="runs at full scale only")
@pytest.mark.parametrize(("a", "b"), [("log", "archive"), ("archive", "node"), ("lake", "log"), ("lake", "lake")])
def test_identical_sides_of_every_kind_have_no_differences(world: World, a: str, b: str) -> None:
    kinds: dict[str, Callable[[], Side]] = {
        "log": lambda: LogSide(str(world.source.server.directory)),
        "archive": lambda: LogSide(str(rewrite(world.source.archive, world.copy(f"clean-{a}-{b}")))),
        "node": world.node,
        "lake": lambda: LakeSide(str(world.lake)),
    }
    report = world.found(kinds[a](), kinds[b]())
    assert report.is_equal
    assert not report.a.lacks
    assert ("_sequence_data" in {space.name for space in report.spaces}) is ("lake" not in (a, b))


# --- archives ---


def _log_edit(row: Row) -> Row:
    """Change four rows of the log: an operand, a missing update, a missing deletion, a double."""
    body = unpack_body(row.body) if row.body else {}
    if body.get(0x10) != ORDERS:
        return row
    match row.type, body.get(0x20), body.get(0x21):
        case RequestType.UPDATE, (3,), operations:
            assert operations
            return with_body(row, {**body, 0x21: (("+", 3, 2), *operations[1:])})
        case RequestType.UPDATE, (4,), _:
            return as_nop(row)
        case RequestType.DELETE, (11,), _:
            return as_nop(row)
        case RequestType.REPLACE, _, (205, *_) as values:
            return with_body(row, {**body, 0x21: (*values[:2], float(values[2]), *values[3:])})
    return row


LOG_EDITS = {
    ("orders", "[3]", DIFFERS),
    ("orders", "[4]", DIFFERS),
    ("orders", "[11]", MISSING_IN_A),
    ("orders", "[205]", DIFFERS),
}


def test_plants_in_the_snapshot_and_log_of_an_archive_are_found(world: World) -> None:
    """All LSNs are present, so positions reveal nothing."""
    planted = rewrite(world.source.archive, world.copy("planted"), FITTING, log=_log_edit)
    report = world.found(world.archive(), LogSide(str(planted)))
    check_told(report, FITTING, "B", LOG_EDITS)
    assert report.difference_count == len(report.differences) == len(FITTING) + 1 + len(LOG_EDITS)
    assert not report.b.lacks


# --- lagging sides ---


def test_missing_last_lsn_is_named(world: World) -> None:
    """The server's own directory is compared with an archive that lacks its last row."""
    short = rewrite(world.source.archive, world.copy("short"), lacking=1)
    report = world.found(LogSide(str(world.source.server.directory)), LogSide(str(short)))
    lsn = report.b.position[1] + 1
    assert (report.a.lacks, report.b.lacks) == ((), ((1, lsn, lsn),))
    assert not report.is_equal
    assert report.lateness() == [f"B ({short}) lacks LSN {lsn} of replica 1"]


# --- nodes ---

REFUSED_BY_A_NODE = ("an index is unique",)
"""Plants that a node refuses: a unique index cannot have duplicate names."""


def test_plants_in_a_live_node_are_found(world: World) -> None:
    """A Flowstone node with different initial data is compared with the real server; both are followed."""
    plants = [plant for plant in FITTING if plant.name not in REFUSED_BY_A_NODE]
    copy = rewrite(world.source.archive, world.copy("node"), plants)
    with served_node.serve(copy, dialect="2.6") as node:
        report = world.found(NodeSide(parse_uri(f"127.0.0.1:{node.port}")), world.node())
    check_told(report, plants, "A")


# --- lakes ---


def check_lake(report: VerifyReport, plants: list[LakePlant]) -> None:
    assert not report.is_equal
    assert told(report) == {(plant.space, plant.key, plant.kind) for plant in plants if plant.kind is not None}
    for plant in plants:
        if plant.wrong is not None:
            said = [row.what for row in report.wrong if row.space == plant.space and plant.wrong in row.what]
            assert len(said) == 1, (plant.name, report.wrong)
    assert len(report.wrong) == sum(plant.wrong is not None for plant in plants)


def test_plants_in_a_lake_are_found(world: World) -> None:
    lake = copied(world.lake, world.copy("planted-lake"))
    for plant in LAKE_PLANTS:
        plant.do(lake)
    check_lake(world.found(world.archive(), LakeSide(str(lake))), LAKE_PLANTS)


# --- plants one by one ---


@pytest.mark.full_scale(reason="plants one by one run at full scale only")
@pytest.mark.parametrize("number", range(len(PLANTS)))
def test_each_plant_is_found_alone(world: World, number: int) -> None:
    """The plants are alternately in A and in B, against the live server, the lake and the archive."""
    plant, side = PLANTS[number], "AB"[number % 2]
    planted = LogSide(str(rewrite(world.source.archive, world.copy(f"alone-{number}"), [plant])))
    others: list[Callable[[], Side]] = [world.node, world.archive]
    if plant.space_id != SEQUENCE_DATA:  # a lake has no sequences
        others.append(lambda: LakeSide(str(world.lake)))
    other = others[number % len(others)]()
    report = world.found(*((planted, other) if side == "A" else (other, planted)))
    check_told(report, [plant], side)


@pytest.mark.full_scale(reason="plants one by one run at full scale only")
@pytest.mark.parametrize("number", range(len(LAKE_PLANTS)))
def test_each_plant_in_a_lake_is_found_alone(world: World, number: int) -> None:
    lake = copied(world.lake, world.copy(f"alone-lake-{number}"))
    LAKE_PLANTS[number].do(lake)
    check_lake(world.found(world.node(), LakeSide(str(lake))), [LAKE_PLANTS[number]])
