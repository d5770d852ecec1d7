"""Lies of a master to a receiver of all its data: a node without data, `follow`, an archive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.iproto.row import Row, encode_header
from flowstone.replication.messages import encode_vclock_reply
from tests.hostile.liar import MARK, SPACE_ID, Talk, error_packet, ok, row, snapshot_row

VICTIM: Final = UUID("88888888-8888-4888-8888-888888888888")
STRANGER: Final = UUID("77777777-7777-4777-8777-777777777777")
SCHEMA: Final = 272

Said = bytes | Callable[[Talk], bytes]


@dataclass(frozen=True)
class JoinLie:
    """A lie: `said` follows the answer to JOIN or FETCH_SNAPSHOT, or replaces it. `reason` is the error of every
    victim.

    `by_who_applies`: only victims that apply rows can notice; an archive stores them unchanged.
    """

    name: str
    said: tuple[Said, ...]
    reason: str
    is_answer: bool = False
    by_who_applies: bool = False
    of_join: bool = False
    """Lies in the parts that only JOIN has: the final stage and the registration."""

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    async def tell(self, talk: Talk, asked: RequestType) -> None:
        if self.is_answer:
            await talk.polite_until(asked)
        else:
            await talk.joining(asked)
        await talk.say(*(said if isinstance(said, bytes) else said(talk) for said in self.said))


def snapshot(talk: Talk) -> bytes:
    return talk.snapshot(VICTIM)


def position(talk: Talk) -> bytes:
    return encode_vclock_reply(talk.role.vclock)


def hang_up(talk: Talk) -> bytes:
    talk.writer.close()
    return b""


def packet(type: RequestType, body: bytes) -> bytes:
    return frame(encode_header(Row(type.value, flags=Flag.COMMIT.value)) + body)


DEEP: Final = b"\x82\x10\xcd\x01\x10\x21\x91" + b"\x91" * 100_000 + b"\xc0"
TOO_LONG: Final = error_packet(7, pack({0x31: MARK * 180_000}))

LIES: Final = (
    JoinLie("yes without a vclock", (ok({}),), r"missing VCLOCK", is_answer=True),
    JoinLie("yes that is no packet", (b"\xc1",), r"begins with byte 0xc1", is_answer=True),
    JoinLie("yes that is PING", (packet(RequestType.PING, b"\x80"),), r"Unknown request type 64", is_answer=True),
    JoinLie("no of a megabyte", (TOO_LONG,), r"… \(900000 characters\)", is_answer=True),
    JoinLie("garbage", (frame(b"\xc0" * 9),), r"sent a packet that is not a row; check that a Tarantool"),
    JoinLie("length of 64 bits", (b"\xcf" + b"\xff" * 8,), r"packet claims 18446744073709551615 bytes"),
    JoinLie("DELETE in a snapshot", (packet(RequestType.DELETE, pack({0x10: SCHEMA, 0x20: (1,)})),), r"request type 5"),
    JoinLie("error in the middle", (snapshot, TOO_LONG), r"… \(900000 characters\)"),
    JoinLie("end in the middle", (snapshot, hang_up), r"closed the connection"),
    JoinLie("deep nesting", (packet(RequestType.INSERT, DEEP),), r"malformed MessagePack: StackError"),
    JoinLie(
        "queue of no LSN", (packet(RequestType.RAFT_PROMOTE, pack({2: 1, 3: -1})),), r"LSN is -1", by_who_applies=True
    ),
    JoinLie(
        "the same again", (snapshot, snapshot), r"Duplicate key.*; check the data of the peer, or", by_who_applies=True
    ),
    JoinLie("no such space", (snapshot_row(SPACE_ID, pack((1, MARK))),), r"'600' does not exist", by_who_applies=True),
    JoinLie(
        "no tuple",
        (packet(RequestType.INSERT, pack({0x10: SCHEMA})),),
        r"not an INSERT of a tuple",
        by_who_applies=True,
    ),
    JoinLie("nothing", (position, position), r"has no replica set UUID; join another", of_join=True),
    JoinLie(
        "not our name",
        (lambda talk: talk.snapshot(STRANGER), position, position),
        r"not registered this instance",
        of_join=True,
    ),
    JoinLie(
        "final row of type 99",
        (snapshot, position, row(5, type=99)),
        r"unsupported type 99",
        of_join=True,
    ),
    JoinLie("final row of nobody", (snapshot, position, row(5, replica_id=0)), r"no member has this id", of_join=True),
    JoinLie("rows behind the end", (snapshot, position, position, row(5)), r"rows.*: the join has ended", of_join=True),
    JoinLie("more behind the end", (snapshot, position, position), r"unexpected OK from .*: the join has ended"),
)
