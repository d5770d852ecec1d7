"""The contract of actions: their answers, and the order of these."""

from __future__ import annotations

import pytest

from flowstone.errors import LocalProtocolError
from flowstone.replication.limbo.actions import Reject, Undo, Write, not_the_owner
from flowstone.replication.limbo.control_rows import Confirm
from flowstone.replication.limbo.split_brain import SettlingRequest
from tests.replication.limbo_stories import Story, control


def owner(*lines: str) -> Story:
    story = Story()
    for line in ("instance 1 of 2.11, quorum 2", "promote term 2", "writes", *lines):
        story.tell(line)
    return story


def test_each_write_is_answered_exactly_once() -> None:
    limbo = owner("sync a", "writes").limbo
    stranger = SettlingRequest(1, Confirm(1, 2))
    with pytest.raises(LocalProtocolError, match="unexpected write completion"):
        limbo.request_written(stranger)
    story = owner("sync a", "writes", "ack 2 {1: 2}")
    (request, _, _) = story.journal[0]
    assert isinstance(request, SettlingRequest)
    story.tell("writes")
    with pytest.raises(LocalProtocolError):
        story.limbo.request_written(request)
    with pytest.raises(LocalProtocolError):
        story.limbo.request_failed(request, 0.0)


def test_control_rows_of_several_peers_are_written_one_at_a_time() -> None:
    story = owner("sync a", "writes", "sync b", "writes")
    first, second = control("promote 1:2 term 3 from 2"), control("promote 2:0 term 4 from 3")
    assert story.limbo.request(first) == [Write(first)]
    assert story.limbo.request(second) == []
    *_, last = story.limbo.request_written(first)
    assert last == Write(second)
    story.limbo.request_written(second)
    assert story.limbo.owner_id == 3


def test_failed_write_rejects_the_control_rows_after_it() -> None:
    story = owner("sync a")
    held = control("promote 1:2 term 3 from 2")
    assert story.limbo.request(held) == []
    (entry,) = story.limbo.pending
    undo, reject = story.limbo.write_failed(entry)
    assert isinstance(undo, Undo)
    assert undo.entry is entry
    assert isinstance(reject, Reject)
    assert reject.request is held
    assert not story.limbo.is_busy
    assert story.limbo.write_failed(entry) == []


@pytest.mark.parametrize(("owner_id", "is_empty", "code"), [(0, True, 227), (2, True, 228), (2, False, 214)])
def test_transaction_of_another_instance_than_the_owner_is_rejected(owner_id: int, is_empty: bool, code: int) -> None:
    error = not_the_owner(owner_id, is_empty=is_empty)
    assert error.code == code
    assert (str(owner_id) in error.message) == bool(owner_id)
