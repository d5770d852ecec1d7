"""Checks of options: which values they accept, and their messages for the rest."""

from __future__ import annotations

from uuid import UUID

import pytest

from flowstone.iproto import errors
from flowstone.node import option_checks as checks


def test_bounds_of_a_range_are_inclusive_or_exclusive() -> None:
    assert checks.below(1, "few")(0) == "few"
    assert checks.below(1, "few")(1) is None
    assert checks.not_above(1, "few")(1) == "few"
    assert checks.not_above(1, "few")(1.5) is None
    assert [checks.outside(1, 3, "far")(value) for value in (0, 1, 3, 4)] == ["far", None, None, "far"]


def test_unknown_name_is_reported_alone_or_with_the_valid_ones() -> None:
    assert checks.not_among(("a", "b"))("c") == "c"
    assert checks.not_among(("a", "b"))("a") is None
    assert checks.no_mode_of(("a", "b"))("c") == "the value must be one of the following strings: 'a', 'b'"


def test_replica_set_has_at_most_31_members() -> None:
    uris = tuple(f"db{number}:3301" for number in range(32))
    assert checks.no_upstreams(uris[:31]) is None
    assert checks.no_upstreams(uris) == "too many replicas"
    assert checks.no_upstreams(("no address",)) == "expected host:service or /unix.socket"


def test_uuid_must_be_complete_and_not_nil() -> None:
    name = "5313b8d5-82a0-4fb4-a280-9e8bf79e1cac"
    assert checks.no_uuid(name) is None
    assert checks.no_uuid(UUID(name).hex) == UUID(name).hex
    assert checks.no_uuid(str(UUID(int=0))) == "nil UUID is reserved"


def test_log_levels_have_names_and_numbers() -> None:
    assert checks.no_log_level("info") is checks.no_log_level("7") is None
    assert checks.no_log_level("8") == checks.no_log_level("loud")


def test_formula_is_rejected_with_a_complete_error() -> None:
    assert checks.no_quorum("N / 2 + 1") is None
    with pytest.raises(errors.TarantoolError, match=r"'replication_synchro_quorum': .*Failed to load"):
        checks.no_quorum("N +")
