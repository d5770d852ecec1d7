"""The messages of all server versions about a stopped link are understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone import Node
from flowstone.iproto.uri import parse_uri
from flowstone.observation.findings.finding import Kind
from flowstone.observation.findings.link_causes import QUOTED_MAX, Between, cause_of, conflict_advice, quoted
from flowstone.observation.query import Asking
from flowstone.outside import production
from tests.node.upstream.test_applier import until
from tests.real_tarantool import free_port

BETWEEN = Between("b", "a")
OURS, THEIRS = "11111111-0000-4000-8000-000000000000", "22222222-0000-4000-8000-000000000000"
ACCESS = "Read access to universe '' is denied for user 'replicator'"

WORDS = [
    ("Duplicate key exists in unique index 'pk' in space 'ledger'", Kind.DUPLICATE_KEY),
    (
        'Duplicate key exists in unique index "pk" in space "t" with old tuple - [1, "a"] and new tuple - [1, "b"]',
        Kind.DUPLICATE_KEY,
    ),
    ("Missing .xlog file between LSN 5 {1: 5} and 10 {1: 9, 2: 1}", Kind.LOG_GAP),
    ("Split-Brain discovered: got a request with lsn from an already processed range", Kind.SPLIT_BRAIN),
    (f"Replica set UUID mismatch: expected {OURS}, got {THEIRS}", Kind.WRONG_CLUSTER),
    (f"Replica {OURS} is not registered with replica set {THEIRS}", Kind.NOT_REGISTERED),
    (
        (
            f"Replica {OURS} is not registered with replica set {THEIRS}; "
            f"that is another replica set ({THEIRS}, ours is {OURS}): correct the URI"
        ),
        Kind.WRONG_CLUSTER,
    ),
    ("Can't subscribe non-anonymous replica x until join is done", Kind.NOT_REGISTERED),
    ("The local instance id 3 is read-only; this instance was expelled from its replica set", Kind.NOT_REGISTERED),
    ("Anonymous replica does not support non-anonymous followers.", Kind.NOT_REGISTERED),
    ("db1:3301 is not a member: _cluster does not have x as 3", Kind.NOT_REGISTERED),
    (ACCESS, Kind.NO_RIGHTS),
    ("Write access to space '_cluster' is denied for user 'replicator'", Kind.NO_RIGHTS),
    ("Incorrect password supplied for user 'replicator'", Kind.WRONG_PASSWORD),
    ("User not found or supplied credentials are invalid", Kind.WRONG_PASSWORD),
    ("User 'replicator' is not found", Kind.WRONG_PASSWORD),
    ("Unknown request type 31", Kind.VERSION_MISMATCH),
    ("Failed to write to disk", Kind.DISK_FULL),
    ("The synchronous transaction queue doesn't belong to any instance", Kind.FOREIGN_QUEUE),
    ("CONFIRM message arrived for an unknown master id 2, expected 1", Kind.FOREIGN_QUEUE),
    ("Space '512' does not exist", Kind.SCHEMA_MISMATCH),
    (
        "Incorrect value for option 'replication': duplicate connection with the same replica UUID",
        Kind.COPIED_INSTANCE,
    ),
    ("Instance bootstrap hasn't finished yet", Kind.STARTING),
    ("unexpected EOF when reading from socket, called on fd 20, aka 127.0.0.1:5000", Kind.UNREACHABLE),
    ("timed out", Kind.UNREACHABLE),
    ("connection to db1:3301 is lost: connection refused", Kind.UNREACHABLE),
    ("db1:3301 sent nothing for 2 s", Kind.UNREACHABLE),
    ("db1:3301 has lost its rows 5…7: its vclock is {1: 4}, ours {1: 7}", Kind.LOST_ROWS),
    ("something that nobody has ever said", Kind.REPLICATION_STOPPED),
]


@pytest.mark.parametrize(("message", "kind"), WORDS, ids=lambda value: str(value)[:40])
def test_link_cause_is_found_for_each_server_message(message: str, kind: Kind) -> None:
    cause = cause_of(message, BETWEEN)
    assert cause.kind is kind
    assert cause.why
    assert cause.advice


def test_link_cause_is_a_wrong_address_when_the_peer_is_in_another_set() -> None:
    words = f"Replica {OURS} is not registered with replica set {THEIRS}"
    assert cause_of(words, BETWEEN._replace(replicaset=OURS)).kind is Kind.WRONG_CLUSTER
    assert cause_of(words, BETWEEN._replace(replicaset=THEIRS)).kind is Kind.NOT_REGISTERED


def test_link_cause_considers_the_errors_of_the_operating_system() -> None:
    cause = cause_of("connect, called on fd 12, aka 127.0.0.1:40000", BETWEEN, "Connection refused")
    assert cause.kind is Kind.UNREACHABLE
    assert cause.why.startswith("b cannot reach a: connect, ")
    assert cause.why.endswith(": Connection refused")


def test_names_and_positions_in_messages_are_extracted() -> None:
    assert "'ledger'" in cause_of(WORDS[0][0], BETWEEN).why
    assert 'new tuple - [1, "b"]' in cause_of(WORDS[1][0], BETWEEN).why
    gap = cause_of(WORDS[2][0], BETWEEN).why
    assert "up to {1: 5}" in gap
    assert "starts at {1: 9, 2: 1}" in gap
    assert f"{OURS} here, {THEIRS} there" in cause_of(WORDS[4][0], BETWEEN).why
    assert "`flowstone call URI box.schema.user.grant replicator replication`" in cause_of(ACCESS, BETWEEN).advice


def test_address_that_a_shell_would_execute_is_not_put_into_a_command() -> None:
    between = BETWEEN._replace(at="a:1; evil", follower_at="b:1; evil")
    for message, kind in WORDS:
        if kind in (Kind.LOG_GAP, Kind.LOST_ROWS, Kind.NOT_REGISTERED, Kind.SCHEMA_MISMATCH):
            advice = cause_of(message, between).advice
            assert "`flowstone rebootstrap DIR URI`" in advice
            assert "evil" not in advice


def test_key_with_backquotes_does_not_form_a_command() -> None:
    assert "`box.space.s:delete({'a'})`" in conflict_advice(BETWEEN, "box.space.s:delete({'a'})")
    assert "evil" not in conflict_advice(BETWEEN, "box.space.s:delete({'a` `evil b` `'})")


def test_advice_for_a_rejected_guest_suggests_a_user_and_no_guest_privileges() -> None:
    cause = cause_of(ACCESS.replace("replicator", "guest"), BETWEEN)
    assert cause.kind is Kind.NO_RIGHTS
    assert "write user:password@… before that address in `replication` of b" in cause.advice
    assert "grant" not in cause.advice


@given(st.text(max_size=2000), st.none() | st.text(max_size=100))
def test_any_text_has_a_cause(message: str, system_message: str | None) -> None:
    cause = cause_of(message, BETWEEN, system_message)
    assert cause.kind in Kind


def test_long_messages_are_truncated_to_one_line() -> None:
    assert quoted("a\nb") == "a b"
    assert len(quoted("x" * 10_000)) == QUOTED_MAX + 1


def test_advice_to_set_replication_again_is_one_command() -> None:
    """The command keeps the passwords, of a node and of a real server."""
    advice = cause_of("Failed to write to disk", BETWEEN._replace(follower_at="b:3301")).advice
    assert advice.endswith("then set `replication` on b again (`flowstone config b:3301 --reconnect`)")
    unknown = cause_of("Failed to write to disk", BETWEEN).advice
    assert unknown.endswith("then set `replication` on b again (`flowstone config URI --reconnect`)")


def test_advice_on_a_duplicate_key_has_the_commands_for_both_decisions() -> None:
    advice = conflict_advice(BETWEEN._replace(follower_at="b:3301"), "box.space.s:delete({1})")
    again = "`flowstone config b:3301 --reconnect`"
    assert f"on b, run `box.space.s:delete({{1}})`, then set `replication` again ({again})" in advice
    assert f"`flowstone config b:3301 replication_skip_conflict=true`, then {again}" in advice
    assert advice.endswith("when it follows, `flowstone config b:3301 replication_skip_conflict=false`")


def test_user_name_with_backquotes_is_not_part_of_a_command() -> None:
    advice = cause_of(ACCESS.replace("replicator", "a` `evil"), BETWEEN).advice
    assert "`flowstone call URI box.schema.user.grant ARGUMENT replication`" in advice


async def test_node_follows_again_when_replication_is_set_to_the_value_that_it_shows(tmp_path: Path) -> None:
    """Return the advice for a link with a password, stopped by a duplicate key."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    user = ("replicator", "secret")
    async with (
        Node(tmp_path / "1", listen=addresses[0], user=user) as master,
        Node(tmp_path / "2", listen=addresses[1], replication=[f"replicator:secret@{addresses[0]}"]) as follower,
    ):
        await (await master.create_space("orders")).create_index("pk")

        def upstream() -> Any:
            return follower.info()["replication"][1]["upstream"]

        await until(lambda: follower.info()["vclock"] == master.info()["vclock"])
        await follower.space("orders").insert((1, "follower"))
        await master.space("orders").insert((1, "master"))
        await until(lambda: upstream()["status"] == "stopped")
        await follower.space("orders").delete((1,))
        asking = Asking(production(), parse_uri(f"replicator:secret@{addresses[1]}"))
        try:
            shown = await asking.call("box.cfg.replication")
            assert "secret" not in str(shown)
            await asking.call("box.cfg", {"replication": shown})
        finally:
            await asking.close()
        await until(lambda: upstream()["status"] == "follow" and follower.space("orders").get((1,)) is not None)
