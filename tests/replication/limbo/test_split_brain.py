"""Every rule about rows that agree with or contradict our history; limbo_split_brain.txt shows them as stories."""

from __future__ import annotations

import pytest

from flowstone.iproto import errors
from flowstone.replication.limbo.split_brain import (
    Fate,
    QueueHistory,
    filter_request,
    filter_request_of_2_6,
    filter_transaction,
)
from flowstone.replication.vclock import VClock
from tests.replication.limbo_stories import control

OURS = QueueHistory(owner_id=2, term=4, confirmed=VClock({1: 5, 2: 11}), promote_terms={1: 2, 2: 4}, first=12, last=14)
EMPTY = QueueHistory(owner_id=2, term=4, confirmed=VClock({1: 5, 2: 11}), promote_terms={1: 2, 2: 4})
UNCLAIMED = QueueHistory(owner_id=0, term=5, confirmed=VClock({1: 5, 2: 11}), promote_terms={1: 2, 2: 5})
UNPROVEN = QueueHistory(
    owner_id=2, term=4, confirmed=VClock({1: 5}), promote_terms={1: 2, 2: 4}, first=12, last=14, former=((0, 0), (1, 5))
)


@pytest.mark.parametrize(
    ("words", "history", "fate"),
    [
        ("confirm 2:12 from 2", OURS, Fate.ACCEPTED),
        ("confirm 2:11 from 2", OURS, Fate.NOP),
        ("confirm 1:5 from 1", OURS, Fate.NOP),
        ("confirm 1:5 from 3", UNCLAIMED, Fate.NOP),
        ("rollback 2:12 from 2", OURS, Fate.ACCEPTED),
        ("rollback 1:6 from 1", OURS, Fate.NOP),
        ("rollback 2:12 from 3", OURS, Fate.NOP),
        ("promote 2:11 term 5 from 1", OURS, Fate.ACCEPTED),
        ("promote 2:12 term 5 from 1", OURS, Fate.ACCEPTED),
        ("demote 2:14 term 9 from 2", OURS, Fate.ACCEPTED),
        ("promote 2:11 term 5 from 1", EMPTY, Fate.ACCEPTED),
        ("promote 0:0 term 6 from 1", UNCLAIMED, Fate.ACCEPTED),
        # Rows of a leader whose PROMOTE no member had read at the next election, and of one that had not read the last
        # PROMOTE.
        ("promote 1:5 term 3 from 3", OURS, Fate.NOP),
        ("demote 2:11 term 3 from 1", OURS, Fate.NOP),
        ("promote 1:5 term 5 from 3", UNPROVEN, Fate.ACCEPTED),
    ],
)
def test_rows_that_agree_with_our_history_are_accepted(words: str, history: QueueHistory, fate: Fate) -> None:
    assert filter_request(control(words), history) is fate


FOREIGN = "got a request from a foreign synchro queue owner"
OBSOLETE = "got a PROMOTE/DEMOTE with an obsolete term"
PROCESSED = "got a request with lsn from an already processed range"
FUTURE = "got a request mentioning future lsn"
RANGE = "got a request lsn out of queue range"


@pytest.mark.parametrize(
    ("words", "history", "reason"),
    [
        ("confirm 1:6 from 1", OURS, FOREIGN),
        ("rollback 1:5 from 1", OURS, FOREIGN),
        ("promote 1:5 term 5 from 1", OURS, FOREIGN),
        ("promote 0:0 term 5 from 1", OURS, FOREIGN),
        ("demote 2:11 term 6 from 2", UNCLAIMED, FOREIGN),
        ("promote 2:11 term 4 from 1", OURS, OBSOLETE),
        ("demote 2:12 term 3 from 1", OURS, OBSOLETE),
        ("promote 1:6 term 3 from 3", OURS, FOREIGN),
        ("promote 1:4 term 5 from 3", UNPROVEN, FOREIGN),
        ("promote 2:10 term 5 from 1", OURS, PROCESSED),
        ("promote 2:12 term 5 from 1", EMPTY, FUTURE),
        ("promote 2:15 term 5 from 1", OURS, RANGE),
    ],
)
def test_rows_that_contradict_our_history_are_a_split_brain(words: str, history: QueueHistory, reason: str) -> None:
    with pytest.raises(errors.SplitBrain) as caught:
        filter_request(control(words), history)
    assert caught.value.message == f"Split-Brain discovered: {reason}"
    # Both histories: instance, term and LSN.
    request = control(words)
    theirs, ours = (caught.value.hint or "").split("; ")[:2]
    assert f"by replica {request.origin_id} of term " in theirs
    assert theirs.endswith(f"about owner {request.body.owner_id} up to lsn {request.body.lsn}")
    assert f"since term {history.term}, confirmed up to lsn {history.confirmed_lsn}" in ours


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("confirm 0:1 from 2", "synchronous requests with zero replica_id"),
        ("rollback 0:0 from 2", "synchronous requests with zero replica_id"),
        ("demote 0:0 term 5 from 2", "synchronous requests with zero replica_id"),
        ("confirm 2:0 from 2", "zero LSN for CONFIRM/ROLLBACK"),
        ("rollback 2:0 from 2", "zero LSN for CONFIRM/ROLLBACK"),
        ("promote 2:11 term 0 from 1", "PROMOTE/DEMOTE with a zero term"),
    ],
)
def test_rows_that_no_server_writes_are_rejected(words: str, what: str) -> None:
    with pytest.raises(errors.Unsupported) as caught:
        filter_request(control(words), OURS)
    assert caught.value.message == f"Replication does not support {what}"


@pytest.mark.parametrize(
    ("words", "history"),
    [
        ("confirm 2:12 from 2", OURS),
        ("rollback 2:12 from 1", OURS),
        ("confirm 1:5 from 1", EMPTY),
        ("rollback 1:6 from 1", EMPTY),
        ("confirm 1:9 from 1", QueueHistory(owner_id=0, term=0, confirmed=VClock(), promote_terms={})),
    ],
)
def test_2_6_accepts_verdicts_on_the_owner_or_on_settled_rows(words: str, history: QueueHistory) -> None:
    assert filter_request_of_2_6(control(words), history) is Fate.ACCEPTED


@pytest.mark.parametrize("words", ["confirm 1:6 from 1", "rollback 1:5 from 1"])
def test_2_6_rejects_contradictory_verdicts_of_a_former_owner_without_pending_rows(words: str) -> None:
    with pytest.raises(errors.SyncMasterMismatch, match="for an unknown master id 1, expected 2"):
        filter_request_of_2_6(control(words), EMPTY)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("confirm 1:9 from 1", errors.SyncMasterMismatch),
        ("rollback 1:9 from 2", errors.SyncMasterMismatch),
        ("promote 2:12 term 5 from 1", errors.Unsupported),
        ("demote 2:12 term 5 from 1", errors.Unsupported),
    ],
)
def test_2_6_rejects_unknown_control_rows(words: str, error: type[errors.TarantoolError]) -> None:
    with pytest.raises(error):
        filter_request_of_2_6(control(words), OURS)


def test_without_validation_only_nops_are_distinguished() -> None:
    assert filter_request(control("promote 1:5 term 1 from 1"), OURS, is_validating=False) is Fate.ACCEPTED
    assert filter_request(control("confirm 1:5 from 1"), OURS, is_validating=False) is Fate.NOP


@pytest.mark.parametrize(
    ("origin_id", "history", "waits", "has_effect", "fate"),
    [
        (2, OURS, False, True, Fate.ACCEPTED),
        (2, OURS, True, True, Fate.ACCEPTED),
        (1, OURS, True, True, Fate.NOP),
        (3, OURS, True, True, Fate.NOP),
        (1, OURS, False, False, Fate.ACCEPTED),
        (1, UNCLAIMED, False, True, Fate.ACCEPTED),
        (1, OURS, False, True, None),
        (3, EMPTY, False, True, None),
    ],
)
def test_transactions_are_filtered_by_the_term_of_their_originator(
    origin_id: int, history: QueueHistory, waits: bool, has_effect: bool, fate: Fate | None
) -> None:
    if fate is not None:
        assert filter_transaction(origin_id, 9, history, waits_for_verdict=waits, has_effect=has_effect) is fate
        return
    with pytest.raises(errors.SplitBrain, match="got an async transaction from an old term") as caught:
        filter_transaction(origin_id, 9, history, waits_for_verdict=waits, has_effect=has_effect)
    assert f"transaction {origin_id}:9 of term {2 if origin_id == 1 else 0}" in (caught.value.hint or "")
