"""Durability of epochs: in the original's order, and never before every session is on disk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format.names import CHANNELS_MAX
from flowstone.limestone.store.epochs import EPOCH_MAX, Due, EpochRules

NOTHING = Due()


def rules(channels: int = 2, last_epoch: int = 0) -> EpochRules:
    found = EpochRules(last_epoch)
    assert [found.add_channel() for _ in range(channels)] == list(range(channels))
    return found


def test_epoch_is_recorded_after_its_sessions_ended_and_a_later_epoch_is_current() -> None:
    epochs = rules()
    assert epochs.switch(1) == NOTHING
    assert (epochs.begin(0), epochs.begin(1)) == (1, 1)
    assert epochs.finish(0) == NOTHING
    assert epochs.switch(2) == NOTHING
    assert epochs.finish(1) == Due(record=1)
    assert epochs.recorded(1) == Due(inform=1)
    assert (epochs.durable, epochs.informed) == (1, 1)


def test_epochs_without_sessions_are_reported_but_not_recorded() -> None:
    epochs = rules()
    assert [epochs.switch(epoch) for epoch in (1, 2, 5)] == [NOTHING, Due(inform=1), Due(inform=4)]
    assert epochs.durable == 0


def test_open_session_delays_its_epoch_and_all_later_ones() -> None:
    epochs = rules()
    epochs.switch(1)
    epochs.begin(0)
    epochs.switch(2)
    epochs.begin(1)
    assert epochs.switch(3) == NOTHING
    assert epochs.finish(1) == NOTHING
    assert epochs.finish(0) == Due(record=2)
    assert epochs.recorded(2) == Due(inform=2)


def test_one_record_is_pending_at_a_time_and_reported_before_the_next() -> None:
    epochs = rules()
    epochs.switch(1)
    epochs.begin(0)
    epochs.finish(0)
    assert epochs.switch(2) == Due(record=1)
    epochs.begin(0)
    epochs.finish(0)
    assert epochs.switch(3) == NOTHING
    assert epochs.switch(4) == NOTHING
    assert epochs.recorded(1) == Due(record=2, inform=1)
    assert epochs.recorded(2) == Due(inform=3)


def test_epoch_is_recorded_although_another_channel_finished_a_later_one() -> None:
    """The original forgets the epoch because it keeps only the last epoch of each channel."""
    epochs = rules()
    epochs.switch(3)
    epochs.begin(1)
    epochs.begin(0)
    epochs.finish(0)
    epochs.switch(4)
    epochs.begin(0)
    epochs.finish(0)
    assert epochs.abort(1) == Due(record=3)
    assert epochs.recorded(3) == Due(inform=3)


def test_aborted_session_does_not_make_its_epoch_recorded() -> None:
    epochs = rules()
    epochs.switch(1)
    epochs.begin(0)
    epochs.switch(2)
    assert epochs.abort(0) == Due(inform=1)


def test_no_epoch_is_reported_twice_or_reused_after_a_restart() -> None:
    epochs = rules(last_epoch=5)
    with pytest.raises(WrongTime, match="epoch 5: it is already durable; call switch_epoch with 6"):
        epochs.begin(0)
    assert epochs.switch(5) == NOTHING
    assert epochs.switch(6) == NOTHING
    assert epochs.begin(0) == 6


def test_epochs_that_replicas_may_lack_are_recorded_before_any_report() -> None:
    epochs = EpochRules(5, is_pending=True)
    epochs.add_channel()
    assert epochs.switch(7) == Due(record=5)
    assert epochs.begin(0) == 7
    assert epochs.switch(8) == NOTHING
    assert epochs.recorded(5) == Due(inform=6)
    assert epochs.finish(0) == Due(record=7)
    assert EpochRules(0, is_pending=True).switch(2) == Due(inform=1)


class Compared(int):
    """An epoch that counts its comparisons."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int(self) == other

    def __hash__(self) -> int:
        return hash(int(self))


def test_end_of_a_session_costs_the_same_with_many_pending_epochs() -> None:
    epochs = rules()
    epochs.switch(1)
    epochs.begin(0)
    Compared.count = 0
    for epoch in range(2, 1002):
        epochs.switch(Compared(epoch))
        epochs.begin(1)
        assert epochs.finish(1) == NOTHING
    assert Compared.count <= 1000
    assert epochs.finish(0) == Due(record=1000)


def test_calls_in_the_wrong_state_change_nothing() -> None:
    epochs = rules(1)
    epochs.switch(2)
    for call in (epochs.finish, epochs.abort):
        with pytest.raises(WrongTime, match="no open session"):
            call(0)
    for epoch in (1, EPOCH_MAX + 1):
        with pytest.raises(WrongTime, match="cannot switch"):
            epochs.switch(epoch)
    with pytest.raises(WrongTime, match="is due"):
        epochs.recorded(1)
    epochs.begin(0)
    with pytest.raises(WrongTime, match="has an open session"):
        epochs.begin(0)
    assert (epochs.switched, epochs.working(0), epochs.durable) == (2, 2, 0)


def test_number_of_channels_is_limited_to_that_of_a_replica() -> None:
    epochs = rules(CHANNELS_MAX)
    with pytest.raises(WrongTime, match="10000"):
        epochs.add_channel()


STEPS = st.lists(st.tuples(st.sampled_from("bfasr"), st.integers(0, 2)), max_size=60)


@given(STEPS, st.integers(0, 3))
def test_only_durable_epochs_are_reported_and_eventually_all(steps: list[tuple[str, int]], last_epoch: int) -> None:
    epochs = rules(3, last_epoch)
    epochs.switch(last_epoch + 1)
    open_sessions: dict[int, int] = {}
    ended: set[int] = set()
    told, recorded, recording = [last_epoch], last_epoch, None

    def check(due: Due) -> None:
        nonlocal recording
        if due.record is not None:
            assert recording is None
            assert due.record in ended
            assert recorded < due.record < min([*open_sessions.values(), epochs.switched])
            recording = due.record
        if due.inform is not None:
            assert told[-1] < due.inform < min([*open_sessions.values(), epochs.switched])
            assert max([epoch for epoch in ended if epoch <= due.inform], default=0) <= recorded
            told.append(due.inform)

    for kind, channel in steps:
        if kind == "b" and channel not in open_sessions:
            open_sessions[channel] = epochs.begin(channel)
        elif kind in "fa" and channel in open_sessions:
            epoch = open_sessions.pop(channel)
            ended |= {epoch} if kind == "f" else set()
            check(epochs.finish(channel) if kind == "f" else epochs.abort(channel))
        elif kind == "s":
            check(epochs.switch(epochs.switched + channel))
        elif kind == "r" and recording is not None:
            recorded, recording = recording, None
            check(epochs.recorded(recorded))
    for channel in list(open_sessions):
        ended.add(open_sessions.pop(channel))
        check(epochs.finish(channel))
    check(epochs.switch(epochs.switched + 1))
    while recording is not None:
        recorded, recording = recording, None
        check(epochs.recorded(recorded))
    assert told[-1] == epochs.informed == epochs.switched - 1
    assert recorded == max(ended, default=last_epoch)
