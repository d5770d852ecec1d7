"""The schema of a server by name, as a client reads it."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flowstone.box.schema import UnknownSpace
from flowstone.client.connection import Connection
from flowstone.client.known_schema import read_schema
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key
from flowstone.iproto.errors import NoSuchIndexId
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import split
from flowstone.iproto.replies import encode_data
from flowstone.iproto.row import Row, decode_row
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from tests.node.fake_server import Reply, answering, greeting, peer
from tests.node.upstream_server import Upstream


async def test_spaces_and_indexes_are_found_by_name(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream", dialect="2.11")
    await upstream.start()
    try:
        async with await Connection.open(production(), parse_uri(upstream.uri)) as connection:
            schema = await read_schema(connection, timeout=10)
            fruit = schema.space("fruit")
            assert fruit is schema.space("fruit")
            assert (fruit.id, fruit.names) == (upstream.fruit.id, ("id", "name"))
            assert schema.space(fruit.id).index("by_name").parts[0].field == 1
            assert not fruit.index(1).unique
            with pytest.raises(NoSuchIndexId, match="#7"):
                fruit.index(7)
            with pytest.raises(UnknownSpace):
                schema.space("fruits")
            before = schema.version
            await upstream.fruit.drop_index("by_name")
            assert (await read_schema(connection, timeout=10)).version > before
    finally:
        await upstream.stop()


def serving(spaces: Any, indexes: Any) -> Any:
    """Return a server with these rows in `_vspace` and `_vindex`."""

    def answer(row: Row) -> Reply:
        rows = spaces if b"\xcd\x01\x19" in row.body else indexes
        return 0, pack({Key.DATA.value: rows})

    return answering(answer, (2, 6, 0))


async def test_definition_that_cannot_be_read_makes_only_its_space_unusable() -> None:
    spaces: list[Any] = [(512, 1, "odd", "memtx", 0, {}, 5), (513, 1, "fine", "memtx", 0, {}, [])]
    indexes: list[Any] = [(513, 0, "pk", "tree", {"unique": True}, [(0, "unsigned")])]
    async with (
        peer(serving(spaces, indexes)) as uri,
        await Connection.open(production(), parse_uri(uri)) as connection,
    ):
        schema = await read_schema(connection, timeout=10)
        assert schema.space("fine").index(0).name == "pk"
        with pytest.raises(UnknownSpace, match="format is 5"):
            schema.space(512)


async def test_rows_that_are_no_arrays_are_an_error() -> None:
    async with (
        peer(serving([1], [])) as uri,
        await Connection.open(production(), parse_uri(uri)) as connection,
    ):
        with pytest.raises(FlowstoneError, match="not arrays"):
            await read_schema(connection, timeout=10)


async def test_schema_that_never_stays_the_same_is_an_error() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting())
        versions, buffer = count(1), b""
        while data := await reader.read(65536):
            packets, end = split(buffer + data)
            buffer = (buffer + data)[end:]
            for packet in packets:
                writer.write(encode_data(decode_row(packet).sync, next(versions), []))

    async with peer(talk) as uri, await Connection.open(production(), parse_uri(uri)) as connection:
        with pytest.raises(FlowstoneError, match="changed 10 times while it was read"):
            await read_schema(connection, timeout=10)
