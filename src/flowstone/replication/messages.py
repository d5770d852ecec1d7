"""Messages between members of a replica set other than rows: requests, replies, ballots, heartbeats, ACKs.

A message is a frozen value. `encode_x` returns the packet that a real server sends, byte for byte
(docs/spec/iproto.md#byte-samples); `decode_x` takes a body or a row. An invalid body raises the error with which a real
server of that version rejects it; unknown keys are skipped, as real servers do. `is_2_6` is about the sender when
encoding, about the receiver when decoding. `row_stream.py` decodes rows in bulk.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn
from uuid import UUID

import msgspec

from flowstone.iproto import errors
from flowstone.iproto.constants import VCLOCK_MAX, BallotKey, Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.iproto.requests import decode_text, decode_uint, split_map
from flowstone.iproto.row import Row, encode_header
from flowstone.replication.limbo.control_rows import NUMBER_MAX
from flowstone.replication.vclock import VClock, VClockError

NIL_UUID: Final = UUID(int=0)
"""The UUID of a request that has none: 2.6 accepts it, newer servers reject it with ER_NIL_UUID."""

_NOWHERE: Final = VClock()
_VCLOCK, _TERM, _VCLOCK_SYNC = Key.VCLOCK.value, Key.TERM.value, Key.VCLOCK_SYNC.value
_OF_ACK: Final = frozenset((_VCLOCK, _TERM, _VCLOCK_SYNC))


@dataclass(frozen=True, slots=True)
class Join:
    """JOIN. `version` is 0 if it was not sent, and the reply then has no JOIN_META."""

    instance_uuid: UUID
    version: int = 0
    instance_name: str | None = None


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """FETCH_SNAPSHOT: the JOIN of an anonymous replica."""

    version: int = 0
    instance_uuid: UUID | None = None
    is_checkpoint_join: bool = False


@dataclass(frozen=True, slots=True)
class Register:
    """REGISTER: an anonymous replica requests an id."""

    instance_uuid: UUID
    vclock: VClock
    instance_name: str | None = None


@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUBSCRIBE. `id_filter` lists the originators whose rows must not be sent, in ascending order."""

    replicaset_uuid: UUID | None
    instance_uuid: UUID | None
    vclock: VClock
    version: int
    is_anonymous: bool = False
    id_filter: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ballot:
    """The state of an instance, by which others choose the peer to join (docs/spec/replication.md#ballot).

    Only 2.6.0 sends `is_loading`; it sends neither `is_ro` nor the fields after `is_loading`.
    """

    vclock: VClock = _NOWHERE
    gc_vclock: VClock = _NOWHERE
    is_ro_cfg: bool = False
    is_ro: bool = False
    is_loading: bool = False
    is_anon: bool = False
    is_booted: bool = True
    can_lead: bool = False
    bootstrap_leader_uuid: UUID | None = None
    registered_uuids: tuple[UUID, ...] = ()
    instance_name: str | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledges the rows a replica has written. `term` is 0 from 2.6, `timestamp` 0 if no transaction is new."""

    vclock: VClock
    term: int = 0
    vclock_sync: int = 0
    timestamp: float = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A master's sign of life. `vclock_sync` is 0 from 2.6, `timestamp` 0 if rows were sent since the last one."""

    replica_id: int
    timestamp: float
    vclock_sync: int = 0


@dataclass(frozen=True, slots=True)
class SubscribeReply:
    """The OK to SUBSCRIBE. Masters before 2.0 do not send the replica set's UUID; masters before 3.0 do not send its
    name."""

    replica_id: int
    vclock: VClock
    replicaset_uuid: UUID | None
    replicaset_name: str | None = None


# --- Values ---------------------------------------------------------------------------------------------------------

_UUID_TEXT = re.compile(rb"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_VALUE = msgspec.msgpack.Decoder()


def _uuid(raw: bytes) -> UUID:
    if raw[:2] != b"\xd9\x24" or _UUID_TEXT.fullmatch(raw, 2) is None:
        raise ValueError("not a UUID")
    uuid = UUID(raw[2:].decode("ascii"))
    if uuid.bytes[8] >= 0xE0:  # real servers accept the variants NCS, RFC 4122 and Microsoft
        raise ValueError("not a UUID of a known variant")
    return uuid


def _whole_vclock(raw: bytes) -> VClock:
    lsns = _VALUE.decode(raw)
    if not isinstance(lsns, dict) or len(lsns) > VCLOCK_MAX:
        raise ValueError("not a map of LSNs")
    try:
        return VClock(lsns)
    except (VClockError, TypeError) as error:  # TypeError: keys of several types
        raise ValueError("not a vclock") from error


def _vclock(raw: bytes) -> VClock:
    """Decode a vclock without component 0, which is local to its instance."""
    return _whole_vclock(raw).without_zero()


def _uint(raw: bytes) -> int:
    if not (raw[0] < 0x80 or 0xCC <= raw[0] <= 0xCF):
        raise ValueError("not an unsigned number")
    return decode_uint(raw)


def _term(raw: bytes) -> int:
    term = _uint(raw)
    if term > NUMBER_MAX:
        raise ValueError
    return term


def _version(raw: bytes) -> int:
    return _uint(raw) & 0xFFFF_FFFF


def _bool(raw: bytes) -> bool:
    if raw not in (b"\xc2", b"\xc3"):
        raise ValueError("not a boolean")
    return raw == b"\xc3"


def _text(raw: bytes) -> str:
    if not (0xA0 <= raw[0] < 0xC0 or 0xD9 <= raw[0] <= 0xDB):
        raise ValueError("not a string")
    return decode_text(raw)


def _id_filter(raw: bytes) -> tuple[int, ...]:
    ids = _VALUE.decode(raw)
    if not isinstance(ids, list) or any(type(number) is not int or not 0 <= number < VCLOCK_MAX for number in ids):
        raise ValueError("not a list of replica ids")
    return tuple(sorted(set(ids)))


def _uuids(raw: bytes) -> tuple[UUID, ...]:
    texts = _VALUE.decode(raw)
    if not isinstance(texts, list) or len(texts) >= VCLOCK_MAX or not all(isinstance(text, str) for text in texts):
        raise ValueError("not a list of members")
    return tuple(_uuid(pack(text)) for text in texts)


_FIELDS: dict[int, tuple[Callable[[bytes], Any], str]] = {
    Key.REPLICASET_UUID: (_uuid, "replicaset UUID"),
    Key.INSTANCE_UUID: (_uuid, "instance UUID"),
    Key.VCLOCK: (_vclock, "invalid VCLOCK"),
    Key.SERVER_VERSION: (_version, "invalid VERSION"),
    Key.REPLICA_ANON: (_bool, "invalid REPLICA_ANON flag"),
    Key.ID_FILTER: (_id_filter, "invalid ID_FILTER"),
    Key.IS_CHECKPOINT_JOIN: (_bool, "invalid IS_CHECKPOINT_JOIN"),
    Key.CHECKPOINT_VCLOCK: (_whole_vclock, "invalid CHECKPOINT_VCLOCK"),
    Key.CHECKPOINT_LSN: (_uint, "invalid CHECKPOINT_LSN"),
    Key.INSTANCE_NAME: (_text, "invalid INSTANCE_NAME"),
    Key.TERM: (_term, "invalid term"),
    Key.VCLOCK_SYNC: (_uint, "invalid vclock sync"),
}
"""Per key, the decoder of its value, and the text of real servers if the value is invalid."""

_TEXTS_2_6 = {Key.REPLICASET_UUID.value: "UUID", Key.INSTANCE_UUID.value: "UUID"}

_BALLOT_FIELDS: dict[int, tuple[str, Callable[[bytes], Any]]] = {
    BallotKey.IS_RO_CFG: ("is_ro_cfg", _bool),
    BallotKey.VCLOCK: ("vclock", _vclock),
    BallotKey.GC_VCLOCK: ("gc_vclock", _vclock),
    BallotKey.IS_RO: ("is_ro", _bool),
    BallotKey.IS_ANON: ("is_anon", _bool),
    BallotKey.IS_BOOTED: ("is_booted", _bool),
    BallotKey.CAN_LEAD: ("can_lead", _bool),
    BallotKey.BOOTSTRAP_LEADER_UUID: ("bootstrap_leader_uuid", _uuid),
    BallotKey.REGISTERED_REPLICA_UUIDS: ("registered_uuids", _uuids),
    BallotKey.INSTANCE_NAME: ("instance_name", _text),
}
_BALLOT_FIELDS_2_6: dict[int, tuple[str, Callable[[bytes], Any]]] = {
    **{key: _BALLOT_FIELDS[key] for key in (BallotKey.IS_RO_CFG, BallotKey.VCLOCK, BallotKey.GC_VCLOCK)},
    BallotKey.IS_RO: ("is_loading", _bool),  # the key's meaning in 2.6.0
}


# --- Decoding -------------------------------------------------------------------------------------------------------


def _refuse(what: str) -> NoReturn:
    raise errors.InvalidMsgpack(f"Invalid MsgPack - {what}")


def _read(body: bytes | None, wanted: tuple[Key, ...], *, is_2_6: bool = False) -> dict[int, Any]:
    """Return the values of the `wanted` keys that are in the body."""
    try:
        fields = split_map(body or b"")
    except ValueError:
        _refuse("request body")
    found: dict[int, Any] = {}
    for number, raw in fields.items():
        key = number & 0xFF  # real servers use only the lowest byte
        if key not in wanted:
            continue
        decode, text = _FIELDS[key]
        try:
            found[key] = decode(raw)
        except (ValueError, RecursionError):
            _refuse(_TEXTS_2_6.get(key, text) if is_2_6 else text)
    return found


def decode_join(body: bytes | None, *, is_2_6: bool) -> Join:
    """Decode JOIN. 2.6 reads only the UUID."""
    if is_2_6:
        return Join(_read(body, (Key.INSTANCE_UUID,), is_2_6=True).get(Key.INSTANCE_UUID, NIL_UUID))
    found = _read(body, (Key.INSTANCE_UUID, Key.SERVER_VERSION))
    return Join(found.get(Key.INSTANCE_UUID, NIL_UUID), found.get(Key.SERVER_VERSION, 0), _name(body))


def decode_fetch_snapshot(body: bytes | None, *, is_2_6: bool) -> FetchSnapshot:
    """Decode FETCH_SNAPSHOT. 2.6 ignores the body, newer servers require one."""
    if is_2_6:
        return FetchSnapshot()
    cursor = (Key.IS_CHECKPOINT_JOIN, Key.CHECKPOINT_VCLOCK, Key.CHECKPOINT_LSN)
    found = _read(body, (Key.SERVER_VERSION, *cursor))
    uuid = _lenient(body, Key.INSTANCE_UUID)
    return FetchSnapshot(found.get(Key.SERVER_VERSION, 0), uuid, found.get(Key.IS_CHECKPOINT_JOIN, False))


def decode_register(body: bytes | None, *, is_2_6: bool) -> Register:
    found = _read(body, (Key.INSTANCE_UUID, Key.VCLOCK), is_2_6=is_2_6)
    name = None if is_2_6 else _name(body)
    return Register(found.get(Key.INSTANCE_UUID, NIL_UUID), found.get(Key.VCLOCK, _NOWHERE), name)


def decode_subscribe(body: bytes | None, *, is_2_6: bool) -> Subscribe:
    keys = (Key.REPLICASET_UUID, Key.INSTANCE_UUID, Key.VCLOCK, Key.SERVER_VERSION, Key.REPLICA_ANON, Key.ID_FILTER)
    found = _read(body, keys, is_2_6=is_2_6)
    return Subscribe(
        found.get(Key.REPLICASET_UUID),
        found.get(Key.INSTANCE_UUID),
        found.get(Key.VCLOCK, _NOWHERE),
        found.get(Key.SERVER_VERSION, 0),
        found.get(Key.REPLICA_ANON, False),
        found.get(Key.ID_FILTER, ()),
    )


def decode_vclock_reply(body: bytes | None) -> VClock:
    """Return the vclock in an OK to JOIN, REGISTER or FETCH_SNAPSHOT, without component 0."""
    return _position(_read(body, (Key.VCLOCK,)))


def _position(found: dict[int, Any]) -> VClock:
    """Return the vclock of an answer; raise if it is missing, because all masters send it."""
    vclock: VClock | None = found.get(Key.VCLOCK)
    if vclock is None:
        _refuse("missing VCLOCK")
    return vclock


def decode_subscribe_reply(row: Row) -> SubscribeReply:
    """Decode the OK to SUBSCRIBE, whose header has the id of the answering instance."""
    found = _read(row.body, (Key.VCLOCK, Key.REPLICASET_UUID))
    return SubscribeReply(row.replica_id, _position(found), found.get(Key.REPLICASET_UUID))


def decode_ack(row: Row) -> Ack:
    """Decode an ACK, which is all that a replica sends after SUBSCRIBE."""
    ack = _plain_ack(row)
    if ack is not None:
        return ack
    found = _read(row.body, (Key.VCLOCK, Key.TERM, Key.VCLOCK_SYNC))
    vclock = found.get(Key.VCLOCK, _NOWHERE)
    return Ack(vclock, found.get(Key.TERM, 0), found.get(Key.VCLOCK_SYNC, 0), row.timestamp)


def _plain_ack(row: Row) -> Ack | None:
    """Decode an ordinary ACK, the most frequent message, fast; None if it needs the checks of `_read`."""
    try:
        found = _VALUE.decode(row.body)
        if type(found) is not dict or not found.keys() <= _OF_ACK:
            return None
        lsns, term, number = found.get(_VCLOCK, {}), found.get(_TERM, 0), found.get(_VCLOCK_SYNC, 0)
        if type(lsns) is not dict or type(term) is not int or type(number) is not int:
            return None
        if len(lsns) > VCLOCK_MAX or not 0 <= term <= NUMBER_MAX or number < 0:
            return None
        return Ack(VClock(lsns).without_zero(), term, number, row.timestamp)
    except (ValueError, RecursionError, VClockError, TypeError):
        return None


def decode_heartbeat(row: Row) -> Heartbeat:
    """Decode a heartbeat: a row of type OK with LSN 0. Masters before 2.11 send it without a body."""
    found = _read(row.body, (Key.VCLOCK_SYNC,)) if row.body else {}
    return Heartbeat(row.replica_id, row.timestamp, found.get(Key.VCLOCK_SYNC, 0))


def decode_ballot(body: bytes | None, *, is_2_6: bool) -> Ballot:
    """Decode the reply to VOTE; `is_2_6`: the peer is older than 2.6.1. A body without a ballot is an empty ballot."""
    return _ballot(body, Ballot(), _BALLOT_FIELDS_2_6 if is_2_6 else _BALLOT_FIELDS) or Ballot()


def decode_ballot_event(data: bytes | None, previous: Ballot) -> Ballot | None:
    """Decode the value of the event `internal.ballot`; None if the ballot is empty.

    Fields that the event omits are as in `previous`.
    """
    return _ballot(data, previous, _BALLOT_FIELDS)


def _ballot(body: bytes | None, base: Ballot, fields: dict[int, tuple[str, Callable[[bytes], Any]]]) -> Ballot | None:
    try:
        raw = split_map(body or b"").get(Key.BALLOT)
        if raw is None:
            return None
        values = {fields[key][0]: fields[key][1](value) for key, value in split_map(raw).items() if key in fields}
    except (ValueError, RecursionError):
        _refuse("packet body")
    return replace(base, **values) if values else None


def _lenient(body: bytes | None, key: Key) -> Any:
    """Return the value of a key that 2.11 skips, but newer servers read; None if it is missing or invalid."""
    try:
        return _FIELDS[key][0](split_map(body or b"")[key])
    except (KeyError, ValueError):
        return None


def _name(body: bytes | None) -> str | None:
    name: str | None = _lenient(body, Key.INSTANCE_NAME)
    return name


# --- Encoding -------------------------------------------------------------------------------------------------------


def _packet(type: RequestType, sync: int, body: bytes = b"", *, replica_id: int = 0, timestamp: float = 0.0) -> bytes:
    row = Row(type.value, replica_id=replica_id, timestamp=timestamp, sync=sync)
    return frame(encode_header(row) + body)


def _lsns(vclock: VClock) -> dict[int, int]:
    return vclock.without_zero().to_mapping()


def _text_of(uuid: UUID | None) -> str:
    return str(uuid or NIL_UUID)


def encode_vote(sync: int = 0) -> bytes:
    return _packet(RequestType.VOTE, sync)


def encode_join(join: Join, sync: int = 0, *, is_2_6: bool = False) -> bytes:
    body: dict[int, Any] = {Key.INSTANCE_UUID.value: str(join.instance_uuid)}
    if join.instance_name and not is_2_6:
        body[Key.INSTANCE_NAME.value] = join.instance_name
    if join.version and not is_2_6:
        body[Key.SERVER_VERSION.value] = join.version
    return _packet(RequestType.JOIN, sync, pack(body))


def encode_fetch_snapshot(fetch: FetchSnapshot, sync: int = 0, *, is_2_6: bool = False) -> bytes:
    """Encode FETCH_SNAPSHOT. 2.6 sends no body; newer masters require one, if only an empty map."""
    if is_2_6:
        return _packet(RequestType.FETCH_SNAPSHOT, sync)
    body: dict[int, Any] = {}
    if fetch.instance_uuid is not None:
        body[Key.INSTANCE_UUID.value] = str(fetch.instance_uuid)
    if fetch.version:
        body[Key.SERVER_VERSION.value] = fetch.version
    if fetch.is_checkpoint_join:
        body[Key.IS_CHECKPOINT_JOIN.value] = True
    return _packet(RequestType.FETCH_SNAPSHOT, sync, pack(body))


def encode_register(register: Register, sync: int = 0, *, is_2_6: bool = False) -> bytes:
    body: dict[int, Any] = {Key.INSTANCE_UUID.value: str(register.instance_uuid)}
    if register.instance_name and not is_2_6:
        body[Key.INSTANCE_NAME.value] = register.instance_name
    body[Key.VCLOCK.value] = _lsns(register.vclock)
    return _packet(RequestType.REGISTER, sync, pack(body))


def encode_subscribe(subscribe: Subscribe, sync: int = 0, *, is_2_6: bool = False) -> bytes:
    body: dict[int, Any] = {
        Key.REPLICASET_UUID.value: _text_of(subscribe.replicaset_uuid),
        Key.INSTANCE_UUID.value: _text_of(subscribe.instance_uuid),
        Key.VCLOCK.value: _lsns(subscribe.vclock),
        Key.SERVER_VERSION.value: subscribe.version,
        Key.REPLICA_ANON.value: subscribe.is_anonymous,
    }
    if subscribe.id_filter or not is_2_6:
        body[Key.ID_FILTER.value] = subscribe.id_filter
    return _packet(RequestType.SUBSCRIBE, sync, pack(body))


def encode_vclock_reply(vclock: VClock, sync: int = 0, *, with_zero: bool = False) -> bytes:
    """Encode an OK with a vclock. Masters since 2.11 include component 0 in the first OK to JOIN or FETCH_SNAPSHOT."""
    lsns = vclock.to_mapping() if with_zero else _lsns(vclock)
    return _packet(RequestType.OK, sync, pack({Key.VCLOCK.value: lsns}))


def encode_subscribe_reply(reply: SubscribeReply, sync: int = 0, *, is_2_6: bool = False) -> bytes:
    vclock = {Key.VCLOCK.value: _lsns(reply.vclock)}
    uuid = {} if reply.replicaset_uuid is None else {Key.REPLICASET_UUID.value: str(reply.replicaset_uuid)}
    name = {} if reply.replicaset_name is None else {Key.REPLICASET_NAME.value: reply.replicaset_name}
    body = {**vclock, **uuid} if is_2_6 else {**uuid, **name, **vclock}
    return _packet(RequestType.OK, sync, pack(body), replica_id=reply.replica_id)


def encode_heartbeat(heartbeat: Heartbeat, sync: int = 0) -> bytes:
    number = heartbeat.vclock_sync
    body = pack({Key.VCLOCK_SYNC.value: number}) if number else b""
    return _packet(RequestType.OK, sync, body, replica_id=heartbeat.replica_id, timestamp=heartbeat.timestamp)


def encode_ack(ack: Ack, sync: int = 0) -> bytes:
    body: dict[int, Any] = {_VCLOCK: _lsns(ack.vclock)}
    if ack.term:
        body[_TERM] = ack.term
    if ack.vclock_sync:
        body[_VCLOCK_SYNC] = ack.vclock_sync
    return _packet(RequestType.OK, sync, pack(body), timestamp=ack.timestamp)


def encode_marker(type: RequestType, sync: int = 0) -> bytes:
    """Encode a packet that consists only of its type: JOIN_META, JOIN_SNAPSHOT."""
    return _packet(type, sync)


def encode_row_packet(row: Row, sync: int = 0) -> bytes:
    """Encode a row with the SYNC of the request that it answers, instead of its own."""
    fields = msgspec.structs.replace(row, sync=sync)
    return frame(encode_header(fields) + row.body)


def encode_ballot_body(ballot: Ballot, *, is_2_6: bool) -> bytes:
    """Encode the body of the reply to VOTE, which is also the value of the event `internal.ballot`."""
    vclocks = {
        BallotKey.VCLOCK.value: _lsns(ballot.vclock),
        BallotKey.GC_VCLOCK.value: _lsns(ballot.gc_vclock),
    }
    values: dict[int, Any]
    if is_2_6:
        values = {BallotKey.IS_RO_CFG.value: ballot.is_ro_cfg, BallotKey.IS_RO.value: ballot.is_loading, **vclocks}
        return pack({Key.BALLOT.value: values})
    values = {
        BallotKey.IS_RO_CFG.value: ballot.is_ro_cfg,
        BallotKey.IS_RO.value: ballot.is_ro,
        BallotKey.IS_ANON.value: ballot.is_anon,
        BallotKey.IS_BOOTED.value: ballot.is_booted,
        **vclocks,
        BallotKey.CAN_LEAD.value: ballot.can_lead,
        BallotKey.BOOTSTRAP_LEADER_UUID.value: _text_of(ballot.bootstrap_leader_uuid),
    }
    if ballot.instance_name:
        values[BallotKey.INSTANCE_NAME.value] = ballot.instance_name
    values[BallotKey.REGISTERED_REPLICA_UUIDS.value] = [str(uuid) for uuid in ballot.registered_uuids]
    return pack({Key.BALLOT.value: values})
