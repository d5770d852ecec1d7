"""Options that `cat` and `play` share: moments in time, and spaces by number or name."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.cli.console import UsageError
from flowstone.cli.options import make_selection, parse_timestamp


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
        # tt drops the zeros in front of a fraction.
        ("2024-05-01T12:00:00.0187Z", 1714564800.0187),
        ("2024-05-01T12:00:00.000000001Z", 1714564800.0),
        ("1969-12-31T23:59:59.25Z", -0.75),
    ],
)
def test_moments_are_read_in_both_forms(text: str, seconds: float) -> None:
    assert parse_timestamp(text) == seconds


@given(st.datetimes(datetime.datetime(1970, 1, 2), datetime.datetime(2100, 1, 1)))  # noqa: DTZ001
def test_a_moment_is_the_double_nearest_to_its_digits(moment: datetime.datetime) -> None:
    utc = moment.replace(tzinfo=datetime.UTC)
    assert parse_timestamp(utc.isoformat().replace("+00:00", "Z")) == utc.timestamp()


@pytest.mark.parametrize(
    "text", ["", "noon", "nan", "inf", "2024-05-01", "2024-05-01T12:00:00", "2024-02-30T12:00:00Z", "2024-05-01T12:00Z"]
)
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no moment"):
        parse_timestamp(text)


def test_digits_are_a_space_id_and_all_else_a_name() -> None:
    assert make_selection(None, None, None, ["512", "users", "_user"], None, False).spaces == (512, "users", "_user")
