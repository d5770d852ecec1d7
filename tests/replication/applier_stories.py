"""Conversations of an applier as text, for transcripts.

A line `> hears …` is a message of the upstream: `greeting 2.6.0`, `features 0 1 3`, `ballot {1: 10}`, `ok`,
`error 42 text`, `vclock {1: 5}`, `subscribed 1 {1: 5}`, `marker JOIN_META`, `raft term 3`, `promote term 2`,
`snapshot 3` (so many rows), `row 1:7`, `rows 1:7..9` (one transaction), `heartbeat 1`, `heartbeat 1 sync 4`,
`bytes c1c1`. Other lines are commands: `connects`, `goes on`, `logs in as name`, `knows the ballot`, `joins`,
`fetches`, `registers at {1: 5}`, `subscribes at {1: 5}`, `acknowledges {1: 7} term 1`, `is at {1: 7} with lag 0.5`.
"""

from __future__ import annotations

import re
from uuid import UUID

import msgpack

from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import error_of
from flowstone.iproto.greeting import Greeting, encode_greeting, version_id
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response, frame, split
from flowstone.iproto.replies import encode_error
from flowstone.iproto.row import Row, decode_row, encode_header
from flowstone.replication import messages
from flowstone.replication.applier.protocol import (
    ApplierProtocol,
    BallotIsEvent,
    Entered,
    Event,
    FinalBegun,
    FinalRows,
    Greeted,
    HeartbeatHeard,
    JoinEnded,
    MetaRow,
    RaftHeard,
    Rows,
    SnapshotBegun,
    SnapshotRows,
    Subscribed,
)
from flowstone.replication.applier.states import ApplierState, reaction
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.messages import Ballot, FetchSnapshot, Heartbeat, Join, Register, Subscribe, SubscribeReply
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import make_transaction

US = UUID("11111111-0000-4000-8000-000000000001")
THEM = UUID("22222222-0000-4000-8000-000000000002")
SET = UUID("aaaaaaaa-0000-4000-8000-00000000000a")
OTHER_SET = UUID("bbbbbbbb-0000-4000-8000-00000000000b")
NAMES = {US: "us", THEM: "them", SET: "our set", OTHER_SET: "another set"}


class Story:
    """One applier; `tell` passes it a line, and returns its reaction."""

    def __init__(self) -> None:
        self.protocol = ApplierProtocol("upstream", instance_uuid=US)
        self._version = (0, 0, 0)

    def tell(self, line: str) -> list[str]:
        try:
            if line.startswith("hears "):
                self.protocol.receive(self._said(line.removeprefix("hears ")))
            else:
                self._command(line)
            return [*self._sent(), *self._events()]
        except FlowstoneError as error:
            states = (reaction(error, is_2_6=is_2_6).value for is_2_6 in (True, False))
            text = str(error)
            for uuid, name in NAMES.items():
                text = text.replace(str(uuid), name)
            return [*self._sent(), f"fails: {text}", "then {} in 2.6, {} later".format(*states)]

    def _events(self) -> list[str]:
        told: list[str] = []
        while (event := self.protocol.next_event()) is not None:
            told.append(_told(event))
            told += self._sent()
        return told + self._sent()

    def _sent(self) -> list[str]:
        packets, _ = split(self.protocol.data_to_send())
        return [f"sends {_named(packet)}" for packet in packets]

    def _command(self, line: str) -> None:
        protocol = self.protocol
        vclock = VClock.parse(found[0]) if (found := re.search(r"\{.*?\}", line)) else VClock()
        version = version_id(2, 11, 9) if self._version >= (2, 10, 0) else version_id(2, 6, 0)
        match line.split()[0]:
            case "connects":
                pass
            case "goes":
                protocol.go_on()
            case "logs":
                protocol.log_in(line.split()[-1], "secret")
            case "knows":
                protocol.ballot_known(Ballot())
            case "joins":
                protocol.join(Join(US, version))
            case "fetches":
                protocol.fetch_snapshot(FetchSnapshot(version, US))
            case "registers":
                protocol.register(Register(US, vclock))
            case "subscribes":
                protocol.subscribe(Subscribe(SET, US, vclock, version, "anonymously" in line, (2,)))
            case "acknowledges":
                protocol.acknowledge(vclock, int(line.split()[-1]))
            case "is":
                before = protocol.state
                protocol.synchronize(vclock, float(line.split()[-1]), 10.0)
                if protocol.state is not before:
                    protocol._events.append(Entered(protocol.state))
            case _:
                raise AssertionError(line)

    def _said(self, line: str) -> bytes:
        what, _, rest = line.partition(" ")
        vclock = VClock.parse(found[0]) if (found := re.search(r"\{.*?\}", rest)) else VClock()
        numbers = [int(number) for number in re.findall(r"\d+", re.sub(r"\{.*?\}", "", rest))]
        match what:
            case "greeting":
                self._version = (numbers[0], numbers[1], numbers[2])
                uuid = US if "ourselves" in rest else UUID(int=0) if "without UUID" in rest else THEM
                return encode_greeting(Greeting(self._version, uuid, b"s" * 32))
            case "features":
                return _packet(RequestType.OK, {Key.VERSION.value: 6, Key.FEATURES.value: numbers})
            case "ballot":
                is_2_6 = self._version < (2, 6, 1)
                body = messages.encode_ballot_body(Ballot(vclock), is_2_6=is_2_6)
                return frame(encode_header(Row(0)) + body)
            case "ok":
                return _packet(RequestType.OK, {})
            case "error":
                return encode_error(0, 0, error_of(numbers[0], rest.partition(" ")[2]))
            case "vclock":
                return messages.encode_vclock_reply(vclock)
            case "subscribed":
                theirs = OTHER_SET if "another" in rest else None if "silent" in rest else SET
                return messages.encode_subscribe_reply(SubscribeReply(numbers[0], vclock, theirs))
            case "marker":
                return messages.encode_marker(RequestType[rest])
            case "raft":
                return _packet(RequestType.RAFT, {0: numbers[0]})
            case "promote":
                return raw_packet(RequestType.RAFT_PROMOTE, Promote(0, 0, numbers[0], VClock()).encode())
            case "snapshot":
                row = Row(RequestType.INSERT, body=pack({0x10: 512, 0x21: (1,)}))
                return numbers[0] * messages.encode_row_packet(row)
            case "row" | "rows":
                return transaction(*numbers)
            case "heartbeat":
                sync = numbers[1] if len(numbers) > 1 else 0
                return messages.encode_heartbeat(Heartbeat(numbers[0], 1.5e9, sync))
            case "bytes":
                return bytes.fromhex(rest)
        raise AssertionError(line)


def _packet(kind: RequestType, body: dict[int, object]) -> bytes:
    return raw_packet(kind, pack(body))


def raw_packet(kind: RequestType, body: bytes) -> bytes:
    return frame(encode_header(Row(kind.value)) + body)


def transaction(replica_id: int, first: int, last: int = 0) -> bytes:
    rows = [
        Row(RequestType.REPLACE, replica_id, 0, lsn, 1.5e9 + lsn, body=pack({0x10: 512, 0x21: (lsn,)}))
        for lsn in range(first, (last or first) + 1)
    ]
    return b"".join(messages.encode_row_packet(row) for row in make_transaction(rows).rows)


def _named(packet: bytes) -> str:
    """Return a packet as text: its type, and unambiguous values of its body."""
    response = decode_response(packet)
    kind = RequestType(response.type).name if response.type else "ACK"
    body = msgpack.unpackb(response.body, strict_map_key=False, raw=True) if response.body else None
    if body is None:
        return f"{kind} without a body"
    said = []
    for key, value in body.items():
        if key in (Key.TUPLE, Key.FEATURES):
            continue
        shown = value.decode() if isinstance(value, bytes) else value
        if key in (Key.INSTANCE_UUID, Key.REPLICASET_UUID):
            shown = NAMES[UUID(shown)]
        if key == Key.SERVER_VERSION:
            shown = ".".join(str(value >> shift & 255) for shift in (16, 8, 0))
        said.append(f"{Key(key).name} {shown}")
    timestamp = messages.decode_ack(decode_row(packet)).timestamp if kind == "ACK" else 0.0
    return ", ".join((kind, *said, *([f"TIMESTAMP +{timestamp - 1.5e9:g}"] if timestamp else [])))


def _told(event: Event) -> str:
    match event:
        case Entered(state):
            return f"is {state.value}"
        case Greeted(greeting):
            return f"meets Tarantool {greeting.version_text}"
        case BallotIsEvent():
            return "wants to watch the ballot elsewhere"
        case SnapshotBegun(vclock):
            return f"gets a snapshot of {vclock}"
        case MetaRow(row):
            return f"gets {RequestType(row.type).name} about it"
        case SnapshotRows(slab):
            return f"gets {len(slab)} rows of the snapshot"
        case FinalBegun(vclock):
            return f"gets the log up to {vclock}"
        case FinalRows(slab):
            return f"gets rows {_lsns(slab.rows())} of the log"
        case JoinEnded(vclock):
            return f"has it all, at {vclock}"
        case Subscribed(reply):
            return f"follows instance {reply.replica_id}, which is at {reply.vclock}"
        case Rows(slab, timestamp):
            return f"gets rows {_lsns(slab.rows())}, of +{timestamp - 1.5e9:g}"
        case HeartbeatHeard():
            return "gets a heartbeat"
        case RaftHeard():
            return "gets RAFT"
    raise AssertionError(event)


def _lsns(rows: object) -> str:
    return " ".join(f"{row.replica_id}:{row.lsn}" for row in rows)  # type: ignore[attr-defined]


def replay(text: str) -> str:
    """Return the transcript with the applier's current reaction under every line that starts with `> `."""
    lines: list[str] = []
    story = Story()
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line == "> connects":
            story = Story()
        if line.startswith("> "):
            lines += [f"  {answer}" for answer in story.tell(line[2:])]
    assert story.protocol.state in ApplierState
    return "\n".join(lines) + "\n"
