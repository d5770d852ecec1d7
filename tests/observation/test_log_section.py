"""A part of a running server's log is read without leaving a trace there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowstone.iproto.uri import parse_uri
from flowstone.observation.log_section import LogSection, SectionUnread, read_section
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from tests.interop import ledger
from tests.interop.cluster import Cluster
from tests.interop.member import SECONDS, Member, eventually
from tests.observation.situations import make, write
from tests.real_tarantool import free_port


def _read(uri: str, after: VClock, until: VClock, **limits: Any) -> LogSection:
    return asyncio.run(read_section(production(), parse_uri(uri), after, until, seconds=SECONDS, **limits))


def _prepared(cluster: Cluster, kind: str) -> tuple[Member, VClock]:
    member = make(cluster, kind, "one")
    ledger.define(member)
    before = VClock(member.vclock())
    write(member, range(1, 21))
    return member, before


@pytest.mark.parametrize("kind", ["real", "ours"])
def test_log_section_reads_rows_between_two_positions(cluster: Cluster, kind: str) -> None:
    member, before = _prepared(cluster, kind)
    end = VClock(member.vclock())
    section = _read(member.uri, before, end)
    assert [one.lsn for one in section.transactions] == list(range(before.get(1) + 1, end.get(1) + 1))
    assert section.is_whole
    assert section.schema.space(ledger.LEDGER).name == "ledger"
    assert not _read(member.uri, before, end, transactions_max=3).is_whole
    assert _read(member.uri, end, end).transactions == ()
    eventually("nobody is connected any more", lambda: not member.info()["replication_anon"]["count"])


def test_log_section_reports_missing_rights(cluster: Cluster) -> None:
    member, before = _prepared(cluster, "real")
    member.client.call("box.schema.user.create", "nobody", {"password": "x"})
    with pytest.raises(SectionUnread, match="denied"):
        _read(f"nobody:x@{member.address}", before, VClock(member.vclock()))
    with pytest.raises(Exception, match="refused"):
        _read(f"127.0.0.1:{free_port()}", before, VClock({1: 100}))
