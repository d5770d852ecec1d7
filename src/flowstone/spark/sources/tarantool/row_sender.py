"""Send requests to a server in bulk, with a limit on the bytes in flight; errors name a rejected row by its key.

Runs an event loop in its own thread, so the caller can encode the next batch while the current one is being sent.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.engine import keys
from flowstone.client.connection import READ_SIZE, Connection, ConnectionFailed
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.packet import decode_response
from flowstone.iproto.scan import Bytes, Cells
from flowstone.iproto.scan_kernels import skip_value
from flowstone.iproto.uri import Uri
from flowstone.outside import production
from flowstone.outside.loop_thread import LoopThread
from flowstone.outside.network import Stream
from flowstone.spark.sources.tarantool.encode_kernels import scan_replies
from flowstone.spark.sources.tarantool.index_scan import array_of, key_of, tuples_of
from flowstone.spark.sources.tarantool.live_node import connect, explained, select_body
from flowstone.spark.sources.tarantool.tuple_encoder import CannotWrite, Requests

CHUNK_SIZE: Final = 256 * 1024
UNDER_WAY_MAX: Final = 4 * 1024 * 1024
"""Limit on the bytes of unanswered requests."""

ANSWER_SECONDS: Final = 120.0
"""Timeout for an answer. It leaves time for a slow sync or for a quorum."""

REPLIES_MAX: Final = 8192
"""Limit on the responses that are scanned at once."""

FOUND_MAX: Final = 1000
"""Number of rows with an existing key that are compared with the stored rows at once."""

OnConflict = Literal["replace", "insert", "skip"]


class RowSender:
    """Writes rows to `space`. Call `close` at the end, whether or not all rows were sent."""

    def __init__(self, uri: Uri, space: SpaceDefinition, on_conflict: OnConflict) -> None:
        self._uri = uri
        self._space = space
        self._on_conflict = on_conflict
        self._thread = LoopThread("flowstone-writer")
        self._sending: _Sending | None = None
        self.sync = 0

    @property
    def written(self) -> int:
        """Number of rows that the space has as they were sent, including rows it had before."""
        return self._sending.answered - self._sending.skipped if self._sending is not None else 0

    @property
    def skipped(self) -> int:
        """Number of rows skipped because their keys already existed."""
        return self._sending.skipped if self._sending is not None else 0

    def send(self, requests: Requests) -> None:
        """Send requests; return once few enough bytes are in flight. Errors of earlier rows are raised here, too."""
        if self._sending is None:
            self._sending = self._thread.run(self._open())
        self.sync += len(requests)
        self._thread.run(self._sending.send(requests))

    def finish(self) -> None:
        """Wait until all rows are answered."""
        if self._sending is not None:
            self._thread.run(self._sending.finish())

    def close(self) -> None:
        if self._sending is not None:
            with suppress(FlowstoneError):
                self._thread.run(self._sending.close())
        self._thread.close()

    async def _open(self) -> _Sending:
        connection, _ = await connect([self._uri])
        return _Sending(await connection.detach(), self._uri, self._space, self._on_conflict)


@dataclass(slots=True)
class _Chunk:
    requests: Requests
    unanswered: int


class _Sending:
    """One connection. Responses arrive in any order."""

    def __init__(self, stream: Stream, uri: Uri, space: SpaceDefinition, on_conflict: OnConflict) -> None:
        self._stream = stream
        self._uri = uri
        self._space = space
        self._on_conflict = on_conflict
        self._chunks: list[_Chunk] = []
        self._found: list[bytes] = []
        self._failure: FlowstoneError | None = None
        self._moved = asyncio.Event()
        self._size = 0
        self.sent = 0
        self.answered = 0
        self.skipped = 0
        self._syncs: Cells = np.empty(REPLIES_MAX, np.int64)
        self._refused: Cells = np.empty((4, REPLIES_MAX), np.int64)
        assert space.primary_key is not None
        self._of_key = [f"in unique index {quote}{space.primary_key.name}{quote} ".encode() for quote in "'\""]
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, requests: Requests) -> None:
        self._chunks.append(_Chunk(requests, len(requests)))
        self._size += len(requests.packets)
        self.sent += len(requests)
        for start in range(0, len(requests.packets), CHUNK_SIZE):
            self._check()
            self._stream.write(requests.packets[start : start + CHUNK_SIZE].data)
            await self._drain()
        while self._size > UNDER_WAY_MAX:
            await self._wait()
        if len(self._found) >= FOUND_MAX:
            await self._compare()

    async def finish(self) -> None:
        while self.answered < self.sent:
            await self._wait()
        self._check()
        await self._compare()

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._stream.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._stream.drain()
        except (OSError, TimeoutError) as error:
            self._check()
            raise self._lost(str(error) or f"server accepted no data for {ANSWER_SECONDS:g} s") from error

    async def _wait(self) -> None:
        self._check()
        self._moved.clear()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._moved.wait()
        except TimeoutError as error:
            raise self._lost(f"no response for {ANSWER_SECONDS:g} s") from error
        self._check()

    def _lost(self, why: str) -> CannotWrite:
        under_way = self.sent - self.answered
        return CannotWrite(
            f"connection to {self._uri.address} is lost: {why}; {under_way} rows of space {self._space.name!r} "
            "were in progress and may or may not be written",
            hint="write the same rows again; rows that exist already are handled by onConflict",
        )

    # --- answers ---

    async def _read(self) -> None:
        unread = bytearray()
        try:
            while data := await self._stream.read(READ_SIZE):
                unread += data
                self._take(unread)
                self._moved.set()
            self._fail(self._lost("server closed the connection"))
        except OSError as error:
            self._fail(self._lost(error.strerror or str(error)))
        except FlowstoneError as error:
            self._fail(error)
        finally:
            # Wake up all waiters in any case: no more responses are read.
            self._fail(self._lost("reader has stopped"))
            self._moved.set()

    def _fail(self, failure: FlowstoneError) -> None:
        """Record the first failure; ignore later ones."""
        if self._failure is None:
            self._failure = failure

    def _take(self, unread: bytearray) -> None:
        while unread:
            # A bytearray cannot shrink while the array refers to it.
            buf = np.frombuffer(unread, np.uint8)
            end, count, refused, is_broken = scan_replies(buf, self._syncs, self._refused)
            del buf
            for sync, code, start, stop in sorted(self._refused[:, :refused].T.tolist()):
                self._meet(sync, code, bytes(unread[start:stop]))
            del unread[:end]
            self._count(self._syncs[:count])
            if is_broken:
                raise RemoteProtocolError(f"{self._uri.address} sent an invalid response")
            if count < REPLIES_MAX:
                return

    def _count(self, syncs: Cells) -> None:
        """Count responses and release the chunks that are fully answered."""
        self.answered += len(syncs)
        places = np.searchsorted([each.requests.first_sync for each in self._chunks], syncs, side="right") - 1
        for number, count in enumerate(np.bincount(places, minlength=len(self._chunks)).tolist()):
            self._chunks[number].unanswered -= count
            if not self._chunks[number].unanswered:
                self._size -= len(self._chunks[number].requests.packets)
        self._chunks = [each for each in self._chunks if each.unanswered]

    def _meet(self, sync: int, code: int, packet: bytes) -> None:
        """Handle an error response.

        A conflict in another unique index does not mean that the row already exists.
        """
        is_there = code == errors.TupleFound.code and any(each in packet for each in self._of_key)
        if is_there and self._on_conflict == "skip":
            self.skipped += 1
        elif is_there and self._on_conflict == "insert":
            self._found.append(self._tuple(sync))
        elif self._failure is None:
            self._fail(self._refusal(self._tuple(sync), decode_response(packet).error()))

    def _tuple(self, sync: int) -> bytes:
        for chunk in self._chunks:
            row = sync - chunk.requests.first_sync
            if 0 <= row < len(chunk.requests):
                return _tuple_of(chunk.requests.packet(row))
        raise RemoteProtocolError(f"{self._uri.address} sent a response to unknown request {sync}")

    def _refusal(self, raw: bytes, error: TarantoolError) -> CannotWrite:
        return CannotWrite(
            f"row {self._key_text(raw)} of space {self._space.name!r} was rejected by {self._uri.address}: "
            f"{error.message} ({error.name}, {error.code})",
            hint=error.hint,
        )

    def _key_text(self, raw: bytes) -> str:
        key = self._space.primary_key
        if key is None:
            return "without a key"
        values = [unpack(part) for part in key_of(raw, key)]
        return f"with key {', '.join(map(repr, values))}"

    # --- rows that were there already ---

    async def _compare(self) -> None:
        """Raise CannotWrite if a stored row differs from the one to insert.

        An identical row was inserted by an earlier attempt of the same write.
        """
        found, self._found = self._found, []
        key = self._space.primary_key
        if not found or key is None:
            return
        async with await Connection.open(production(), self._uri) as connection:
            try:
                asked = []
                for raw in found:
                    parts = key_of(raw, key)
                    body = select_body(self._space.id, iterator=keys.EQ, limit=1, raw_key=array_of(parts))
                    asked.append(connection.send(RequestType.SELECT, body))
                for raw, future in zip(found, asked, strict=True):
                    response = await connection.answer(future)
                    if response.is_error:
                        raise response.error()
                    if tuples_of(response.body) != [raw]:
                        raise CannotWrite(
                            f"row {self._key_text(raw)} of space {self._space.name!r} cannot be inserted at "
                            f"{self._uri.address}: a row with this key exists",
                            hint="use onConflict=replace to overwrite existing rows, or onConflict=skip to keep them",
                        )
            except (TarantoolError, ConnectionFailed) as error:
                raise explained(error, self._uri, "read from") from error


def _tuple_of(packet: bytes) -> bytes:
    """Return the tuple in one of our requests. It follows the length, the header and the space id."""
    buf: Bytes = np.frombuffer(packet, np.uint8)
    body = skip_value(buf, 5, len(packet))
    at = skip_value(buf, body + 2, len(packet))
    return packet[at + 1 :]
