"""A replica lies to its master: it gets an error and is disconnected, and no other client is affected."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

import pytest

from flowstone.iproto import auth
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import GREETING_SIZE, decode_greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response, decode_response, encode_request, split
from tests.hostile.replica_lies import LIES, ReplicaLie, subscribe
from tests.hostile.stage import PASSWORD, USER, Stage, Stages, until

CASES = [pytest.param(lie, dialect, id=f"{lie}-{dialect}") for lie in LIES for dialect in lie.dialects]
HANG_UP_SECONDS = 60


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    made = Stages(tmp_path_factory.mktemp("lying_replica"))
    yield made
    made.close()


class LyingReplica:
    """An authenticated connection; keeps the answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard: list[Response] = []
        self.is_closed = False
        self.writer = writer
        self._reader = reader
        self._unread = b""

    @classmethod
    async def open(cls, scene: Stage) -> Self:
        host, _, port = (scene.victim.address or "").partition(":")
        opened = cls(*await asyncio.open_connection(host, int(port)))
        greeting = decode_greeting(await opened._reader.readexactly(GREETING_SIZE))
        proof = (auth.METHOD, auth.scramble(PASSWORD, greeting.salt))
        opened.writer.write(
            encode_request(RequestType.AUTH, 1, pack({Key.USER_NAME.value: USER, Key.TUPLE.value: proof}))
        )
        await opened.hear()
        assert not opened.heard.pop().is_error
        return opened

    async def hear(self) -> None:
        """Wait for another answer, or the end of the connection."""
        count = len(self.heard)
        while len(self.heard) == count and not self.is_closed:
            data = b""
            with suppress(ConnectionError):
                data = await self._reader.read(1 << 16)
            self.is_closed = not data
            packets, end = split(self._unread + data)
            self._unread = (self._unread + data)[end:]
            self.heard += map(decode_response, packets)

    async def hear_all(self) -> None:
        while not self.is_closed:
            await self.hear()

    @property
    def errors(self) -> list[str]:
        return [response.error().message for response in self.heard if response.is_error]


@pytest.mark.parametrize(("lie", "dialect"), CASES)
def test_forged_request_of_a_replica_is_rejected_without_affecting_others(
    lie: ReplicaLie, dialect: str, stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowstone")
    stages.run(lie_to_a_master(lie, dialect, stages))
    assert PASSWORD not in caplog.text
    assert "Traceback" not in caplog.text


async def lie_to_a_master(lie: ReplicaLie, dialect: str, stages: Stages) -> None:
    scene = await stages.get(dialect)
    await until(lambda: scene.downstream.get("status") != "follow")  # left over from the previous lie
    before = scene.picture()
    replica = await LyingReplica.open(scene)
    try:
        for said in lie.said:
            replica.writer.write(said if isinstance(said, bytes) else said(scene))
            if said is subscribe:
                await until(lambda: scene.downstream.get("status") == "follow")
        await be_answered(lie, replica)
        if lie.shown:
            await until(lambda: re.search(lie.shown, scene.downstream.get("message", "")))
        assert scene.picture() == before
        await scene.assert_serves()
        scene.assert_nothing_kept()
    finally:
        replica.writer.transport.abort()


async def be_answered(lie: ReplicaLie, replica: LyingReplica) -> None:
    async with asyncio.timeout(HANG_UP_SECONDS):
        if not lie.answer and not lie.shown:
            await replica.hear()
            assert not replica.errors
        elif lie.closes:
            await replica.hear_all()
        else:
            while not replica.errors:
                await replica.hear()
    assert bool(replica.errors) is bool(lie.answer)
    assert all(re.search(lie.answer, message) for message in replica.errors)
