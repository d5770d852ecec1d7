"""`follow` and `archive` in place of recorded anonymous replicas: the same requests, and all sent rows."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

import flowstone
from flowstone.archive.archive import Archive
from flowstone.iproto.constants import Key, RequestType
from tests.conversations import recording, replicas, server
from tests.conversations.recording import Conversation
from tests.conversations.test_master import only_the_subscription

FOLLOWED = [("2.6", ("anon-01",)), ("3.8", ("anon-01", "anon-02"))]
SPACE = 512


def kinds(conversation: Conversation) -> list[str]:
    return [packet.kind for packet in conversation.requests if not server.is_ack(packet)]


def sent_tuples(conversation: Conversation) -> list[list[object]]:
    """Return the rows of one space that the recorded master sent; the space has inserts only."""
    packets = [packet for packet in conversation.answers if packet.type == RequestType.INSERT]
    return [packet.content(Key.TUPLE) for packet in packets if packet.content(Key.SPACE_ID) == SPACE]


@pytest.mark.parametrize(("version", "names"), FOLLOWED, ids=[version for version, _ in FOLLOWED])
async def test_follow_yields_the_rows_of_a_recorded_master(version: str, names: tuple[str, ...]) -> None:
    conversations = [recording.load(version, "03-anon-register", name) for name in names]
    outside = replicas.outside_at(conversations[0])
    async with server.serving(conversations) as upstream:
        uri = f"replicator:secret@127.0.0.1:{upstream.port}"
        async with flowstone.follow(uri, outside=outside) as replica:
            await upstream.finished(*names)
            shown = [list(tuple_) for tuple_ in replica.space(SPACE).select()]
    assert shown == sent_tuples(conversations[0])
    for conversation in conversations:
        assert [packet.kind for packet in upstream.heard[conversation.name].requests] == kinds(conversation)


def apart(conversations: list[Conversation]) -> list[Conversation]:
    """Split one connection into two, each with its watcher: an archive fetches snapshot and rows separately."""
    main, *watchers = conversations
    copying = itertools.takewhile(lambda packet: packet.type != RequestType.SUBSCRIBE, main.packets)
    pairs = [replace(main, name="snapshot", packets=tuple(copying)), replace(only_the_subscription(main), name="rows")]
    return pairs + [replace(watcher, name=f"{watcher.name}-{n}") for watcher in watchers for n in range(2)]


@pytest.mark.parametrize(("version", "names"), FOLLOWED, ids=[version for version, _ in FOLLOWED])
async def test_archive_contains_the_rows_of_a_recorded_master(
    version: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    recorded = [recording.load(version, "03-anon-register", name) for name in names]
    conversations = apart(recorded)
    async with server.serving(conversations) as upstream:
        uri = f"replicator:secret@127.0.0.1:{upstream.port}"
        archive = Archive(uri, tmp_path / "archive", outside=replicas.outside_at(recorded[0]))
        running = asyncio.create_task(archive.run())
        await upstream.finished("snapshot", "rows")
        archive.stop()
        await running
    (snapshot,) = (tmp_path / "archive").glob("*.snap")
    packets = recorded[0].answers
    sent = sorted(packet.payload.removeprefix(b"\x81\x00\x02") for packet in packets if packet.is_snapshot_row)
    assert replicas.snapshot_tuples(snapshot, besides=frozenset()) == sent
    rows = [(packet.type, packet.field(Key.REPLICA_ID), packet.lsn) for packet in packets if packet.lsn]
    assert [row[:3] for row in replicas.logged_rows(tmp_path / "archive")] == rows
    for conversation in conversations:
        assert [packet.kind for packet in upstream.heard[conversation.name].requests] == kinds(conversation)
