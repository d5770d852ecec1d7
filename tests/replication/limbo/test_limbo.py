"""The limbo: whole stories, and cases that no story covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.replication.limbo.actions import Action, Commit, Proven, TransferFailed, Write
from flowstone.replication.limbo.control_rows import Confirm, Promote
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.split_brain import SettlingRequest
from flowstone.replication.vclock import VClock
from tests.places import TRANSCRIPTS
from tests.replication.limbo_stories import Story, replay


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("limbo_*.txt")), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()


def told(*lines: str) -> Story:
    story = Story()
    for line in lines:
        story.tell(line)
    return story


def test_row_flags_mark_pending_and_synchronous_rows() -> None:
    limbo = told("instance 1 of 2.11, quorum 2", "promote term 2", "writes").limbo
    assert limbo.row_flags(limbo.submit("plain", is_synchronous=False)) == 0
    assert limbo.row_flags(limbo.submit("synchronous", is_synchronous=True)) == 6
    assert limbo.row_flags(limbo.submit("behind", is_synchronous=False)) == 2


def test_rows_of_2_6_have_no_flags() -> None:
    limbo = told("instance 1 of 2.6, quorum 2").limbo
    assert limbo.row_flags(limbo.submit("synchronous", is_synchronous=True)) == 0
    assert limbo.row_flags(limbo.submit("behind", is_synchronous=False)) == 0


def test_checkpoint_has_owner_term_and_confirmed_position_of_every_owner() -> None:
    story = told("instance 2 of 2.11, quorum 1", "hears promote 0:0 term 2 from 1", "writes", "receives sync a 1:5")
    for line in (
        "hears confirm 1:5 from 1",
        "writes",
        "promote term 3",
        "writes",
        "sync b",
        "writes",
        "writes",
        "sync c",
    ):
        story.tell(line)
    assert story.limbo.checkpoint() == Promote(2, 2, 3, VClock({1: 5, 2: 2}))
    assert story.limbo.promote_terms == {1: 2, 2: 3}
    assert [entry.transaction for entry in story.limbo.pending] == ["c"]


def test_restoring_a_checkpoint_gives_the_same_checkpoint() -> None:
    state = Promote(2, 7, 5, VClock({1: 5, 2: 7}))
    limbo: Limbo[str] = Limbo(instance_id=3, dialect=Dialect.V2_11, quorum=2, timeout=5.0)
    assert limbo.restore(state) == []
    assert limbo.checkpoint() == state
    assert limbo.promote_terms == {2: 5}
    assert limbo.is_read_only


def test_snapshots_before_the_first_promotion_leave_the_queue_unclaimed() -> None:
    limbo: Limbo[str] = Limbo(instance_id=3, dialect=Dialect.V2_11, quorum=2, timeout=5.0)
    limbo.restore(Promote(0, 0, 0))
    assert not limbo.is_read_only
    with pytest.raises(errors.SyncQueueUnclaimed):
        limbo.submit("a", is_synchronous=True)


def test_a_cancelled_promotion_fails_with_the_given_reason_unless_it_is_being_written() -> None:
    story = told("instance 2 of 2.11, quorum 2", "hears promote 0:0 term 2 from 1", "writes", "receives sync a 1:5")
    for line in ("writes", "promote term 3"):
        story.tell(line)
    error = errors.NotLeader("The instance is not a leader. New leader is 3")
    assert story.limbo.cancel_transfer(error) == [TransferFailed(error)]
    assert story.limbo.cancel_transfer(error) == []
    story.tell("ack 3 {1: 5}")
    story.tell("promote term 3")
    assert story.limbo.cancel_transfer(error) == []


def test_replica_that_lost_its_log_withdraws_its_ack() -> None:
    story = told("instance 1 of 2.11, quorum 2", "promote term 2", "writes", "ack 2 {1: 9}", "ack 2 {1: 1}")
    assert story.tell("sync a")[:-1] == []
    assert story.tell("writes")[:-1] == []


def test_own_id_in_an_ack_is_ignored() -> None:
    story = told("instance 1 of 2.11, quorum 2", "promote term 2", "writes", "sync a", "writes")
    assert story.tell("ack 1 {1: 2}")[:-1] == []


def test_local_transaction_is_pending_in_the_queue_of_any_owner() -> None:
    story = told("instance 2 of 2.11, quorum 2", "hears promote 0:0 term 2 from 1", "writes", "receives sync a 1:5")
    assert story.tell("local b")[0].startswith("owner 1 term 2 confirmed 0; waiting a:5 b")
    story.tell("writes")
    story.tell("hears confirm 1:5 from 1")
    assert story.tell("writes")[0] == "commits a b"


def test_asynchronous_batch_released_before_its_write_commits_when_it_is_written() -> None:
    limbo: Limbo[str] = Limbo(instance_id=1, dialect=Dialect.V2_6, quorum=2, timeout=5.0)
    first = limbo.submit("a", is_synchronous=True)
    assert first is not None
    limbo.written(first, 1, 0.0)
    (confirm,) = limbo.ack(2, VClock({1: 1}))
    assert isinstance(confirm, Write)
    batch = [limbo.submit(name, is_synchronous=False) for name in "bc"]
    entries = [entry for entry in batch if entry is not None]
    for lsn, entry in enumerate(entries, 3):
        entry.lsn = lsn
    assert limbo.request_written(confirm.request, 2) == [Commit((first,))]
    assert limbo.written_together(entries, 0.0) == [Commit(tuple(entries))]
    assert len(entries) == 2
    assert not limbo


def overtaken_owner() -> tuple[Limbo[str], list[Action[str]]]:
    """Return instance 1, whose client waits for `a`, 1:2; then 2 takes over with a PROMOTE, 2:7, that covers it."""
    limbo: Limbo[str] = Limbo(instance_id=1, dialect=Dialect.V2_11, quorum=3, timeout=5.0)
    (write,) = limbo.promote(2, 0.0)
    assert isinstance(write, Write)
    limbo.request_written(write.request, 1)
    entry = limbo.submit("a", is_synchronous=True)
    assert entry is not None
    limbo.written(entry, 2, 0.0)
    request = SettlingRequest(2, Promote(1, 2, 3), lsn=7)
    assert limbo.request(request) == [Write(request)]
    return limbo, limbo.request_written(request)


def test_clients_get_the_outcome_of_a_promote_when_a_quorum_has_it() -> None:
    limbo, actions = overtaken_owner()
    commit = next(action for action in actions if isinstance(action, Commit))
    assert not commit.is_proven
    assert limbo.ack(3, VClock({1: 2, 2: 6})) == []
    assert limbo.ack(3, VClock({1: 2, 2: 7})) == [Proven(commit.entries)]
    assert limbo.ack(4, VClock({1: 2, 2: 7})) == []


def test_quorum_larger_than_the_set_requires_all_members() -> None:
    limbo, _ = overtaken_owner()
    limbo.configure(quorum=31)
    assert limbo.ack(3, VClock({1: 2, 2: 7})) == []
    assert [type(action) for action in limbo.configure(member_count=3)] == [Proven]


def test_verdict_of_the_new_owner_implies_a_quorum_for_its_promote() -> None:
    limbo, _ = overtaken_owner()
    limbo.receive("b", origin_id=2, lsn=8, is_synchronous=True)
    request = SettlingRequest(2, Confirm(2, 8), lsn=9)
    limbo.written(limbo.pending[0], 8, 0.0)
    limbo.request(request)
    told = limbo.request_written(request)
    assert [type(action) for action in told] == [Proven, Commit]


def test_acks_prove_nothing_when_a_newer_term_has_begun() -> None:
    limbo, _ = overtaken_owner()
    limbo.see_term(4)
    assert limbo.ack(3, VClock({1: 2, 2: 7})) == []
