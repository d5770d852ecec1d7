"""The applier's states: the transitions, and the reaction to each error."""

from __future__ import annotations

import pytest

from flowstone.errors import RemoteProtocolError
from flowstone.iproto.errors import error_of
from flowstone.iproto.extensions import ErrorRecord, ErrorStack
from flowstone.replication.applier.received_rows import OwnRowRefused
from flowstone.replication.applier.states import ENDED, TRANSITIONS, ApplierState, ConnectionLost, lacks_rows, reaction
from flowstone.replication.vclock import VClock

State = ApplierState

# docs/spec/replication.md#error-reactions: code, reaction of a 2.6.0 applier, reaction of a newer one. No peer sends
# 264: the applier raises it itself.
REACTIONS = (
    (116, State.LOADING, State.LOADING),
    (216, State.LOADING, State.LOADING),
    (217, State.LOADING, State.LOADING),
    (59, State.LOADING, State.LOADING),
    (42, State.LOADING, State.LOADING),
    (45, State.LOADING, State.LOADING),
    (47, State.LOADING, State.LOADING),
    (115, State.DISCONNECTED, State.DISCONNECTED),
    (243, State.STOPPED, State.DISCONNECTED),
    (220, State.STOPPED, State.LOADING),
    (62, State.STOPPED, State.STOPPED),
    (219, State.STOPPED, State.LOADING),
    (264, State.DISCONNECTED, State.DISCONNECTED),
    (117, State.OFF, State.OFF),
    (7, State.STOPPED, State.STOPPED),
    (3, State.STOPPED, State.STOPPED),
    (63, State.STOPPED, State.STOPPED),
    (999, State.STOPPED, State.STOPPED),
)


@pytest.mark.parametrize(("code", "in_2_6", "later"), REACTIONS)
def test_applier_reacts_to_an_error_of_the_peer_like_a_real_one(
    code: int, in_2_6: ApplierState, later: ApplierState
) -> None:
    error = error_of(code, "no")
    assert reaction(error, is_2_6=True) is in_2_6
    assert reaction(error, is_2_6=False) is later


@pytest.mark.parametrize(
    ("kind", "in_2_6", "later"),
    [
        ("XlogGapError", State.STOPPED, State.LOADING),
        ("SocketError", State.DISCONNECTED, State.DISCONNECTED),
        ("TimedOut", State.DISCONNECTED, State.DISCONNECTED),
        ("LuajitError", State.STOPPED, State.STOPPED),
    ],
)
def test_class_of_an_error_takes_precedence_over_its_code(kind: str, in_2_6: ApplierState, later: ApplierState) -> None:
    """2.6.0 uses code 32 for all these errors."""
    error = error_of(32, "no", ErrorStack((ErrorRecord(kind, "no"),)))
    assert reaction(error, is_2_6=True) is in_2_6
    assert reaction(error, is_2_6=False) is later


@pytest.mark.parametrize("error", [ConnectionLost("gone"), ConnectionResetError(), TimeoutError()])
def test_lost_connection_is_retried(error: ConnectionLost | OSError) -> None:
    assert reaction(error, is_2_6=True) is reaction(error, is_2_6=False) is State.DISCONNECTED


def test_unknown_rows_of_our_own_id_are_checked_again() -> None:
    error = OwnRowRefused("row 6 of replica 1")
    assert reaction(error, is_2_6=True) is reaction(error, is_2_6=False) is State.DISCONNECTED


def test_invalid_bytes_stop_the_applier() -> None:
    assert reaction(RemoteProtocolError("nonsense"), is_2_6=True) is State.STOPPED


def test_every_state_is_in_the_table_and_reachable() -> None:
    assert list(TRANSITIONS) == list(State)
    assert {after for line in TRANSITIONS.values() for after in line} == set(State)


def test_applier_can_be_stopped_and_restarted_in_any_state() -> None:
    for state in State:
        assert state is State.OFF or State.OFF in TRANSITIONS[state]
    for state in ENDED:
        assert State.CONNECT in TRANSITIONS[state]


def test_peer_may_not_know_us_while_it_lacks_rows_that_we_got_from_others() -> None:
    ours = VClock({0: 9, 1: 5, 2: 7})
    assert lacks_rows(VClock({1: 4, 2: 7}), ours, besides=2)
    assert lacks_rows(VClock(), ours, besides=2)
    assert not lacks_rows(VClock({1: 5}), ours, besides=2)  # the peer may lack rows of our own forever
    assert not lacks_rows(VClock({1: 6, 3: 1}), ours, besides=2)
