"""A master lies to receivers without data: each reports the reason, and stores nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal
from uuid import UUID

import pytest

import flowstone
from flowstone.archive.archive import Archive
from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.replication.vclock import VClock
from tests.hostile.join_lies import LIES, VICTIM, JoinLie
from tests.hostile.liar import Liar, Role, Talk, snapshot_row

SECRET: Final = "never-to-be-said"
DIALECTS: Final = {"2.6": Dialect.V2_6, "2.11": Dialect.V2_11}
REPLICASET: Final = UUID("55555555-5555-4555-8555-555555555555")
TIMEOUT: Final = 1.25
"""`replication_timeout`: a liar is not silent, and must not seem so on a busy machine."""

SECONDS: Final = 60
CONNECT_SECONDS: Final = 10
"""Retry interval of a rejected node without data."""

JOIN, FETCH = RequestType.JOIN, RequestType.FETCH_SNAPSHOT

dialects = pytest.mark.parametrize("dialect", DIALECTS)


def lies(*, fetches: bool = False, applies: bool = True) -> pytest.MarkDecorator:
    """Return the lies that reach a victim and that it can detect."""
    told = [
        lie
        for lie in LIES
        if (applies or not lie.by_who_applies) and not (lie.of_join if fetches else "more behind" in lie.name)
    ]
    return pytest.mark.parametrize("lie", told, ids=str)


@asynccontextmanager
async def lying(lie: JoinLie, dialect: str, asked: RequestType) -> AsyncIterator[str]:
    """Yield the URI of the liar."""
    async with Liar(Role(DIALECTS[dialect], REPLICASET, VClock({1: 1})), partial(lie.tell, asked=asked)) as liar:
        yield f"spy:{SECRET}@{liar.address}"


def new_node(directory: Path, dialect: Literal["2.6", "2.11"], uri: str) -> flowstone.Node:
    return flowstone.Node(
        directory,
        instance_uuid=str(VICTIM),
        dialect=dialect,
        replication=[uri],
        replication_timeout=TIMEOUT,
        replication_connect_timeout=CONNECT_SECONDS,
    )


def assert_nothing_left(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert [path.name for path in directory.rglob("*.snap*")] == []
    assert [path.name for path in directory.rglob("*.xlog*")] == []
    assert SECRET not in caplog.text
    assert "Traceback" not in caplog.text


@dialects
@lies()
async def test_node_without_data_rejects_a_forged_join(
    lie: JoinLie, dialect: Literal["2.6", "2.11"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowstone")
    async with lying(lie, dialect, JOIN) as uri:
        with pytest.raises(FlowstoneError, match=lie.reason):
            await new_node(tmp_path, dialect, uri).start()
    assert_nothing_left(tmp_path, caplog)


@dialects
@lies(fetches=True)
async def test_follow_rejects_a_forged_join(
    lie: JoinLie, dialect: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with lying(lie, dialect, FETCH) as uri:
        with pytest.raises(FlowstoneError, match=lie.reason) as caught:
            async with flowstone.follow(uri, replication_timeout=TIMEOUT):
                pass
        assert str(caught.value).startswith(f"cannot follow {uri.rpartition('@')[2]}: ")
    assert_nothing_left(tmp_path, caplog)


@dialects
@lies(fetches=True, applies=False)
async def test_archive_rejects_a_forged_join(
    lie: JoinLie, dialect: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with lying(lie, dialect, FETCH) as uri:
        with pytest.raises(FlowstoneError, match=lie.reason):
            await Archive(uri, tmp_path / "archive", replication_timeout=TIMEOUT).run(once=True)
    assert_nothing_left(tmp_path, caplog)


ENOUGH_ROWS: Final = 200


async def endless_snapshot(talk: Talk, asked: RequestType, is_long: asyncio.Event) -> None:
    """Send rows of new spaces endlessly."""
    await talk.joining(asked)
    await talk.say(talk.snapshot(VICTIM))
    for number in range(512, 2**31):
        await talk.say(snapshot_row(280, pack((number, 1, f"s{number}", "memtx", 0, {}, ()))))
        if number == 512 + ENOUGH_ROWS:
            is_long.set()
        await asyncio.sleep(0)


@pytest.mark.parametrize("asked", [JOIN, FETCH], ids=["node", "follow"])
async def test_receiver_of_an_endless_snapshot_can_be_stopped_and_leaves_no_files(
    asked: RequestType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    role = Role(Dialect.V2_11, REPLICASET, VClock({1: 1}))
    is_long = asyncio.Event()
    async with Liar(role, partial(endless_snapshot, asked=asked, is_long=is_long)) as liar:
        uri = f"spy:{SECRET}@{liar.address}"
        victim = new_node(tmp_path, "2.11", uri).start() if asked is JOIN else flowstone.follow(uri).__aenter__()
        began = asyncio.ensure_future(victim)
        async with asyncio.timeout(SECONDS):
            await is_long.wait()
        assert not began.done()
        began.cancel()
        async with asyncio.timeout(SECONDS):
            with suppress(asyncio.CancelledError):
                await began
    assert_nothing_left(tmp_path, caplog)
