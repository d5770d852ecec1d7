"""The types of the dashboard's feed, as its JSON has them; `docs/reference/dashboard.md` is the contract.

Values only. It has the sets, members and links of `observation/`, extended by rates and by the tail of the log.
"""

from __future__ import annotations

import json
from typing import Final, Literal

import msgspec

from flowstone.observation.findings.finding import Finding
from flowstone.observation.live_transaction import LiveTransaction
from flowstone.observation.replica_set import Link, Member
from flowstone.observation.report import Report, ReportedQueue, Unreachable, VClock
from flowstone.observation.tail_sink import PendingTransaction


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    id: int
    name: str | None
    label: str
    address: str | None
    mode: str
    is_leader: bool
    vclock: VClock
    unreachable: Unreachable | None
    report: Report | None


class ShownLink(msgspec.Struct, frozen=True, kw_only=True):
    follower: str
    master: str
    status: str
    lag: float | None
    lag_lsn: int | None
    is_behind: bool
    idle: float | None
    message: str | None
    rows_per_second: float | None


class TailState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a tail. `seen` counts transactions; `address` is the member whose log is followed, or was followed
    last."""

    status: str
    address: str | None = msgspec.field(name="from", default=None)
    message: str | None = None
    rows_per_second: float = 0.0
    seen: int = 0


ElectionKind = Literal["leader", "no_leader", "term", "off"]
"""`no_leader`: elections are on and there is no leader; `off`: elections are off, so that no leader is expected."""


class ElectionEvent(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    term: int
    leader: int
    leader_label: str | None
    kind: ElectionKind


class SetState(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str | None
    name: str | None
    label: str
    term: int | None
    leader: int
    vclock: VClock
    queue: ReportedQueue | None
    members: tuple[MemberState, ...]
    links: tuple[ShownLink, ...]
    rows_per_second: dict[str, float]
    waiting: tuple[PendingTransaction, ...]
    tail: TailState
    elections: tuple[ElectionEvent, ...]


class PipelineTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table in a lake of `flowstone mirror`. `age_seconds` is the age of its newest settled change."""

    lake: str
    table: str
    space: str | None = None
    rows: int | None = None
    version: int | None = None
    position: dict[str, VClock] = {}
    settled_at: float | None = None
    age_seconds: float | None = None
    status: str


class FeedState(msgspec.Struct, frozen=True, kw_only=True):
    now: float
    version: str
    sets: tuple[SetState, ...] = ()
    findings: tuple[Finding, ...] = ()
    pipeline: tuple[PipelineTable, ...] = ()


class HistoryLink(msgspec.Struct, frozen=True, kw_only=True):
    follower: str
    master: str
    lag: float | None
    lag_lsn: int | None


class HistoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    links: tuple[HistoryLink, ...]
    rows: dict[str, float]


class LagHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Points are kept as JSON, encoded once: the whole history is requested often, a single point never."""

    points: tuple[msgspec.Raw, ...]


class TransactionBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Transactions that are new or have a new status, and the number of skipped transactions."""

    replicaset_uuid: str = msgspec.field(name="set")
    transactions: tuple[LiveTransaction, ...]
    skipped: int


class TransactionList(msgspec.Struct, frozen=True, kw_only=True):
    transactions: tuple[LiveTransaction, ...]
    kept: int
    seen: int


def to_json(value: object) -> bytes:
    """Encode any of these types as JSON. Servers can send strings that are not UTF-8 and values that JSON lacks."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=str)
        return json.dumps(plain).encode()


_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


def member_state(member: Member) -> MemberState:
    return MemberState(
        uuid=member.uuid,
        id=member.id,
        name=member.name,
        label=member.label,
        address=member.address,
        mode=member.mode,
        is_leader=member.is_leader,
        vclock=member.vclock,
        unreachable=member.unreachable,
        report=member.report,
    )


def link_state(link: Link, rows_per_second: float | None) -> ShownLink:
    return ShownLink(
        follower=link.follower,
        master=link.master,
        status=link.status,
        lag=link.lag,
        lag_lsn=link.lag_lsn,
        is_behind=link.is_behind,
        idle=link.idle,
        message=link.message,
        rows_per_second=rows_per_second,
    )
