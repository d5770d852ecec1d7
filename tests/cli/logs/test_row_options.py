"""Options shared by `cat` and `play`: times, and spaces by number or name."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowstone
from flowstone.cli.console import UsageError
from flowstone.cli.logs.row_options import SPELLINGS, make_selection, parse_timestamp, spelled


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("1714564800.5", 1714564800.5),
        ("1.7e9", 1.7e9),
        ("2024-05-01T12:00:00Z", 1714564800.0),
        ("2024-05-01t12:00:00z", 1714564800.0),
        ("2024-05-01 12:00:00Z", 1714564800.0),
        ("2024-05-01T14:00:00+02:00", 1714564800.0),
        ("2024-05-01T12:00:00.5Z", 1714564800.5),
        # tt drops leading zeros of a fraction.
        ("2024-05-01T12:00:00.0187Z", 1714564800.0187),
        ("2024-05-01T12:00:00.000000001Z", 1714564800.0),
    ],
)
def test_timestamps_are_accepted_in_both_forms(text: str, seconds: float) -> None:
    assert parse_timestamp(text) == seconds


@given(st.datetimes(datetime.datetime(1970, 1, 2), datetime.datetime(2100, 1, 1)))  # noqa: DTZ001
def test_timestamp_is_the_double_nearest_to_its_digits(moment: datetime.datetime) -> None:
    utc = moment.replace(tzinfo=datetime.UTC)
    assert parse_timestamp(utc.isoformat().replace("+00:00", "Z")) == utc.timestamp()


@pytest.mark.parametrize(
    "text", ["", "noon", "nan", "inf", "2024-05-01", "2024-05-01T12:00:00", "2024-02-30T12:00:00Z", "2024-05-01T12:00Z"]
)
def test_invalid_timestamp_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="is not a valid time"):
        parse_timestamp(text)


@pytest.mark.parametrize("text", ["-1", "-0.5", "1969-12-31T23:59:59.25Z"])
def test_timestamps_before_1970_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="is before 1970"):
        parse_timestamp(text)


def test_bounds_in_the_wrong_order_are_rejected() -> None:
    assert make_selection(5, 5, None, None, None, False).to_lsn == 5
    with pytest.raises(UsageError, match="--from 6 is greater than --to 5"):
        make_selection(6, 5, None, None, None, False)


@pytest.mark.parametrize(
    ("hint", "plain", "forced"),
    [
        (None, None, None),
        ("mend it", "mend it", "mend it"),
        (
            "read the rest of the file with force, or copy it",
            "read the rest of the file with --force, or copy it",
            "copy it",
        ),
        ("move it away, or skip it with force", "move it away, or skip it with --force", "move it away"),
        ("skip it with force", "skip it with --force", None),
        ("add the snapshot, or read without settling", *["add the snapshot, or read with --no-settled"] * 2),
        ("choose unsignedAs=decimal", *["choose --unsigned-as=decimal"] * 2),
        ("choose stringsAs=binary", *["choose --strings-as=binary"] * 2),
        ("set failOnDataLoss=false to go on", *["use --no-fail-on-data-loss to go on"] * 2),
        ("read the space in the generic shape", *["omit --space to get raw tuples"] * 2),
    ],
)
def test_advice_is_spelled_as_on_the_command_line(hint: str | None, plain: str | None, forced: str | None) -> None:
    assert spelled(hint, force=False) == plain
    assert spelled(hint, force=True) == forced


def test_matched_hint_texts_still_exist_in_the_lower_packages() -> None:
    sources = "".join(
        path.read_text() for path in Path(flowstone.__file__).parent.rglob("*.py") if "cli" not in path.parts
    )
    assert [words for words in SPELLINGS if words not in sources] == []


def test_digits_are_a_space_id_and_other_text_is_a_name() -> None:
    assert make_selection(None, None, None, ["512", "users", "_user"], None, False).spaces == (512, "users", "_user")
