"""Rejections by a master, the rows that a replica gets, heartbeats, and the effect of ACKs."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import UUID

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.messages import NIL_UUID, Ack, FetchSnapshot, Join, Register, Subscribe
from flowstone.replication.relay.relay_logic import (
    TRANSITIONS,
    Acked,
    Pulse,
    RelayFacts,
    RelayState,
    RequestOfReplica,
    RowFilter,
    refusal,
    xlog_gap,
)
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock

OWN = UUID("11111111-1111-4111-8111-111111111111")
SET = UUID("22222222-2222-4222-8222-222222222222")
PEER = UUID("33333333-3333-4333-8333-333333333333")
OTHER = UUID("44444444-4444-4444-8444-444444444444")

NO_READ = errors.AccessDenied("no read")
NO_WRITE = errors.AccessDenied("no write")
READ_ONLY = errors.Readonly("read-only")

JOIN = Join(PEER)
FETCH = FetchSnapshot()
REGISTER = Register(PEER, VClock())
SUBSCRIBE = Subscribe(SET, PEER, VClock(), 1)
ANONYMOUS = dataclasses.replace(SUBSCRIBE, is_anonymous=True)


def facts(**changes: Any) -> RelayFacts:
    return dataclasses.replace(RelayFacts(True, OWN, SET), **changes)


def new(**changes: Any) -> RelayFacts:
    """Return facts of a master of the newer dialect."""
    return facts(is_2_6=False, **changes)


REFUSED: list[tuple[RequestOfReplica, RelayFacts, type[errors.TarantoolError], str]] = [
    (JOIN, facts(is_loading=True), errors.Loading, "Instance bootstrap hasn't finished yet"),
    (Join(OWN), facts(no_read=NO_READ), errors.ConnectionToSelf, "Connection to self"),
    (JOIN, facts(no_read=NO_READ, read_only=READ_ONLY), errors.AccessDenied, "no read"),
    (JOIN, facts(read_only=READ_ONLY, no_write=NO_WRITE), errors.Readonly, "read-only"),
    (JOIN, facts(no_write=NO_WRITE, has_log=False), errors.AccessDenied, "no write"),
    (JOIN, facts(has_log=False), errors.Unsupported, "Replication does not support wal_mode = 'none'"),
    (Join(NIL_UUID), new(), errors.NilUuid, "Nil UUID is reserved and can't be used in replication"),
    (
        JOIN,
        new(is_anonymous=True, read_only=READ_ONLY),
        errors.Unsupported,
        "Anonymous replica does not support registration of non-anonymous nodes.",
    ),
    (FETCH, facts(no_read=NO_READ), errors.AccessDenied, "no read"),
    (
        FetchSnapshot(is_checkpoint_join=True),
        new(),
        errors.Unsupported,
        "Community edition does not support checkpoint from snapshot",
    ),
    (REGISTER, facts(replica_id=2), errors.ReplicaNotAnon, f"Replica '{PEER}' is not anonymous and cannot register."),
    (REGISTER, facts(read_only=READ_ONLY), errors.Readonly, "read-only"),
    (
        REGISTER,
        new(is_followed=True),
        errors.Cfg,
        "Incorrect value for option 'replication': duplicate connection with the same replica UUID",
    ),
    (
        SUBSCRIBE,
        facts(is_anonymous=True, replica_id=2),
        errors.Unsupported,
        "Anonymous replica does not support non-anonymous followers.",
    ),
    (SUBSCRIBE, facts(), errors.UnknownReplica, f"Replica {PEER} is not registered with replica set {SET}"),
    (
        SUBSCRIBE,
        new(),
        errors.TooEarlySubscribe,
        f"Can't subscribe non-anonymous replica {PEER} until join is done",
    ),
    (
        dataclasses.replace(SUBSCRIBE, replicaset_uuid=OTHER),
        new(),
        errors.ReplicasetUuidMismatch,
        f"Replica set UUID mismatch: expected {SET}, got {OTHER}",
    ),
    (ANONYMOUS, facts(is_replaced=True), errors.Protocol, "Can't subscribe a previously deleted non-anonymous replica"),
    (ANONYMOUS, new(is_replaced=True), errors.Protocol, "Can't subscribe a previously deleted non-anonymous replica"),
    (ANONYMOUS, new(replica_id=2), errors.Protocol, "Can't subscribe an anonymous replica having an ID assigned"),
    (
        SUBSCRIBE,
        facts(replica_id=2, is_followed=True, has_log=False),
        errors.Cfg,
        "Incorrect value for option 'replication': duplicate connection with the same replica UUID",
    ),
    (SUBSCRIBE, facts(replica_id=2, has_log=False), errors.Unsupported, "Replication does not support wal_mode"),
]


@pytest.mark.parametrize(("request_", "known", "kind", "text"), REFUSED)
def test_first_failed_check_is_reported(
    request_: RequestOfReplica, known: RelayFacts, kind: type[errors.TarantoolError], text: str
) -> None:
    error = refusal(request_, known)
    assert isinstance(error, kind)
    assert error.message.startswith(text)


@pytest.mark.parametrize("is_2_6", [True, False])
@pytest.mark.parametrize(
    "request_", [JOIN, FETCH, REGISTER, SUBSCRIBE, ANONYMOUS, dataclasses.replace(SUBSCRIBE, replicaset_uuid=OTHER)]
)
def test_user_without_privileges_learns_nothing_about_the_replica_set(request_: RequestOfReplica, is_2_6: bool) -> None:
    for changes in (
        {},
        {"replica_id": 2},
        {"is_anonymous": True, "has_log": False},
        {"replica_id": 2, "is_followed": True, "is_joining": True, "read_only": READ_ONLY},
    ):
        assert refusal(request_, facts(is_2_6=is_2_6, no_read=NO_READ, **changes)) is NO_READ


SERVED: list[tuple[RequestOfReplica, RelayFacts]] = [
    (JOIN, facts()),
    (JOIN, facts(replica_id=2, read_only=READ_ONLY, no_write=NO_WRITE)),
    (Join(NIL_UUID), facts()),  # 2.6 checks that at the registration
    (FETCH, facts(read_only=READ_ONLY, no_write=NO_WRITE)),
    (FetchSnapshot(is_checkpoint_join=True), facts()),
    (REGISTER, new()),
    (SUBSCRIBE, facts(replica_id=2, read_only=READ_ONLY)),
    (ANONYMOUS, facts(is_anonymous=True)),
    (dataclasses.replace(ANONYMOUS, replicaset_uuid=OTHER), facts()),  # a replica of 2.6 checks for itself
    (ANONYMOUS, facts(replica_id=2)),
]


@pytest.mark.parametrize(("request_", "known"), SERVED)
def test_replica_that_passes_all_checks_is_served(request_: RequestOfReplica, known: RelayFacts) -> None:
    assert refusal(request_, known) is None


def test_gap_has_an_error_class_and_the_code_of_the_dialect() -> None:
    have, need = VClock({1: 5}), VClock({1: 100, 2: 1})
    for is_2_6, code in ((True, 32), (False, 219)):
        error = xlog_gap(have, need, is_2_6=is_2_6)
        assert error.code == code
        assert error.message == "Missing .xlog file between LSN 5 {1: 5} and 101 {1: 100, 2: 1}"
        assert error.stack is not None
        assert error.stack.errors[0].type == "XlogGapError"


def test_relay_enters_follow_only_once() -> None:
    assert RelayState.FOLLOW not in TRANSITIONS[RelayState.FOLLOW]
    assert set(TRANSITIONS) == set(RelayState)


# --- rows ---


def slab(*rows: tuple[int, int]) -> Slab:
    """Return rows of one transaction each: originator and LSN; id 0 is local."""
    made = [Row(RequestType.NOP.value, number, 0 if number else 1, lsn, 1.0, lsn).encode() for number, lsn in rows]
    return slab_of_rows(b"".join(made), "test")


def kept(rows: RowFilter, *pairs: tuple[int, int]) -> list[tuple[int, int]]:
    mask = rows.keep(slab(*pairs))
    return [pair for pair, is_kept in zip(pairs, mask.tolist(), strict=True) if is_kept]


def test_replica_gets_the_rows_it_lacks() -> None:
    rows = RowFilter(VClock({1: 5, 2: 1}))
    assert kept(rows, (1, 5), (1, 6), (2, 1), (2, 2), (3, 1)) == [(1, 6), (2, 2), (3, 1)]
    rows.follow(VClock({0: 7, 1: 6, 3: 1}))
    assert rows.known == VClock({1: 6, 2: 1, 3: 1})
    assert kept(rows, (1, 6), (1, 7), (3, 1)) == [(1, 7)]


def test_local_rows_and_excluded_originators_are_omitted() -> None:
    rows = RowFilter(VClock(), left_out=(0, 2))
    assert kept(rows, (0, 1), (1, 1), (2, 1), (3, 1)) == [(1, 1), (3, 1)]


def test_replica_gets_back_its_own_lost_rows() -> None:
    rows = RowFilter(VClock({2: 3}), own_id=2, own_lsn_max=5)
    assert kept(rows, (2, 3), (2, 4), (2, 5), (2, 6)) == [(2, 4), (2, 5)]


def test_filter_detects_chunks_that_are_sent_completely() -> None:
    rows = RowFilter(VClock({1: 5, 3: 100}), left_out=(2,), own_id=4, own_lsn_max=7)
    assert rows.takes_all(VClock({1: 5}), VClock({1: 9}))
    assert rows.takes_all(VClock({0: 1, 1: 6}), VClock({0: 9, 1: 9})), "local rows are in no packet"
    assert not rows.takes_all(VClock({1: 4}), VClock({1: 9})), "row 5 is known"
    assert not rows.takes_all(VClock({1: 5}), VClock({1: 6, 2: 1})), "originator 2 is excluded"
    assert not rows.takes_all(VClock({3: 50}), VClock({3: 51})), "the replica is ahead of us"
    assert rows.takes_all(VClock({1: 5, 3: 50}), VClock({1: 6, 3: 50})), "no row of 3 is in there"
    assert rows.takes_all(VClock({4: 5}), VClock({4: 7}))
    assert not rows.takes_all(VClock({4: 5}), VClock({4: 8})), "row 8 came from the replica itself"


def test_filter_detects_chunks_without_rows_for_the_replica() -> None:
    rows = RowFilter(VClock({1: 5, 3: 100}), left_out=(2,), own_id=4, own_lsn_max=7)
    assert rows.takes_nothing(VClock({0: 1, 1: 3}), VClock({0: 9, 1: 5})), "local and known rows"
    assert rows.takes_nothing(VClock({2: 5}), VClock({2: 9})), "originator 2 is excluded"
    assert rows.takes_nothing(VClock({4: 7}), VClock({4: 9})), "rows of the replica itself"
    assert not rows.takes_nothing(VClock({4: 6}), VClock({4: 9})), "row 7, which it has lost"
    assert not rows.takes_nothing(VClock({1: 3, 4: 7}), VClock({1: 6, 4: 9})), "row 6 of 1 is among them"


# --- heartbeats ---


def test_2_6_master_sends_heartbeats_only_when_idle() -> None:
    pulse = Pulse(100.0, is_2_6=True)
    assert pulse.heartbeat_due(1.0) == 101.0
    pulse.sent(100.7)
    assert pulse.heartbeat_due(1.0) == 101.7
    assert pulse.heartbeat(101.7), "2.6 needs the time in each"
    assert pulse.heartbeat_due(1.0) == 102.7


def test_newer_master_always_sends_heartbeats() -> None:
    pulse = Pulse(100.0, is_2_6=False)
    pulse.sent(100.7)
    assert pulse.heartbeat_due(1.0) == 101.0
    assert not pulse.heartbeat(101.0), "rows were sent before it"
    assert pulse.heartbeat(102.0)


def test_silent_replica_times_out() -> None:
    pulse = Pulse(100.0, is_2_6=True)
    pulse.sent(103.0)
    assert pulse.lost_at(4.0) == 104.0
    pulse.acked(103.5)
    assert pulse.lost_at(2.0) == 105.5


# --- ACKs ---


def test_acks_never_decrease() -> None:
    acked = Acked(VClock({0: 9, 1: 5}))
    assert acked.vclock == VClock({1: 5})
    assert acked.take(Ack(VClock({1: 7, 2: 1})), 10.0)
    assert not acked.take(Ack(VClock({1: 6})), 10.0)
    assert acked.take(Ack(VClock({1: 6, 2: 2})), 10.0)
    assert acked.vclock == VClock({1: 7, 2: 2})


def test_lag_is_measured_by_our_timestamp_of_a_new_transaction() -> None:
    acked = Acked(VClock())
    acked.take(Ack(VClock({1: 1}), timestamp=9.5), 10.0)
    assert acked.lag == 0.5
    acked.take(Ack(VClock({1: 1}), timestamp=9.5), 20.0)
    assert acked.lag == 0.5
    acked.take(Ack(VClock({1: 2})), 20.0)
    assert acked.lag == 0.5


def test_first_ack_is_reported_even_if_it_equals_the_subscription() -> None:
    acked = Acked(VClock({1: 5}))
    assert acked.take(Ack(VClock({1: 5})), 10.0)
    assert not acked.take(Ack(VClock({1: 5})), 10.0)
    assert acked.vclock == VClock({1: 5})


def test_highest_term_and_last_heartbeat_are_kept() -> None:
    acked = Acked(VClock({1: 1}))
    acked.take(Ack(VClock({1: 1}), term=3, vclock_sync=8), 1.0)
    acked.take(Ack(VClock({1: 1}), term=2, vclock_sync=7), 1.0)
    assert (acked.term, acked.vclock_sync) == (3, 8)


def test_rows_for_a_replica_are_counted_without_excluded_ones() -> None:
    rows = RowFilter(VClock({1: 10, 2: 3}), left_out=(4,), own_id=3, own_lsn_max=2)
    assert rows.count(VClock({0: 99, 1: 15, 2: 3, 3: 8, 4: 100, 5: 1})) == 5 + 0 + 2 + 0 + 1
    assert rows.count(VClock({1: 9})) == 0
