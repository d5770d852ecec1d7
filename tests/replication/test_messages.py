"""Messages between members of a replica set: bytes and errors of real servers, and round trips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.constants import TYPE_ERROR, RequestType
from flowstone.iproto.errors import InvalidMsgpack
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response, split
from flowstone.iproto.row import Row, decode_row
from flowstone.replication import messages
from flowstone.replication.messages import (
    NIL_UUID,
    Ack,
    Ballot,
    FetchSnapshot,
    Heartbeat,
    Join,
    Register,
    Subscribe,
    SubscribeReply,
)
from flowstone.replication.vclock import VClock
from tests.vectors import recorded

A = UUID("11111111-0000-4000-8000-000000000031")
SET = UUID("aaaaaaaa-0000-4000-8000-000000000011")
CHECKS: list[tuple[str, Callable[[Row, bool], bytes]]] = [
    ("JOIN", lambda row, old: messages.encode_join(messages.decode_join(row.body, is_2_6=old), row.sync, is_2_6=old)),
    (
        "SUBSCRIBE",
        lambda row, old: messages.encode_subscribe(
            messages.decode_subscribe(row.body, is_2_6=old), row.sync, is_2_6=old
        ),
    ),
    (
        "REGISTER",
        lambda row, old: messages.encode_register(messages.decode_register(row.body, is_2_6=old), row.sync, is_2_6=old),
    ),
    (
        "FETCH_SNAPSHOT",
        lambda row, old: messages.encode_fetch_snapshot(
            messages.decode_fetch_snapshot(row.body, is_2_6=old), row.sync, is_2_6=old
        ),
    ),
    ("VOTE", lambda row, _: messages.encode_vote(row.sync)),
    ("OK", lambda row, _: messages.encode_ack(messages.decode_ack(row), row.sync)),
]
"""Messages of a replica, by type: decoded and encoded again."""


def sent_by_replicas(version: str) -> list[bytes]:
    """Return the packets of every recorded replica, except the hand-made conversations of 08-probe."""
    found = []
    for path in sorted((recorded.HERE / f"tarantool-{version}").glob("0[1-7]*/*.c2s.bin")):
        found += split(path.read_bytes())[0]
    return found


def sent_by_masters(version: str) -> list[bytes]:
    found = []
    for path in sorted((recorded.HERE / f"tarantool-{version}").glob("0[1-7]*/*.s2c.bin")):
        found += split(path.read_bytes()[128:])[0]
    return found


@pytest.mark.parametrize("version", ["2.6", "2.11", "3.8"])
def test_messages_of_a_recorded_replica_round_trip(version: str) -> None:
    seen = set()
    for packet in sent_by_replicas(version):
        row = decode_row(packet)
        for name, again in CHECKS:
            if row.type == RequestType[name]:
                assert again(row, version == "2.6")[5:] == packet
                seen.add(name)
    assert {"JOIN", "SUBSCRIBE", "OK"} <= seen


@pytest.mark.parametrize("version", ["2.6", "2.11", "3.8"])
def test_messages_of_a_recorded_master_round_trip(version: str) -> None:
    old = version == "2.6"
    seen = set()
    for packet in sent_by_masters(version):
        row = decode_row(packet)
        if row.type >= TYPE_ERROR or row.type in (RequestType.EVENT, RequestType.CHUNK) or packet[2] == 0xCE:
            continue  # not from a relay: errors, events and replies with a header of fixed size
        if row.type != RequestType.OK or row.lsn:
            kind, again = "row", messages.encode_row_packet(row, row.sync)
        elif row.replica_id and b"\x26" in row.body[:42]:
            kind = "subscribed"
            again = messages.encode_subscribe_reply(messages.decode_subscribe_reply(row), row.sync, is_2_6=old)
        elif row.body[:2] == b"\x81\x26":
            kind, vclock = "position", messages.decode_vclock_reply(row.body)
            if row.body[3:4] == b"\x00":  # component 0, which is useful to the sender only
                vclock = vclock.advanced(0, row.body[4])
            again = messages.encode_vclock_reply(vclock, row.sync, with_zero=True)
        else:
            kind, again = "heartbeat", messages.encode_heartbeat(messages.decode_heartbeat(row), row.sync)
        assert again[5:] == packet, kind
        seen.add(kind)
    assert seen == {"row", "subscribed", "position", "heartbeat"}


@pytest.mark.parametrize("version", ["2.6", "2.11", "3.8"])
def test_recorded_ballots_round_trip(version: str) -> None:
    old = version == "2.6"
    count = 0
    for packet in sent_by_masters(version):
        response = decode_response(packet)
        if response.type == RequestType.OK and response.body[:2] == b"\x81\x29":
            ballot = messages.decode_ballot(response.body, is_2_6=old)
            assert messages.encode_ballot_body(ballot, is_2_6=old) == response.body
            count += 1
        elif response.type == RequestType.EVENT and b"\x58\x81\x29" in response.body:
            value = response.body[response.body.index(b"\x58\x81\x29") + 1 :]
            event = messages.decode_ballot_event(value, Ballot())
            assert event is not None
            assert messages.encode_ballot_body(event, is_2_6=False) == value
            count += 1
    assert count


# --- docs/spec/iproto.md#byte-samples ---


def test_requests_equal_the_samples_of_the_reference() -> None:
    text = "d924" + str(A).encode().hex()
    set_text = "d924" + str(SET).encode().hex()
    version = 3 << 16 | 8 << 8
    assert messages.encode_vote().hex() == "ce00000003" + "810044"
    assert messages.encode_join(Join(A, version), is_2_6=True)[5:].hex() == "8100418124" + text
    assert messages.encode_join(Join(A, version))[5:].hex() == "8100418224" + text + "06ce00030800"
    assert messages.encode_join(Join(A))[5:].hex() == "8100418124" + text
    assert messages.encode_fetch_snapshot(FetchSnapshot(version), is_2_6=True)[5:].hex() == "810045"
    assert messages.encode_fetch_snapshot(FetchSnapshot())[5:].hex() == "81004580"
    subscribe = Subscribe(SET, A, VClock({0: 9, 1: 12}), 2 << 16 | 6 << 8, id_filter=(2,))
    head, tail = "8100428625" + set_text + "24" + text, "2681010c06ce0002060050c2519102"
    assert messages.encode_subscribe(subscribe, is_2_6=True)[5:].hex() == head + tail
    empty = replace(subscribe, id_filter=())
    assert messages.encode_subscribe(empty, is_2_6=True)[5:].hex() == head.replace("8625", "8525", 1) + tail[:-6]
    assert messages.encode_subscribe(empty)[5:].hex() == head + tail[:-4] + "90"


def test_replies_equal_the_samples_of_the_reference() -> None:
    set_text = "d924" + str(SET).encode().hex()
    assert messages.encode_vclock_reply(VClock({0: 1, 1: 7}), with_zero=True)[5:].hex() == "8100008126820001" + "0107"
    assert messages.encode_vclock_reply(VClock({0: 1, 1: 11}), 3)[5:].hex() == "8200000103812681010b"
    reply = SubscribeReply(1, VClock({1: 12}), SET)
    assert (
        messages.encode_subscribe_reply(reply, is_2_6=True)[5:].hex() == "82000002018226" + "81010c" + "25" + set_text
    )
    assert messages.encode_subscribe_reply(reply)[5:].hex() == "82000002018225" + set_text + "26" + "81010c"
    assert messages.encode_marker(RequestType.JOIN_META)[5:].hex() == "810047"
    assert messages.encode_marker(RequestType.JOIN_SNAPSHOT, 5)[5:].hex() == "8200480105"
    assert messages.encode_heartbeat(Heartbeat(1, 1.5))[5:].hex() == "83000002010" + "4cb3ff8000000000000"
    assert messages.encode_heartbeat(Heartbeat(1, 0.0, 5))[5:].hex() == "8200000201815a05"
    assert messages.encode_ack(Ack(VClock({0: 3, 1: 12})))[5:].hex() == "810000812681010c"
    ack = Ack(VClock({1: 9}), 1, 4, 1.5)
    assert messages.encode_ack(ack)[5:].hex() == "82000004cb3ff80000000000008326810109" + "53015a04"


def test_ballot_of_2_6_has_is_loading_in_place_of_is_ro() -> None:
    body = bytes.fromhex("812984" + "01c2" + "04c3" + "0281010b" + "0380")
    assert messages.decode_ballot(body, is_2_6=True) == Ballot(VClock({1: 11}), is_loading=True)
    assert messages.decode_ballot(body, is_2_6=False) == Ballot(VClock({1: 11}), is_ro=True)


def test_missing_ballot_is_empty_in_a_reply_and_none_in_an_event() -> None:
    assert messages.decode_ballot(b"\x80", is_2_6=True) == Ballot()
    assert messages.decode_ballot_event(b"\x80", Ballot(is_ro=True)) is None
    assert messages.decode_ballot_event(b"\x81\x29\x80", Ballot(is_ro=True)) is None


def test_fields_missing_in_a_ballot_event_keep_their_values() -> None:
    before = Ballot(VClock({1: 5}), is_ro=True, registered_uuids=(A,))
    event = messages.decode_ballot_event(pack({0x29: {0x02: {1: 6}}}), before)
    assert event == Ballot(VClock({1: 6}), is_ro=True, registered_uuids=(A,))


def test_row_is_sent_with_the_sync_of_its_request() -> None:
    row = decode_row(bytes.fromhex("82000201" + "63" + "8110cd0200"))
    assert messages.encode_row_packet(row, 7)[5:].hex() == "82000201" + "07" + "8110cd0200"
    assert messages.encode_row_packet(row)[5:].hex() == "810002" + "8110cd0200"


# --- rejections ---

REQUESTS: dict[str, Callable[[bytes | None, bool], Any]] = {
    "join": lambda body, old: messages.decode_join(body, is_2_6=old),
    "fetch": lambda body, old: messages.decode_fetch_snapshot(body, is_2_6=old),
    "register": lambda body, old: messages.decode_register(body, is_2_6=old),
    "subscribe": lambda body, old: messages.decode_subscribe(body, is_2_6=old),
}


@pytest.mark.parametrize("name", ["join", "register", "subscribe", "fetch"])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("body", [None, b"", b"\x90", b"\x01"])
def test_request_without_a_map_is_rejected_as_recorded(name: str, old: bool, body: bytes | None) -> None:
    if name == "fetch" and old:
        assert REQUESTS[name](body, old) == FetchSnapshot()
        return
    with pytest.raises(InvalidMsgpack) as refusal:
        REQUESTS[name](body, old)
    assert refusal.value.message == "Invalid MsgPack - request body"


@pytest.mark.parametrize(
    ("name", "body", "text_2_6", "text"),
    [
        ("join", {0x24: "no uuid"}, "UUID", "instance UUID"),
        ("join", {0x24: 5}, "UUID", "instance UUID"),
        ("join", {0x24: str(A).replace("8000", "f000")}, "UUID", "instance UUID"),
        ("join", {0x06: "text"}, None, "invalid VERSION"),
        ("fetch", {0x62: 1}, None, "invalid IS_CHECKPOINT_JOIN"),
        ("fetch", {0x63: 1}, None, "invalid CHECKPOINT_VCLOCK"),
        ("fetch", {0x64: "x"}, None, "invalid CHECKPOINT_LSN"),
        ("register", {0x26: [1]}, "invalid VCLOCK", "invalid VCLOCK"),
        ("register", {0x26: {1: -1}}, "invalid VCLOCK", "invalid VCLOCK"),
        ("register", {0x26: {"a": 1, 1: 2}}, "invalid VCLOCK", "invalid VCLOCK"),
        ("register", {0x26: {32: 1}}, "invalid VCLOCK", "invalid VCLOCK"),
        ("register", {0x26: {1: 2**63}}, "invalid VCLOCK", "invalid VCLOCK"),
        ("subscribe", {0x25: "x" * 36}, "UUID", "replicaset UUID"),
        ("subscribe", {0x06: -1}, "invalid VERSION", "invalid VERSION"),
        ("subscribe", {0x50: 1}, "invalid REPLICA_ANON flag", "invalid REPLICA_ANON flag"),
        ("subscribe", {0x51: 1}, "invalid ID_FILTER", "invalid ID_FILTER"),
        ("subscribe", {0x51: [32]}, "invalid ID_FILTER", "invalid ID_FILTER"),
        ("subscribe", {0x51: [True]}, "invalid ID_FILTER", "invalid ID_FILTER"),
    ],
)
def test_value_of_a_wrong_type_is_rejected_with_the_message_of_a_real_server(
    name: str, body: dict[int, Any], text_2_6: str | None, text: str
) -> None:
    for old, expected in ((True, text_2_6), (False, text)):
        if expected is None:
            REQUESTS[name](pack(body), old)
            continue
        with pytest.raises(InvalidMsgpack) as refusal:
            REQUESTS[name](pack(body), old)
        assert refusal.value.message == f"Invalid MsgPack - {expected}"


def test_unknown_keys_are_skipped() -> None:
    body = pack({"text": 1, 0x26: "no vclock", 0x24: str(A), 0x7F: [{}]})
    for old in (True, False):
        assert messages.decode_join(body, is_2_6=old) == Join(A)


def test_a_request_without_a_uuid_has_the_nil_uuid() -> None:
    assert messages.decode_join(b"\x80", is_2_6=True) == Join(NIL_UUID)
    assert messages.decode_register(b"\x80", is_2_6=False) == Register(NIL_UUID, VClock())
    assert messages.decode_subscribe(b"\x80", is_2_6=False) == Subscribe(None, None, VClock(), 0)


def test_2_6_ignores_version_and_name() -> None:
    body = pack({0x24: str(A), 0x06: 5, 0x5D: "name"})
    assert messages.decode_join(body, is_2_6=True) == Join(A)
    assert messages.decode_join(body, is_2_6=False) == Join(A, 5, "name")


def test_name_may_be_none() -> None:
    assert messages.decode_join(pack({0x24: str(A), 0x5D: 5}), is_2_6=False) == Join(A)


def test_local_component_of_a_peer_is_dropped() -> None:
    assert messages.decode_vclock_reply(pack({0x26: {0: 4, 1: 11}})) == VClock({1: 11})


@pytest.mark.parametrize(
    "body",
    [
        {0x29: 1},
        {0x29: {0x01: 1}},
        {0x29: {0x02: []}},
        {0x29: {0x08: "x"}},
        {0x29: {0x09: ["x"]}},
        {0x29: {0x09: [1]}},
        {0x29: {0x09: [str(A)] * 32}},
    ],
)
def test_malformed_ballot_is_rejected(body: dict[int, Any]) -> None:
    with pytest.raises(InvalidMsgpack, match="Invalid MsgPack - packet body"):
        messages.decode_ballot(pack(body), is_2_6=False)


# --- round trips ---

UUIDS = st.builds(
    lambda raw: UUID(bytes=raw[:8] + bytes((raw[8] & 0x7F,)) + raw[9:]), st.binary(min_size=16, max_size=16)
)
VCLOCKS = st.dictionaries(st.integers(1, 31), st.integers(1, 2**63 - 1), max_size=31).map(VClock)
VERSIONS = st.integers(0, 2**32 - 1)
SYNCS = st.integers(0, 2**63 - 1)
NAMES = st.none() | st.text("abc-", min_size=1, max_size=63)
TIMES = st.floats(0, 2e9)


def body_of(packet: bytes) -> Row:
    (payload,), end = split(packet)
    assert end == len(packet)
    return decode_row(payload)


@given(st.builds(Join, UUIDS, VERSIONS, NAMES), SYNCS)
def test_join_round_trips(join: Join, sync: int) -> None:
    row = body_of(messages.encode_join(join, sync))
    assert (row.type, row.sync) == (RequestType.JOIN, sync)
    assert messages.decode_join(row.body, is_2_6=False) == join
    assert messages.decode_join(row.body, is_2_6=True) == Join(join.instance_uuid)


@given(st.builds(FetchSnapshot, VERSIONS, st.none() | UUIDS, st.booleans()), SYNCS)
def test_fetch_snapshot_round_trips(fetch: FetchSnapshot, sync: int) -> None:
    assert (
        messages.decode_fetch_snapshot(body_of(messages.encode_fetch_snapshot(fetch, sync)).body, is_2_6=False) == fetch
    )


@given(st.builds(Register, UUIDS, VCLOCKS, NAMES), SYNCS)
def test_register_round_trips(register: Register, sync: int) -> None:
    assert messages.decode_register(body_of(messages.encode_register(register, sync)).body, is_2_6=False) == register


FILTERS = st.sets(st.integers(0, 31)).map(lambda ids: tuple(sorted(ids)))


@given(st.builds(Subscribe, UUIDS, UUIDS, VCLOCKS, VERSIONS, st.booleans(), FILTERS), SYNCS, st.booleans())
def test_subscribe_round_trips(subscribe: Subscribe, sync: int, old: bool) -> None:
    row = body_of(messages.encode_subscribe(subscribe, sync, is_2_6=old))
    assert messages.decode_subscribe(row.body, is_2_6=old) == subscribe


@given(st.builds(SubscribeReply, st.integers(0, 31), VCLOCKS, st.none() | UUIDS), SYNCS, st.booleans())
def test_subscribe_reply_round_trips(reply: SubscribeReply, sync: int, old: bool) -> None:
    assert messages.decode_subscribe_reply(body_of(messages.encode_subscribe_reply(reply, sync, is_2_6=old))) == reply


@given(st.builds(Ack, VCLOCKS, SYNCS, SYNCS, TIMES))
def test_ack_round_trips(ack: Ack) -> None:
    assert messages.decode_ack(body_of(messages.encode_ack(ack))) == ack


@given(st.builds(Heartbeat, st.integers(0, 31), TIMES, SYNCS), SYNCS)
def test_heartbeat_round_trips(heartbeat: Heartbeat, sync: int) -> None:
    assert messages.decode_heartbeat(body_of(messages.encode_heartbeat(heartbeat, sync))) == heartbeat


@given(
    st.builds(
        Ballot,
        vclock=VCLOCKS,
        gc_vclock=VCLOCKS,
        is_ro_cfg=st.booleans(),
        is_ro=st.booleans(),
        is_anon=st.booleans(),
        is_booted=st.booleans(),
        can_lead=st.booleans(),
        bootstrap_leader_uuid=UUIDS,
        registered_uuids=st.lists(UUIDS, max_size=31).map(tuple),
        instance_name=NAMES,
    )
)
def test_ballot_round_trips(ballot: Ballot) -> None:
    assert messages.decode_ballot(messages.encode_ballot_body(ballot, is_2_6=False), is_2_6=False) == ballot
