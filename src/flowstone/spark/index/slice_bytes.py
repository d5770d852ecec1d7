"""Transports of slice bytes to executors: from the file, inside the partition, or over TCP from the reader.

`file`: executors open the path, so they must see the spool under the same name. `inline`: the compressed blocks are
part of the partition; works on every cluster, up to the size that Spark sends with a task. `tcp`: the reader serves a
slice to clients that present its token; it listens on loopback unless it is given an address that executors reach.
`auto`: inline for a small batch, else tcp.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, NoReturn, Self

from flowstone.errors import FlowstoneError
from flowstone.outside import production
from flowstone.outside.disk import Disk
from flowstone.spark.index.log_index import Slice
from flowstone.spark.sources.options import LOOPBACK
from flowstone.xlog.meta import HEADER_READ_SIZE, parse
from flowstone.xlog.reader import LogFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

Transport = Literal["auto", "file", "inline", "tcp"]

INLINE_SLICE_MAX: Final = 8 * 1024 * 1024
"""Limit on the bytes in one partition: far below `spark.rpc.message.maxSize`, which defaults to 128 MB."""

INLINE_BATCH_MAX: Final = 32 * 1024 * 1024
"""Limit on the inline bytes of a batch with `auto`: the driver holds them while the batch runs."""

CLIENTS_MAX: Final = 16
"""Limit on the clients served at once; further clients wait."""

SILENCE_SECONDS: Final = 60.0
_TOKEN_SIZE: Final = 16
_LENGTH: Final = struct.Struct(">Q")
_REFUSED: Final = (1 << 64) - 1


class NoBytes(FlowstoneError):
    """The bytes of a slice are not available."""


def open_slice(disk: Disk, part: Slice) -> LogFile:
    """Open the log of a slice, wherever its bytes come from. Only the slice itself can be read."""
    if part.data is not None:
        return _log_of(part, part.data)
    if part.remote is not None:
        return _log_of(part, _fetch(part, *part.remote))
    return LogFile.open(disk, part.path)


def with_transport(slices: Sequence[Slice], transport: Transport, server: SliceServer | None = None) -> list[Slice]:
    """Prepare slices for executors. `server` is for tcp, and for batches that are too large for `auto` to inline."""
    if transport == "auto":
        size = sum(part.end - part.offset for part in slices)
        transport = "inline" if size <= INLINE_BATCH_MAX or server is None else "tcp"
    if transport == "file":
        return list(slices)
    if transport == "inline":
        disk = production().disk
        return [replace(part, data=bytes_of(disk, part)) for part in slices]
    if server is None:
        raise FlowstoneError("transport=tcp needs a listening reader", hint="use transport=file or transport=inline")
    return [replace(part, remote=server.offer(part)) for part in slices]


def bytes_of(disk: Disk, part: Slice) -> bytes:
    """Return the length of the file header, the header, and the blocks of the slice."""
    with disk.open(part.path) as file:
        head = file.read_at(0, HEADER_READ_SIZE)
        _, length = parse(head, part.path)
        blocks = file.read_at(part.offset, part.end - part.offset)
    if len(blocks) < part.end - part.offset:
        raise NoBytes(f"{part.path}: file ends before byte {part.end}")
    return _LENGTH.pack(length) + head[:length] + blocks


class SliceServer:
    """Serves slices to clients that present their tokens. Runs from its construction until `close`."""

    def __init__(self, host: str = LOOPBACK) -> None:
        self._offered: dict[bytes, tuple[int, Slice]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._seats = threading.Semaphore(CLIENTS_MAX)
        try:
            self._server = _Server((host, 0), _handler(self))
        except OSError as error:
            raise NoBytes(
                f"cannot listen on {host} for executors: {error.strerror or error}",
                hint="set transportAddress (mirror: --transport-address) to an address of this machine that executors "
                "can reach",
            ) from error
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="flowstone-slices", daemon=True)
        self._thread.start()

    def offer(self, part: Slice) -> tuple[str, int, bytes]:
        """Return the host, port and token for a slice. A token works repeatedly, because Spark may retry a task."""
        token = secrets.token_bytes(_TOKEN_SIZE)
        with self._lock:
            self._offered[token] = self._number, part
        return (*self.address, token)

    def next_batch(self) -> None:
        """Drop the slices offered before the previous call: a batch is complete when the next one is planned."""
        with self._lock:
            self._number += 1
            self._offered = {key: each for key, each in self._offered.items() if each[0] >= self._number - 1}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def serve(self, client: socket.socket) -> None:
        """Handle one request: receive a token, send the bytes of its slice."""
        with self._seats:
            client.settimeout(SILENCE_SECONDS)
            token = _receive(client, _TOKEN_SIZE)
            with self._lock:
                _, part = self._offered.get(token, (0, None))
            if part is None:
                client.sendall(_LENGTH.pack(_REFUSED))
                return
            data = bytes_of(production().disk, part)
            client.sendall(_LENGTH.pack(len(data)))
            client.sendall(data)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: clients may disconnect, or may not be executors at all."""


def _handler(server: SliceServer) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            server.serve(self.request)

    return Handler


def _fetch(part: Slice, host: str, port: int, token: bytes) -> bytes:
    try:
        with socket.create_connection((host, port), SILENCE_SECONDS) as client:
            client.sendall(token)
            (length,) = _LENGTH.unpack(_receive(client, _LENGTH.size))
            if length == _REFUSED:
                raise NoBytes(
                    f"reader at {host}:{port} no longer has this slice of {part.path}",
                    hint="the batch was committed, or the query was restarted",
                )
            return _receive(client, length)
    except OSError as error:
        raise NoBytes(
            f"cannot fetch a slice of {part.path} from reader at {host}:{port}: {error.strerror or error}",
            hint="set transportAddress (mirror: --transport-address) to an address of the driver that executors can "
            "reach, or use transport=inline",
        ) from error


def _receive(client: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = client.recv_into(view[at:])
        if not count:
            raise ConnectionResetError(f"connection closed after {at} of {size} bytes")
        at += count
    return bytes(data)


def _log_of(part: Slice, data: bytes) -> LogFile:
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    meta, _ = parse(data[_LENGTH.size : end], part.path)
    return LogFile(part.path, _Blocks(part, memoryview(data)[end:]), meta, length)


class _Blocks:
    """A read-only file of which only one slice is available."""

    def __init__(self, part: Slice, blocks: memoryview) -> None:
        self.path = part.path
        self._offset = part.offset
        self._end = part.end
        self._blocks = blocks

    def size(self) -> int:
        """Return more than the end of the slice: the size of the file is unknown, and readers stop at the slice end."""
        return self._end + 1

    def read_at(self, offset: int, size: int) -> bytes:
        at = offset - self._offset
        if at < 0:
            raise NoBytes(f"{self.path}: byte {offset} is outside of the slice that starts at {self._offset}")
        return bytes(self._blocks[at : at + size])

    def close(self) -> None:
        """Do nothing: no file is open."""

    def append(self, *parts: Buffer) -> None:
        self._refuse()

    def truncate(self, size: int) -> None:
        self._refuse()

    def sync(self) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NoBytes(f"{self.path}: slices are read-only")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
