"""Control rows: bodies byte for byte as real servers write them, and clear errors."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import decode_row
from flowstone.replication.limbo.control_rows import (
    Confirm,
    ControlBody,
    Demote,
    Promote,
    RaftState,
    Rollback,
    SynchroError,
    decode_control,
)
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import CONTROL_TYPES

RECORDED = [
    ("8400280201036b04cb41dabe8491030fd58202010369", Confirm(1, 105)),
    ("8400290201036d04cb41dabe849116f0a9820201036c", Rollback(1, 108)),
    ("84001f0201035f04cb41dabe848825692783020003005302", Promote(0, 0, 2)),
    ("8400200201036f04cb41dabe848839a00a830201036d5303", Demote(1, 109, 3)),
    ("84001e0701030904cb41dabe8478aa6c598200020101", RaftState(term=2, vote=1)),
]


@pytest.mark.parametrize(("row", "body"), RECORDED)
def test_recorded_rows_decode_and_encode_to_the_same_bytes(row: str, body: ControlBody) -> None:
    decoded = decode_row(bytes.fromhex(row))
    assert decode_control(decoded.type, decoded.body) == body
    if not isinstance(body, RaftState):
        assert body.encode() == decoded.body


def test_promote_in_a_snapshot_has_the_confirmed_vclock_and_may_lack_a_term() -> None:
    body = msgpack.packb({2: 0, 3: 0, 38: {}})
    assert decode_control(RequestType.RAFT_PROMOTE, body) == Promote(0, 0, 0, VClock())
    state = Promote(1, 17, 3, VClock({1: 17, 2: 5}))
    assert decode_control(RequestType.RAFT_PROMOTE, state.encode()) == state


def test_rollback_without_an_lsn_covers_all_pending_transactions() -> None:
    """2.6.0 writes it when an asynchronous transaction after a synchronous one times out."""
    assert decode_control(41, msgpack.packb({2: 1, 3: 2**64 - 1})) == Rollback(1, 0)
    with pytest.raises(SynchroError):
        decode_control(40, msgpack.packb({2: 1, 3: 2**64 - 1}))


def test_full_raft_state_is_decoded_and_unknown_keys_are_skipped() -> None:
    body = msgpack.packb({0: 5, 1: 2, 2: 3, 3: {1: 10}, 4: 2, 5: True, 77: "newer"})
    assert decode_control(RequestType.RAFT, body) == RaftState(5, 2, 3, VClock({1: 10}), 2, True)


@pytest.mark.parametrize(
    ("row_type", "body", "message"),
    [
        (40, b"", "RAFT_CONFIRM: invalid MessagePack"),
        (40, b"\x01", "RAFT_CONFIRM: expected a map, got int"),
        (40, msgpack.packb({2: 1}), "RAFT_CONFIRM: LSN is missing"),
        (41, msgpack.packb({2: 1, 3: -1}), "RAFT_ROLLBACK: LSN is -1, not a number from 0"),
        (31, msgpack.packb({2: 1, 3: 1, 0x53: "x"}), "RAFT_PROMOTE: TERM is b'x'"),
        (31, msgpack.packb({2: 1, 3: 1, 0x26: {40: 1}}), "RAFT_PROMOTE: VCLOCK: 40 is not a replica id"),
        (30, msgpack.packb({0: 1, 2: 9}), "RAFT: invalid state 9"),
        (30, msgpack.packb({0: 1, 5: 1}), "RAFT: IS_LEADER_SEEN is 1"),
        (2, msgpack.packb({}), "row type 2 is not a control row"),
    ],
)
def test_invalid_body_is_reported(row_type: int, body: bytes, message: str) -> None:
    with pytest.raises(SynchroError, match=message):
        decode_control(row_type, body)


@given(st.sampled_from(sorted(CONTROL_TYPES)), st.binary(max_size=40))
def test_any_bytes_decode_or_give_a_clean_error(row_type: int, body: bytes) -> None:
    with contextlib.suppress(SynchroError):
        decode_control(row_type, body)
