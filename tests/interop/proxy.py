"""A TCP proxy that cuts, holds back, delays or ends connections between members.

Each connection through it has two threads, one per direction. Nothing is lost silently: bytes are passed on in
order, later, or the connection ends.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Event, Lock, Thread

from tests.interop.member import Member

RECEIVE_SIZE = 1 << 16


class Proxy:
    """Passes everything on until it is told otherwise."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_cut = False
        self._is_closed = Event()
        self._is_open = Event()
        self._is_open.set()
        self._delay = 0.0
        self._bytes_left: int | None = None
        self._passed = 0
        Thread(target=self._accept, daemon=True).start()

    @property
    def uri(self) -> str:
        return Member.uri_at(self.port)

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._pairs)

    @property
    def passed(self) -> int:
        """Bytes that went from the target to whoever connected."""
        return self._passed

    def disconnect(self) -> None:
        """Ends all connections; new ones are welcome."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for one in pair:
                _end(one)

    def cut(self) -> None:
        """Ends all connections and takes no new ones until `mend`."""
        self._is_cut = True
        self.disconnect()

    def mend(self) -> None:
        self._bytes_left = None
        self._is_cut = False

    def hold(self) -> None:
        """A black hole: connections stay open, new ones are taken, and nothing comes through until `release`."""
        self._is_open.clear()

    def release(self) -> None:
        self._is_open.set()

    def delay(self, seconds: float) -> None:
        """Every piece is passed on so much later."""
        self._delay = seconds

    def cut_after(self, count: int) -> None:
        """`cut`, when so many more bytes of the target have been passed on."""
        self._bytes_left = count

    def close(self) -> None:
        self._is_closed.set()
        self._is_open.set()
        _end(self._listener)
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                _end(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port), timeout=10)
            except OSError:
                _end(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._pairs.append((client, server))
            Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_from_target: bool) -> None:
        with suppress(OSError):
            while data := source.recv(RECEIVE_SIZE):
                self._is_open.wait()
                if self._delay:
                    self._is_closed.wait(self._delay)
                if is_from_target:
                    data = self._count(data)
                sink.sendall(data)
                if is_from_target and self._bytes_left == 0:
                    self.cut()
        for one in (source, sink):
            _end(one)
        with self._lock:
            self._pairs = [pair for pair in self._pairs if source not in pair]

    def _count(self, data: bytes) -> bytes:
        with self._lock:
            if self._bytes_left is not None:
                data = data[: self._bytes_left]
                self._bytes_left -= len(data)
            self._passed += len(data)
        return data


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
