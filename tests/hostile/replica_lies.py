"""Lies of a replica to a node that it follows, or wants to follow."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import encode_request, frame
from flowstone.replication.messages import (
    Ack,
    Join,
    Register,
    Subscribe,
    encode_ack,
    encode_join,
    encode_register,
    encode_subscribe,
)
from flowstone.replication.vclock import VClock
from tests.hostile.liar import LIAR, MARK, SPACE_ID, Role
from tests.hostile.lie import BOTH
from tests.hostile.stage import Stage

STRANGER: Final = UUID("77777777-7777-4777-8777-777777777777")
NOBODY: Final = UUID(int=0)
VCLOCK_OF_33: Final = dict.fromkeys(range(33), 1)
DEEP: Final = b"\x91" * 50_000 + b"\xc0"

Said = bytes | Callable[[Stage], bytes]


@dataclass(frozen=True)
class ReplicaLie:
    """`said` is sent packet by packet, after a login.

    `answer` is a pattern of the returned error, `shown` one of `info()` afterwards; without either, the lie may go
    unnoticed. The connection is closed if it was, or was to become, a subscription.
    """

    name: str
    said: tuple[Said, ...]
    answer: str = ""
    shown: str = ""
    dialects: tuple[str, ...] = BOTH
    closes: bool = True

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


# --- packets --------------------------------------------------------------------------------------------------------


def subscription(role: Role, *, uuid: UUID = LIAR, vclock: VClock | None = None, of: UUID | None = None) -> bytes:
    asked = Subscribe(of or role.replicaset_uuid, uuid, vclock or role.vclock, role.dialect.version_id)
    return encode_subscribe(asked, 7, is_2_6=role.is_2_6)


def subscribe(scene: Stage) -> bytes:
    return subscription(scene.role)


def as_itself(scene: Stage) -> UUID:
    return UUID(scene.victim.info()["uuid"])


def as_the_honest(scene: Stage) -> UUID:
    return UUID(scene.honest.info()["uuid"])


def body(type: RequestType, values: dict[int, Any]) -> bytes:
    return encode_request(type, 7, pack(values))


def ack(vclock: dict[int, int], **other: Any) -> bytes:
    return encode_ack(Ack(VClock(vclock), **other))


def raw_ack(**values: Any) -> bytes:
    return body(RequestType.OK, {Key[name].value: value for name, value in values.items()})


# --- the table ------------------------------------------------------------------------------------------------------


def while_followed(name: str, shown: str, *said: Said, answer: str = r"Invalid MsgPack - packet header") -> ReplicaLie:
    return ReplicaLie(name, (subscribe, *said), answer if shown else "", shown)


UUID_KEY, FILTER_KEY, VCLOCK_KEY = Key.INSTANCE_UUID.value, Key.ID_FILTER.value, Key.VCLOCK.value
SUBSCRIBE, JOIN, REGISTER = RequestType.SUBSCRIBE, RequestType.JOIN, RequestType.REGISTER
AHEAD = r"replica acknowledges row 1000000 of this instance \(replica 1\), but the last row written is \d+$"
BUSY = r"unexpected (SUBSCRIBE|JOIN|INSERT) from subscribed replica: only ACKs are allowed"

ACKS: Final = (
    while_followed("ACK of what is not written", AHEAD, ack({1: 10**6}), answer=""),
    while_followed("ACK going back", "", ack({1: 1})),
    while_followed("ACK for a heartbeat to come", "", ack({1: 1}, vclock_sync=2**40)),
    while_followed("ACK of 33", r"invalid VCLOCK", raw_ack(VCLOCK=VCLOCK_OF_33)),
    while_followed("ACK of text", r"invalid VCLOCK", raw_ack(VCLOCK={MARK: 1})),
    while_followed("ACK of less than nothing", r"invalid VCLOCK", raw_ack(VCLOCK={1: -5})),
    while_followed("ACK of term 2^63", r"invalid term", raw_ack(VCLOCK={1: 3}, TERM=2**63)),
    while_followed(
        "ACK of a gigabyte", r"claims 1073741824 bytes: sizes from 1 to 65536", b"\xce" + struct.pack(">I", 1 << 30)
    ),
    while_followed("ACK of no length", r"begins with byte 0xc1, which is not a length", b"\xc1"),
    while_followed("garbage", r"row header is NoneType, not a map", frame(b"\xc0" * 9)),
    while_followed("deep nesting", r"not a row: StackError", frame(b"\x81\x00\x00\x81\x26" + DEEP)),
    while_followed("SUBSCRIBE twice", BUSY, subscribe, answer=BUSY),
    while_followed("JOIN while it follows", BUSY, encode_join(Join(STRANGER)), answer=BUSY),
    while_followed(
        "rows to a master",
        BUSY,
        body(RequestType.INSERT, {Key.SPACE_ID.value: SPACE_ID, Key.TUPLE.value: (1000, MARK)}),
        answer=BUSY,
    ),
    while_followed("silence", r"timed out", answer=""),
)
REQUESTS: Final = (
    ReplicaLie(
        "stranger", (lambda scene: subscription(scene.role, uuid=STRANGER),), f"{STRANGER}.*(join is done|not reg)"
    ),
    ReplicaLie(
        "of another set", (lambda scene: subscription(scene.role, of=STRANGER),), r"UUID mismatch", dialects=("2.11",)
    ),
    ReplicaLie("in our name", (lambda scene: subscription(scene.role, uuid=as_itself(scene)),), r"Connection to self"),
    ReplicaLie(
        "in the name of the honest",
        (lambda scene: subscription(scene.role, uuid=as_the_honest(scene)),),
        r"duplicate connection with the same replica UUID",
    ),
    ReplicaLie("vclock of 33", (body(SUBSCRIBE, {UUID_KEY: str(LIAR), VCLOCK_KEY: VCLOCK_OF_33}),), r"invalid VCLOCK"),
    ReplicaLie("filter of 99", (body(SUBSCRIBE, {UUID_KEY: str(LIAR), FILTER_KEY: [99]}),), r"invalid ID_FILTER"),
    ReplicaLie("filter of text", (body(SUBSCRIBE, {UUID_KEY: str(LIAR), FILTER_KEY: MARK}),), r"invalid ID_FILTER"),
    ReplicaLie("nobody", (body(SUBSCRIBE, {}),), r"Nil UUID is reserved|0{8}.* is not registered"),
    ReplicaLie("deep vclock", (frame(b"\x82\x00\x42\x01\x07\x81\x26" + DEEP),), r"packet body", closes=False),
    ReplicaLie("joins in our name", (lambda scene: encode_join(Join(as_itself(scene))),), r"to self", closes=False),
    ReplicaLie("joins as nobody", (encode_join(Join(NOBODY)),), r"Nil UUID|Invalid UUID", closes=False),
    ReplicaLie("joins as text", (body(JOIN, {UUID_KEY: MARK}),), r"Invalid MsgPack - .*UUID", closes=False),
    ReplicaLie(
        "registers as the honest",
        (lambda scene: encode_register(Register(as_the_honest(scene), VClock())),),
        r"is not anonymous and cannot register",
        closes=False,
    ),
    ReplicaLie("registers as text", (body(REGISTER, {UUID_KEY: MARK}),), r"Invalid MsgPack - .*UUID", closes=False),
)

LIES: Final = (*ACKS, *REQUESTS)
