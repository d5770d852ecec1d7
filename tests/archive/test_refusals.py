"""Rejections of a server: its error, its address, and advice."""

from __future__ import annotations

import errno

import pytest

from flowstone.archive.refusals import ArchiveRefused, LogsCollected, UpstreamLostTail, explained, is_gap
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.replication.applier.states import ConnectionLost
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed

URI = "replicator@127.0.0.1:3301"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (errors.CredsMismatch("Incorrect password supplied for user 'replicator'"), "check the user and the password"),
        (errors.NoSuchUser("User 'replicator' is not found"), "check the user and the password"),
        (
            errors.AccessDenied("Read access to universe '' is denied"),
            "'replicator' lacks the role replication: box.schema.user.grant('replicator', 'replication')",
        ),
        (errors.ReplicaMax("Replica count limit reached: 32"), "without registering"),
        (errors.Readonly("Can't modify data because this instance is in read-only mode."), "without registering"),
        (errors.UnknownReplica("Replica x is not registered"), "another directory"),
    ],
)
def test_server_error_is_passed_on_with_advice(error: errors.TarantoolError, hint: str) -> None:
    told = explained(error, URI, None)
    assert isinstance(told, ArchiveRefused)
    assert told.message == f"cannot archive {URI}: {error.message}"
    assert told.hint is not None
    assert hint in told.hint


def test_hint_without_credentials_asks_for_a_user_and_not_for_guest_rights() -> None:
    told = explained(errors.AccessDenied("Read access to universe '' is denied"), "127.0.0.1:3301", None)
    assert told.hint is not None
    assert told.hint.startswith("no user was given: set TT_CLI_USERNAME")
    assert "guest" not in str(told)


def test_replica_set_mismatch_names_both_sets() -> None:
    told = explained(errors.ReplicasetUuidMismatch("Replica set UUID mismatch: expected a, got b"), URI, "our-uuid")
    assert "another replica set than this archive (our-uuid)" in told.message


def test_own_errors_are_unchanged() -> None:
    error = ConnectionLost("cannot connect")
    assert explained(error, URI, None) is error


@pytest.mark.parametrize(("number", "hint"), [(errno.ENOSPC, "free space"), (errno.EIO, "repair the disk")])
def test_disk_error_is_passed_to_the_operator(number: int, hint: str) -> None:
    told = explained(WriteFailed("dir/1.xlog", 7, OSError(number, "no"), is_usable=True), URI, None)
    assert str(told) == f"cannot archive: dir/1.xlog: cannot write at byte 7: no; {hint} and start the archive again"


def test_lost_rows_are_named() -> None:
    error = UpstreamLostTail("127.0.0.1:3301", VClock({1: 90, 2: 5}), VClock({1: 100, 2: 5}))
    assert error.missing == ((1, 91, 100),)
    assert "LSN 91 to 100 of replica 1 (server is at {1: 90, 2: 5}, archive at {1: 100, 2: 5})" in error.message


def test_gap_is_recognized_by_error_code_text_and_ballot() -> None:
    text = "Missing .xlog file between LSN 7 {1: 7} and 20 {1: 20}"
    assert is_gap(errors.XlogGap(text))
    assert is_gap(errors.ProcLua(text))
    assert is_gap(LogsCollected("no logs"))
    assert not is_gap(errors.ProcLua("something else"))
    assert not is_gap(FlowstoneError(text))
