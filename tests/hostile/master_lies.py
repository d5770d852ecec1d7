"""Lies of a master to a node that follows it, or is about to follow it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final
from uuid import UUID

from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.iproto.row import Row, encode_header
from flowstone.replication.limbo.control_rows import Confirm, Promote, Rollback
from flowstone.replication.messages import Heartbeat, encode_heartbeat
from tests.hostile.liar import (
    LIAR_ID,
    MARK,
    SPACE_ID,
    SYNCHRONOUS_ID,
    Talk,
    error_packet,
    ok,
    row,
    tuple_body,
)
from tests.hostile.lie import Lie, after_subscribe

LATER: Final = ("2.11",)
OLD: Final = ("2.6",)
VICTIM_ID: Final = 1
VCLOCK_OF_33: Final = dict.fromkeys(range(33), 1)
OTHER: Final = UUID("77777777-7777-4777-8777-777777777777")
ABOUT = "failed at row 5 of replica 3"

INSERT, REPLACE, UPDATE, DELETE = (RequestType[name].value for name in ("INSERT", "REPLACE", "UPDATE", "DELETE"))
CONFIRM, ROLLBACK = RequestType.RAFT_CONFIRM.value, RequestType.RAFT_ROLLBACK.value
PROMOTE, RAFT = RequestType.RAFT_PROMOTE.value, RequestType.RAFT.value
SCHEMA, SPACE, INDEX, CLUSTER = 272, 280, 288, 320

Step = Callable[[Talk], Awaitable[None]]


def change(type: int, space_id: int, **parts: Any) -> bytes:
    """Return row 5 of the liar, with these parts of a body."""
    body = {Key.SPACE_ID.value: space_id} | {Key[name].value: value for name, value in parts.items()}
    return row(5, type=type, body=pack(body))


def raft(**told: Any) -> bytes:
    """Send an election state between two transactions."""
    keys = {"term": 0, "vote": 1, "state": 2, "vclock": 3}
    header = Row(RAFT, replica_id=LIAR_ID, flags=Flag.COMMIT.value)
    return frame(encode_header(header) + pack({keys[name]: value for name, value in told.items()}))


def heartbeat(number: int) -> bytes:
    return encode_heartbeat(Heartbeat(LIAR_ID, 1.5, number))


def verdict(type: int, body: Confirm | Rollback | Promote, lsn: int = 5) -> bytes:
    return row(lsn, type=type, body=body.encode())


def promote(owner_id: int, lsn: int, term: int) -> bytes:
    return verdict(PROMOTE, Promote(owner_id, lsn, term))


def synchronous(lsn: int) -> bytes:
    flags = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
    return row(lsn, body=tuple_body(lsn, space_id=SYNCHRONOUS_ID), flags=flags)


# --- before the subscription ------------------------------------------------------------------------------------------


def greeted(*answers: bytes | Callable[[Talk], bytes], until: RequestType = RequestType.VOTE) -> Step:
    """Return a lie that is valid up to a request, which gets these answers."""

    async def tell(talk: Talk) -> None:
        await talk.polite_until(until)
        await talk.say(*(answer if isinstance(answer, bytes) else answer(talk) for answer in answers))

    return tell


async def accept_and_say_nothing(talk: Talk) -> None:
    await talk.be_left()


async def greet_without_end(talk: Talk) -> None:
    while True:
        await talk.say(b"Tarantool 2.11.9 (Binary) " * 1000)


async def greet_and_leave(talk: Talk) -> None:
    await talk.say(talk.greeting()[:100])
    talk.writer.close()


async def greet_without_a_name(talk: Talk) -> None:
    await talk.say(talk.greeting(uuid=UUID(int=0)))


async def greet_as_an_ancient(talk: Talk) -> None:
    await talk.say(talk.greeting(version=(1, 6, 9)))


async def fall_silent(talk: Talk) -> None:
    await talk.polite_until(RequestType.SUBSCRIBE)
    await talk.be_left()


async def dribble(talk: Talk) -> None:
    """A slow-loris: the answer to SUBSCRIBE one byte at a time, and then a packet that never ends."""
    await talk.polite_until(RequestType.SUBSCRIBE)
    for byte in talk.subscription() + b"\xc1":
        await talk.say(bytes((byte,)))
        await asyncio.sleep(0.001)


EARLY: Final = (
    Lie("accepts and says nothing", accept_and_say_nothing, r"sent nothing for 0\.8 s.*transport=ssl", is_known=False),
    Lie("greets without end", greet_without_end, r"not a Tarantool server; check host and port", is_known=False),
    Lie("leaves in its greeting", greet_and_leave, r"closed the connection", is_known=False),
    Lie("has no name", greet_without_a_name, r"Nil UUID.*not configured yet", is_known=False),
    Lie("is too old", greet_as_an_ancient, r"runs Tarantool 1\.6\.9, which is too old.*upgrade it", is_known=False),
    Lie(
        "ballot of a gigabyte",
        greeted(b"\xce" + struct.pack(">I", 1 << 30)),
        r"packet claims 1073741824 bytes",
        is_known=False,
    ),
    Lie(
        "ballot that is none",
        greeted(ok({Key.BALLOT.value: {2: MARK}})),
        r"Invalid MsgPack - packet body",
        is_known=False,
    ),
    Lie(
        "ballot of 33 members",
        greeted(ok({Key.BALLOT.value: {2: VCLOCK_OF_33}})),
        r"Invalid MsgPack - packet body",
        is_known=False,
    ),
    Lie("refuses the login", greeted(error_packet(47, pack({0x31: "no"})), until=RequestType.AUTH), r"no"),
    Lie("falls silent", fall_silent, r"sent nothing for 0\.8 s"),
    Lie("dribbles", dribble, r"begins with byte 0xc1"),
    Lie("answers without a vclock", greeted(ok({}), until=RequestType.SUBSCRIBE), r"missing VCLOCK"),
    Lie("vclock of 33", greeted(ok({0x26: VCLOCK_OF_33}), until=RequestType.SUBSCRIBE), r"invalid VCLOCK"),
    Lie("vclock of text", greeted(ok({0x26: {MARK: 1}}), until=RequestType.SUBSCRIBE), r"invalid VCLOCK"),
    Lie("is of another set", after_subscribe(replicaset_uuid=OTHER), f"UUID mismatch.*{OTHER}.*correct the URI"),
    Lie(
        "is us",
        after_subscribe(replica_id=VICTIM_ID),
        r"claims replica id 1, which is the id of this instance.*_cluster",
    ),
    Lie("is nobody", after_subscribe(replica_id=40), r"claims invalid replica id 40"),
)

# --- bytes that are not rows -----------------------------------------------------------------------------------------

WIDE_HEADER = b"\x8f" + b"".join(bytes((0x20 + key,)) + b"\xd9\xff" + b"x" * 255 for key in range(15)) + b"\x80"
DEEP = b"\x82\x10" + pack(SPACE_ID) + b"\x21\x92\x05" + b"\x91" * 100_000 + b"\xc0"
STACK = {0: [{0: "ClientError", 1: "file", 2: 1, 3: MARK, 4: 0, 5: 7}] * 5000}

BYTES: Final = (
    Lie("garbage", after_subscribe(frame(b"\xc0" * 20)), r"sent a packet that is not a row; check that"),
    Lie("no length", after_subscribe(b"\xc1abc"), r"invalid packet: packet begins with byte 0xc1"),
    Lie("length of 4 gigabytes", after_subscribe(b"\xce\xff\xff\xff\xff"), r"packet claims 4294967295 bytes"),
    Lie("length of 64 bits", after_subscribe(b"\xcf" + b"\xff" * 8), r"packet claims 18446744073709551615 bytes"),
    Lie("length of nothing", after_subscribe(b"\x00"), r"packet claims 0 bytes: sizes from 1 to"),
    Lie("header without end", after_subscribe(frame(WIDE_HEADER)), r"sent a packet that is not a row"),
    Lie("header of 4 G keys", after_subscribe(frame(b"\xdf\xff\xff\xff\xff\x01\x01")), r"a packet that is not a row"),
    Lie("deep nesting", after_subscribe(row(5, body=DEEP)), f"malformed MessagePack.*{ABOUT}"),
    Lie("error of a megabyte", after_subscribe(error_packet(7, pack({0x31: MARK * 180_000}))), r"… \(900000 char"),
    Lie("error with a long stack", after_subscribe(error_packet(7, pack({0x31: "no", 0x52: STACK}))), r"^no; the"),
    Lie("error about nothing", after_subscribe(error_packet(7, b"\x80")), r"an error without a message"),
    Lie("packet cut off", after_subscribe(row(5)[:-3]), r"sent nothing for 0\.8 s"),
)

# --- rows that no instance has written
# -----------------------------------------------------------------------------------

ROWS: Final = (
    Lie("row of nobody", after_subscribe(row(5, replica_id=0)), r"invalid row 5 of replica 0: no member has this id"),
    *(
        Lie(
            f"row of replica {number}",
            after_subscribe(row(5, replica_id=number)),
            f"replica {number}: invalid replica id",
        )
        for number in (32, 99, 2**31, 2**40)
    ),
    Lie("row of our own", after_subscribe(row(10**6, replica_id=1)), r"row 1000000 of replica 1, which is this inst"),
    Lie("known row of our own", after_subscribe(row(2, replica_id=VICTIM_ID))),
    Lie("row without LSN", after_subscribe(row(0))),
    Lie("LSN beyond numbers", after_subscribe(row(2**63)), r"sent a packet that is not a row"),
    Lie(
        "going back in a transaction",
        after_subscribe(row(5, is_last=False), row(4, tsn=5)),
        r"row 4 of replica 3: out of order after row 5",
    ),
    Lie("twice in a transaction", after_subscribe(row(5, is_last=False), row(5)), r"row 5.*order after row 5 of the"),
    Lie(
        "going back behind another's row",
        after_subscribe(row(5, is_last=False), row(9, tsn=5, replica_id=2, is_last=False), row(4, tsn=5)),
        r"row 4 of replica 3: out of order after row 5",
    ),
    Lie("no first row", after_subscribe(row(5, tsn=3, is_last=False), row(6, tsn=3)), r"Transaction id must be equal"),
    Lie("end of another", after_subscribe(row(5, is_last=False), row(7)), r"row 7.*interleaving transactions"),
    Lie(
        "interleaved",
        after_subscribe(row(5, is_last=False), row(6, is_last=False), row(7, tsn=5)),
        r"row 6 of replica 3: replication does not support interleaving",
    ),
    Lie("no end", after_subscribe(row(5, is_last=False)), r"sent nothing for 0\.8 s"),
    Lie("heartbeat in a transaction", after_subscribe(row(5, is_last=False), heartbeat(1)), r"interleaving transact"),
    Lie("local row", after_subscribe(row(5, group_id=1)), r"row 5 of replica 3: local rows are not replicated"),
    *(
        Lie(f"row of type {type}", after_subscribe(row(5, type=type)), r"row 5 of replica 3: unsupported type \w+")
        for type in (1, 7, RequestType.JOIN.value, RequestType.SUBSCRIBE.value, RAFT, 99, 0x7FFF)
    ),
    Lie("no body", after_subscribe(row(5, body=b"")), r"row 5 of replica 3: REPLACE without a space"),
    Lie("no tuple", after_subscribe(row(5, body=pack({0x10: SPACE_ID}))), r"REPLACE without a tuple"),
    Lie("no key", after_subscribe(change(DELETE, SPACE_ID)), r"DELETE without a key"),
    Lie("no operations", after_subscribe(change(UPDATE, SPACE_ID, KEY=(1,))), r"UPDATE without operations"),
)

# --- rows that contradict the data ----------------------------------------------------------------------------------

DEFINITION: tuple[Any, ...] = (700, 1, MARK, "memtx", 0, {}, ({"name": 1},))

DATA: Final = (
    Lie("no such space", after_subscribe(change(REPLACE, 7777, TUPLE=(5, MARK))), f"'7777' does not exist.*{ABOUT}"),
    Lie("key of another type", after_subscribe(change(REPLACE, SPACE_ID, TUPLE=("x", MARK))), f"unsigned.*{ABOUT}"),
    Lie("drops _space", after_subscribe(change(DELETE, SPACE, KEY=(SPACE,))), r"Can't drop space '_space': the space"),
    Lie("drops _cluster", after_subscribe(change(DELETE, SPACE, KEY=(CLUSTER,))), r"Can't drop space '_cluster'"),
    Lie(
        "drops a key of _cluster", after_subscribe(change(DELETE, INDEX, KEY=(CLUSTER, 0))), r"primary key in a system"
    ),
    Lie("drops what has indexes", after_subscribe(change(DELETE, SPACE, KEY=(SPACE_ID,))), r"the space has indexes"),
    Lie("member 40", after_subscribe(change(INSERT, CLUSTER, TUPLE=(40, str(OTHER)))), r"count limit reached: 40"),
    Lie("member 0", after_subscribe(change(INSERT, CLUSTER, TUPLE=(0, str(OTHER)))), r"reserved value 0"),
    Lie("member without UUID", after_subscribe(change(INSERT, CLUSTER, TUPLE=(9, MARK))), f"Invalid UUID.*{ABOUT}"),
    Lie(
        "member renamed", after_subscribe(change(REPLACE, CLUSTER, TUPLE=(2, str(OTHER)))), r"updates of instance uuid"
    ),
    Lie("set renamed", after_subscribe(change(REPLACE, SCHEMA, TUPLE=("cluster", str(OTHER)))), r"Can't reset replica"),
    Lie("field without a name", after_subscribe(change(INSERT, SPACE, TUPLE=DEFINITION)), f"has no name.*{ABOUT}"),
    Lie(
        "index without sense",
        after_subscribe(change(INSERT, INDEX, TUPLE=(SPACE_ID, 1, MARK, "tree", {"unique": 7}, ((0,),)))),
        r"option unique of the index is 7",
    ),
)

# --- terms, verdicts, heartbeats ------------------------------------------------------------------------------------

CONTROL: Final = (
    Lie("heartbeat going back", after_subscribe(heartbeat(9), heartbeat(3)), r"Non-monotonic vclock sync.*9, new: 3"),
    Lie("heartbeat of text", after_subscribe(ok({Key.VCLOCK_SYNC.value: MARK})), r"invalid vclock sync"),
    *(
        Lie(f"RAFT of term {term}", after_subscribe(raft(term=term)), f"TERM is {term}, not a number", LATER)
        for term in (2**63, 2**64 - 1)
    ),
    Lie("RAFT without a term", after_subscribe(raft(state=1)), r"body of RAFT: TERM is missing", LATER),
    Lie("RAFT of state 7", after_subscribe(raft(term=3, state=7)), r"invalid state 7, not 1 \(follower\)", LATER),
    Lie(
        "RAFT with an invalid state", after_subscribe(raft(term=3)), r"invalid RAFT row from 3: term 3, state 0", LATER
    ),
    Lie("RAFT with a vote for 99", after_subscribe(raft(term=3, state=1, vote=99)), r"RAFT row from 3.*vote 99", LATER),
    Lie("RAFT of 33", after_subscribe(raft(term=3, state=1, vclock=VCLOCK_OF_33)), r"32 is not a replica id", LATER),
    Lie("RAFT to 2.6", after_subscribe(raft(term=2**63)), dialects=OLD),
    Lie("CONFIRM for the future", after_subscribe(verdict(CONFIRM, Confirm(3, 6))), r"CONFIRM up to lsn 6, which"),
    Lie("ROLLBACK for the future", after_subscribe(verdict(ROLLBACK, Rollback(3, 6))), r"ROLLBACK up to lsn 6, which"),
    Lie("CONFIRM of no LSN", after_subscribe(row(5, type=CONFIRM, body=pack({2: 3}))), r"LSN is missing"),
    Lie(
        "CONFIRM beyond numbers", after_subscribe(row(5, type=CONFIRM, body=pack({2: 3, 3: 2**63}))), r"LSN is 9223372"
    ),
    Lie(
        "verdict in a transaction",
        after_subscribe(row(5, is_last=False), row(6, tsn=5, type=CONFIRM, body=Confirm(LIAR_ID, 5).encode())),
        r"row 6 of replica 3: CONFIRM inside a transaction",
    ),
    Lie("synchronous row without an owner", after_subscribe(synchronous(5)), r"queue doesn't belong to any", LATER),
    Lie("PROMOTE of no term", after_subscribe(promote(0, 0, 0)), r"with a zero term", LATER),
    Lie("PROMOTE beyond", after_subscribe(row(5, type=PROMOTE, body=pack({2: 0, 3: 0, 83: 2**63}))), r"TERM is 9223"),
    Lie("PROMOTE to 2.6", after_subscribe(promote(VICTIM_ID, 0, 2)), r"2\.6 does not support PROMOTE", OLD),
)


def to_a_leader(name: str, reason: str, *packets: bytes, ends_tenure: bool = False) -> Lie:
    tell = after_subscribe(*packets)
    return Lie(name, tell, reason, LATER, victim_leads=True, ends_tenure=ends_tenure)


SPLIT = "Split-Brain discovered: "
NEW_TERM: Final = 2**40
"""A term unknown to the victim: each such lie raises it."""

TO_A_LEADER: Final = (
    to_a_leader("row behind our back", f"{SPLIT}got an async transaction from an old term", row(5)),
    to_a_leader("CONFIRM for another queue", f"{SPLIT}.*foreign synchro queue owner", verdict(CONFIRM, Confirm(9, 3))),
    to_a_leader("PROMOTE of our own term", f"{SPLIT}.*with an obsolete term", promote(VICTIM_ID, 0, 2)),
    to_a_leader("PROMOTE over another", f"{SPLIT}.*foreign synchro", promote(2, 0, NEW_TERM), ends_tenure=True),
    to_a_leader(
        "PROMOTE up to what is to come", f"{SPLIT}.*future lsn", promote(1, 10**6, 2 * NEW_TERM), ends_tenure=True
    ),
)

LIES: Final = (*EARLY, *BYTES, *ROWS, *DATA, *CONTROL, *TO_A_LEADER)
