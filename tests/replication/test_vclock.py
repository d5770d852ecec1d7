"""Vclocks: a partial order, a text form, and components that never go backwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.replication.vclock import Order, VClock, VClockBuilder, VClockError
from flowstone.xlog.meta import LSN_MAX

LSNS = st.one_of(st.integers(0, 5), st.integers(0, LSN_MAX))
VCLOCKS = st.dictionaries(st.integers(0, 31), LSNS, max_size=6).map(VClock)
CLOSE = st.dictionaries(st.integers(0, 2), st.integers(0, 2)).map(VClock)  # often comparable, often not


def test_text_form_equals_that_of_file_headers() -> None:
    vclock = VClock({2: 3, 1: 10, 5: 0})
    assert str(vclock) == "{1: 10, 2: 3}"
    assert str(VClock()) == "{}"
    assert VClock.parse(" {1: 10,2:3} ") == vclock
    assert VClock.parse("{}") == VClock()


@pytest.mark.parametrize("text", ["", "{", "1: 10", "{1}", "{1: -1}", "{32: 1}", "{1: 1, 1: 2}", "{1: 1,}", "{a: 1}"])
def test_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(VClockError):
        VClock.parse(text)


@pytest.mark.parametrize("lsns", [{32: 1}, {-1: 1}, {1: -1}, {1: LSN_MAX + 1}, {True: 1}, {1: 1.0}])
def test_ids_and_lsns_out_of_range_are_rejected(lsns: dict[int, int]) -> None:
    with pytest.raises(VClockError):
        VClock(lsns)


@given(VCLOCKS)
def test_text_and_mapping_round_trip(vclock: VClock) -> None:
    assert VClock.parse(str(vclock)) == vclock
    assert VClock(vclock.to_mapping()) == vclock
    assert VClockBuilder(vclock).vclock() == vclock
    assert list(vclock) == sorted(vclock.to_mapping().items())


@given(VCLOCKS)
def test_signature_counts_the_local_component(vclock: VClock) -> None:
    assert vclock.signature == vclock.without_zero().signature + vclock.get(0)


@given(CLOSE, CLOSE, CLOSE)
def test_at_or_before_is_a_partial_order(a: VClock, b: VClock, c: VClock) -> None:
    assert a <= a
    if a <= b and b <= a:
        assert a == b
        assert hash(a) == hash(b)
    if a <= b and b <= c:
        assert a <= c
    assert (a < b) == (a <= b and a != b)
    assert (a >= b) == (b <= a)


MIRRORED = {
    Order.BEFORE: Order.AFTER,
    Order.AFTER: Order.BEFORE,
    Order.EQUAL: Order.EQUAL,
    Order.INCOMPARABLE: Order.INCOMPARABLE,
}


@given(CLOSE, CLOSE)
def test_compare_agrees_with_the_operators_and_with_its_mirror_image(a: VClock, b: VClock) -> None:
    order = a.compare(b)
    assert b.compare(a) == MIRRORED[order]
    assert (order is Order.BEFORE) == (a < b)
    assert (order is Order.EQUAL) == (a == b)
    assert (order is Order.INCOMPARABLE) == (not a <= b and not b <= a)
    assert a.compare(b, ignore_zero=True) == a.without_zero().compare(b.without_zero())


@given(CLOSE, CLOSE, CLOSE)
def test_merged_and_common_are_join_and_meet(a: VClock, b: VClock, other: VClock) -> None:
    high, low = a.merged(b), a.common(b)
    assert low <= a <= high
    assert low <= b <= high
    if a <= other and b <= other:
        assert high <= other
    if other <= a and other <= b:
        assert other <= low


def test_local_component_can_be_ignored_in_a_comparison() -> None:
    ours, theirs = VClock({0: 7, 1: 5}), VClock({1: 6})
    assert ours.compare(theirs) is Order.INCOMPARABLE
    assert ours.compare(theirs, ignore_zero=True) is Order.BEFORE


@given(VCLOCKS, st.integers(0, 31), st.integers(1, LSN_MAX))
def test_advanced_and_follow_move_one_component_forward_only(vclock: VClock, replica_id: int, lsn: int) -> None:
    builder = VClockBuilder(vclock)
    if lsn <= vclock.get(replica_id):
        message = f"LSN of replica {replica_id} goes backwards: {lsn} comes after {vclock.get(replica_id)}"
        with pytest.raises(VClockError, match=message):
            vclock.advanced(replica_id, lsn)
        with pytest.raises(VClockError, match=message):
            builder.follow(replica_id, lsn)
        assert builder.vclock() == vclock
    else:
        builder.follow(replica_id, lsn)
        assert builder.vclock() == vclock.advanced(replica_id, lsn)
        assert vclock < builder.vclock()
        assert builder.vclock() is builder.vclock()


@given(CLOSE, CLOSE)
def test_builder_does_not_change_vclocks_it_has_returned(a: VClock, b: VClock) -> None:
    builder = VClockBuilder(a)
    before = builder.vclock()
    builder.merge(b)
    assert before == a
    assert builder.vclock() == a.merged(b)
