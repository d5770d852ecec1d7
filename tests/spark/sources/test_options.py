"""Options of the sources: their meaning, and one sentence for each error."""

from __future__ import annotations

import datetime

import pytest

from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.errors import FlowstoneError
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.options import (
    TARANTOOL_OPTIONS,
    WRITER_OPTIONS,
    XLOG_OPTIONS,
    AsOf,
    SchemaAt,
    When,
    WrongOption,
    as_of,
    tarantool_options,
    writer_options,
    xlog_options,
)
from tests.places import ROOT
from tests.spark.change_rows import UUID

XLOG = {"path": "archive"}
STATE = {"mode": "state", "space": "t"}
LIVE = {"uri": "db1:3301"}


def test_path_alone_means_all_settled_changes() -> None:
    options = xlog_options(XLOG)
    assert options.paths == ("archive",)
    assert options.mode == "changes"
    assert options.changes.images == "ops"
    assert options.changes.fail_on_data_loss
    assert options.changes.starting is None


def test_option_names_are_case_insensitive() -> None:
    options = xlog_options({"PATH": "a, b", "startingoffsets": '{"1": 5}', "FAILONDATALOSS": "False", "space": "512"})
    assert options.paths == ("a", "b")
    assert options.changes.starting == {None: VClock({1: 5})}
    assert not options.changes.fail_on_data_loss
    assert options.changes.space == 512
    assert xlog_options({**XLOG, "space": '"512"'}).changes.space == "512"


def test_streams_have_limits() -> None:
    given = {**XLOG, "maxRowsPerTrigger": "100000", "maxBytesPerTrigger": "64m", "columns": "id, _lsn"}
    changes = xlog_options(given, streaming=True).changes
    assert (changes.max_rows, changes.max_bytes, changes.wanted) == (100_000, 64 * 1024**2, ("id", "_lsn"))


def test_column_types_can_be_chosen() -> None:
    given = {**XLOG, "unsignedAs": "decimal", "decimalScale": "2", "stringsAs": "binary"}
    assert xlog_options(given).changes.columns == ColumnOptions("decimal", 2, "binary")


def test_members_and_replica_sets_are_separated() -> None:
    options = tarantool_options(
        {"uri": "u:p@a:3301,b:3301;c:3301", "spoolLocation": "spool", "register": "true"}, streaming=True
    )
    assert [[member.address for member in members] for members in options.members] == [["a:3301", "b:3301"], ["c:3301"]]
    assert options.transport == "auto"
    assert options.register


def test_writer_needs_a_space_and_replaces_by_default() -> None:
    options = writer_options({**LIVE, "space": "orders"})
    assert (options.uri.address, options.space, options.on_conflict) == ("db1:3301", "orders", "replace")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("4711", AsOf(lsn=4711)),
        ("1777636800.0", AsOf(time=1777636800.0)),
        ("2026-05-01T12:00:00Z", AsOf(time=1777636800.0)),
        ("{1: 500, 2: 3}", AsOf(vclock=VClock({1: 500, 2: 3}))),
        ('{"1": 500}', AsOf(vclock=VClock({1: 500}))),
    ],
)
def test_past_moments_are_times_positions_or_lsns(text: str, moment: AsOf) -> None:
    assert xlog_options({**XLOG, "space": "t", "mode": "state", "asOf": text}).as_of == moment


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5 minutes ago", 300), ("1 minute ago", 60), ("90s ago", 90), ("1.5 hours ago", 5400), ("2 D AGO", 172800)],
)
def test_moment_may_be_relative_to_now(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.spark.sources.options.time.time", lambda: 1_000_000.0)
    assert as_of(text) == AsOf(time=1_000_000.0 - seconds)


@pytest.mark.parametrize("text", ["5 ago", "ago", "5 minutes", "-5 minutes ago", "5 weeks ago"])
def test_unknown_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="5 minutes ago"):
        as_of(text)


@pytest.mark.parametrize(
    ("when", "moment"),
    [
        ("{1: 500}", AsOf(vclock=VClock({1: 500}))),
        (4711, AsOf(lsn=4711)),
        (VClock({1: 500}), AsOf(vclock=VClock({1: 500}))),
        (datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC), AsOf(time=1777636800.0)),
    ],
)
def test_programs_can_pass_moments_as_values(when: When, moment: AsOf) -> None:
    assert as_of(when) == moment


def test_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="a time with a time zone"):
        as_of(datetime.datetime(2026, 5, 1, 12))  # noqa: DTZ001 - that is the point


def test_stream_resumes_from_a_checkpoint_or_an_offset() -> None:
    checkpoint = xlog_options({**XLOG, "schemaAt": " checkpoints/orders "}, streaming=True).schema_at
    assert checkpoint == SchemaAt("checkpoints/orders")
    for text in ('{"1": 5}', f'{{"{UUID}": {{"1": 5}}, "stamps": {{"{UUID}": 7}}}}'):
        found = xlog_options({**XLOG, "schemaAt": text}, streaming=None).schema_at
        assert found is not None
        assert list(found.positions.values()) == [VClock({1: 5})]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "option path is missing"),
        ({**XLOG, "startingOffset": "latest"}, "has no option 'startingOffset'; did you mean startingOffsets?"),
        ({**XLOG, "zzz": "1"}, "has no option 'zzz'; known options: asOf, columns"),
        ({**XLOG, "images": "all"}, "images is 'all'; use ops, post or full"),
        ({**XLOG, "failOnDataLoss": "no"}, "failOnDataLoss is 'no'; use true or false"),
        ({**XLOG, "startingOffsets": "now"}, "startingOffsets: invalid offset 'now'; use earliest, latest, snapshot"),
        ({**XLOG, "endingOffsets": "earliest"}, "endingOffsets is 'earliest'; use latest or a vclock"),
        (
            {**XLOG, "maxRowsPerTrigger": "5"},
            "maxRowsPerTrigger does not apply to a batch query; use it with spark.readStream",
        ),
        ({**XLOG, "columns": "a,b,a"}, "columns is 'a,b,a'; duplicate column 'a'"),
        ({**XLOG, "columns": " "}, "columns is ' '; use column names"),
        ({**XLOG, "space": ""}, "space is empty"),
        (
            {**XLOG, "startingOffsets": "snapshot"},
            "startingOffsets=snapshot does not apply to a batch query; use it with spark.readStream",
        ),
        ({**XLOG, "schemaAt": "{}"}, "schemaAt does not apply to a batch query"),
        ({**XLOG, **STATE, "endingOffsets": "latest"}, "offsets do not apply to mode=state"),
        ({**XLOG, **STATE, "images": "full"}, "images=full does not apply to mode=state"),
        ({**XLOG, "decimalScale": "39"}, "decimalScale is '39'; use a number from 0 to 38"),
        ({**XLOG, "asOf": "5"}, "asOf needs mode=state"),
        ({**XLOG, "mode": "state"}, "mode=state needs a space"),
        ({**XLOG, "space": "t", "mode": "state", "asOf": "noon"}, "asOf is 'noon'; use a time with a time zone"),
        ({**XLOG, "space": "t", "mode": "state", "asOf": "2026-05-01"}, "use a time with a time zone"),
        ({**XLOG, "space": "t", "mode": "state", "asOf": "{1: x}"}, "asOf is '{1: x}'; "),
    ],
)
def test_each_mistake_gets_one_clear_sentence(given: dict[str, str], message: str) -> None:
    with pytest.raises(WrongOption) as caught:
        xlog_options(given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**XLOG, "maxRowsPerTrigger": "0"}, "maxRowsPerTrigger is '0'; use a whole number above 0"),
        ({**XLOG, "maxBytesPerTrigger": "1x"}, "maxBytesPerTrigger is '1x'; use a number of bytes"),
        ({**XLOG, "endingOffsets": "latest"}, "endingOffsets does not apply to a stream"),
        ({**XLOG, "space": "t", "mode": "state"}, "mode=state cannot be streamed"),
        ({**XLOG, "schemaAt": "{1: 5}"}, "schemaAt: invalid offset '{1: 5}'"),
    ],
)
def test_stream_options_are_checked(given: dict[str, str], message: str) -> None:
    with pytest.raises(WrongOption) as caught:
        xlog_options(given, streaming=True)
    assert message in str(caught.value)


def test_live_source_and_writer_options_are_checked() -> None:
    with pytest.raises(WrongOption, match="option spoolLocation is missing"):
        tarantool_options(LIVE, streaming=True)
    with pytest.raises(WrongOption, match="replica set without members"):
        tarantool_options({"uri": "a:3301;"})
    with pytest.raises(WrongOption, match="option space is missing"):
        writer_options(LIVE)
    with pytest.raises(WrongOption, match="transport is 'ftp'; use auto, file, inline or tcp"):
        tarantool_options({**LIVE, "spoolLocation": "spool", "transport": "ftp"}, streaming=True)


def test_passwords_are_in_no_message() -> None:
    with pytest.raises(FlowstoneError) as caught:
        tarantool_options({"uri": "u:verysecret@a:notaport"})
    assert "verysecret" not in str(caught.value)


def test_reference_page_names_all_options() -> None:
    text = (ROOT / "docs/reference/spark.md").read_text()
    spark_s_own = {"checkpointLocation"}
    missing = [name for name in (*XLOG_OPTIONS, *TARANTOOL_OPTIONS, *WRITER_OPTIONS) if f"`{name}`" not in text]
    assert set(missing) == spark_s_own


def test_batch_options_of_a_server_differ_from_stream_options() -> None:
    assert tarantool_options({**LIVE, "space": "t", "readMode": "SELECT"}).read_mode == "select"
    for name in ("startingOffsets", "images", "failOnDataLoss", "register", "transportAddress"):
        with pytest.raises(WrongOption, match=f"{name} does not apply to a batch query"):
            tarantool_options({**LIVE, name: "true"})
    with pytest.raises(WrongOption, match="readMode does not apply to a stream"):
        tarantool_options({**LIVE, "spoolLocation": "spool", "readMode": "select"}, streaming=True)
    with pytest.raises(WrongOption, match="readMode=select needs a space"):
        tarantool_options({**LIVE, "readMode": "select"})
    with pytest.raises(WrongOption, match="option uri is missing"):
        tarantool_options({"space": "t"})
