"""A load generator: a process that writes to a server at a given rate, in batches, until it is stopped.

    python -m tests.web.load URI [--rows-per-second 10000] [--seconds 600]

Creates the space `load` (id, text, n) if it is missing, and replaces its tuples repeatedly, so that the server's memory
does not grow; one row in a hundred is an update and one a delete. Prints a line of JSON when it ends: rows written,
seconds taken.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from flowstone.client.connection import READ_SIZE, Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.limits import PACKET_SIZE_MAX
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response, encode_request, split
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.outside import Stream, production

SPACE = 700
KEYS = 10_000
BATCHES_PER_SECOND = 50
_OPEN_END = 1e9


async def write(uri: Uri, rows_per_second: int, seconds: float) -> tuple[int, float]:
    """The rows written, and the elapsed seconds."""
    connection = await Connection.open(production(), uri)
    await _define(connection)
    stream = await connection.detach()
    try:
        size = max(1, rows_per_second // BATCHES_PER_SECOND)
        batches = _batches(size)
        written, begun = 0, time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            # Catch up after delays: the rate is that of the whole run.
            due = int(passed * rows_per_second) - written
            if due < size:
                await asyncio.sleep((size - due) / rows_per_second)
                continue
            stream.write(batches[written // size % len(batches)])
            await _answered(stream, size)
            written += size
        return written, time.monotonic() - begun
    finally:
        await stream.close()


def _batches(size: int) -> list[bytes]:
    """Return batches of requests, encoded only once, so that the load takes little processor time itself."""
    rows = [encode_request(kind, number + 1, body) for number, (kind, body) in enumerate(map(_request, range(KEYS)))]
    return [b"".join(rows[first : first + size]) for first in range(0, KEYS - size + 1, size)]


async def _answered(stream: Stream, count: int) -> None:
    """Wait for `count` answers without an error."""
    buffer = bytearray()
    while count:
        buffer += await stream.read(READ_SIZE)
        packets, end = split(buffer, size_max=PACKET_SIZE_MAX)
        del buffer[:end]
        for packet in packets:
            response = decode_response(packet)
            if response.is_error:
                raise response.error()
        count -= len(packets)


def _request(number: int) -> tuple[RequestType, bytes]:
    key = number % KEYS
    if number % 100 == 98:
        values: dict[Key, Any] = {Key.KEY: (key - 1,), Key.TUPLE: (("+", 2, 1),), Key.INDEX_BASE: 0, Key.INDEX_ID: 0}
        return RequestType.UPDATE, _body(values)
    if number % 100 == 99:
        return RequestType.DELETE, _body({Key.KEY: (key - 2,), Key.INDEX_ID: 0})
    return RequestType.REPLACE, _body({Key.TUPLE: (key, f"row <b>{number}</b> & more", number)})


def _body(values: dict[Key, Any]) -> bytes:
    return pack({Key.SPACE_ID.value: SPACE} | {key.value: value for key, value in values.items()})


async def _define(connection: Connection) -> None:
    fields = ({"name": "id", "type": "unsigned"}, {"name": "text", "type": "string"}, {"name": "n", "type": "unsigned"})
    rows: dict[int, tuple[Any, ...]] = {
        280: (SPACE, 1, "load", "memtx", 0, {}, fields),
        288: (SPACE, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),)),
    }
    for table, row in rows.items():
        try:
            await connection.request(RequestType.INSERT, pack({Key.SPACE_ID.value: table, Key.TUPLE.value: row}))
        except TarantoolError as error:
            if error.name not in ("ER_TUPLE_FOUND", "ER_SPACE_EXISTS", "ER_INDEX_EXISTS"):
                raise


@contextmanager
def loading(uri: str, rows_per_second: int = 10_000) -> Iterator[subprocess.Popen[str]]:
    """Run a process that writes during the block."""
    command = [sys.executable, "-m", "tests.web.load", uri, "--rows-per-second", str(rows_per_second)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def main(
    uri: str,
    rows_per_second: Annotated[int, typer.Option(min=1)] = 10_000,
    seconds: Annotated[float, typer.Option(min=0)] = _OPEN_END,
) -> None:
    """Write rows."""
    written, taken = asyncio.run(write(parse_uri(uri), rows_per_second, seconds))
    sys.stdout.write(json.dumps({"rows": written, "seconds": round(taken, 3)}) + "\n")


if __name__ == "__main__":
    typer.run(main)
