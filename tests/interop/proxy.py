"""A TCP proxy that cuts, holds, delays, throttles or closes connections between members.

Each connection has two threads, one per direction. No byte is lost silently: bytes are relayed in order, possibly late,
or the connection ends.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from enum import Enum
from threading import Event, Lock, Thread

from tests.interop.member import Member

RECEIVE_SIZE = 1 << 16
PATIENCE_SECONDS = 0.02
"""How soon a waiter notices that a throttled direction is fast again."""


class Way(Enum):
    """A direction: from the client to the target, or back."""

    THERE = "there"
    BACK = "back"


class Proxy:
    """Relays everything until a fault is set."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_cut = False
        self._is_closed = Event()
        self._is_open = {way: Event() for way in Way}
        self.release()
        self._delay = 0.0
        self._rate: float | None = None
        self._bytes_left: int | None = None
        self._passed = 0
        self._troubled = 0
        Thread(target=self._accept, daemon=True).start()

    @property
    def uri(self) -> str:
        return Member.uri_at(self.port)

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        with self._lock:
            return len(self._pairs)

    @property
    def passed(self) -> int:
        """Return the number of bytes relayed from the target to the client."""
        return self._passed

    @property
    def troubled(self) -> int:
        """Return the number of closed or rejected connections, and of held, delayed or throttled pieces."""
        return self._troubled

    def disconnect(self) -> None:
        """Close all connections; new ones are accepted."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self._troubled += len(pairs)
        for pair in pairs:
            for one in pair:
                _end(one)

    def cut(self) -> None:
        """Close all connections and accept no new ones until `mend`."""
        self._is_cut = True
        self.disconnect()

    def mend(self) -> None:
        self._bytes_left = None
        self._is_cut = False

    def hold(self, *ways: Way) -> None:
        """Act as a black hole: connections stay open, new ones are accepted, but nothing passes until `release`.

        With `ways`, only in these directions.
        """
        for way in ways or Way:
            self._is_open[way].clear()

    def release(self) -> None:
        for is_open in self._is_open.values():
            is_open.set()

    def delay(self, seconds: float) -> None:
        """Relay every piece this much later."""
        self._delay = seconds

    def clog(self, rate: float | None) -> None:
        """Limit the bytes per second of each connection and direction; None: no limit."""
        self._rate = rate

    def heal(self) -> None:
        """Remove all faults."""
        self.delay(0.0)
        self.clog(None)
        self.mend()
        self.release()

    def cut_after(self, count: int) -> None:
        """Cut the connections after this number of further bytes from the target."""
        self._bytes_left = count

    def close(self) -> None:
        self._is_closed.set()
        self.release()
        _end(self._listener)
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                self._troubled += 1
                _end(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port), timeout=10)
            except OSError:
                _end(client)
                continue
            server.settimeout(None)
            with self._lock:
                is_welcome = not self._is_cut  # otherwise the connection came too late for `cut` to close it
                if is_welcome:
                    self._pairs.append((client, server))
            if not is_welcome:
                self._troubled += 1
                for one in (client, server):
                    _end(one)
                continue
            Thread(target=self._pass, args=(client, server, Way.THERE), daemon=True).start()
            Thread(target=self._pass, args=(server, client, Way.BACK), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        with suppress(OSError):
            while data := source.recv(RECEIVE_SIZE):
                self._wait(way, len(data))
                if way is Way.BACK:
                    data = self._count(data)
                sink.sendall(data)
                if way is Way.BACK and self._bytes_left == 0:
                    self.cut()
        for one in (source, sink):
            _end(one)
        with self._lock:
            self._pairs = [pair for pair in self._pairs if source not in pair]

    def _wait(self, way: Way, size: int) -> None:
        """Wait until a received piece may be relayed."""
        if self._is_open[way].is_set() and not self._delay and self._rate is None:
            return
        self._troubled += 1
        self._is_open[way].wait()
        if self._delay:
            self._is_closed.wait(self._delay)
        began = time.monotonic()
        while (rate := self._rate) is not None and time.monotonic() < began + size / rate:
            if self._is_closed.wait(PATIENCE_SECONDS):
                return

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
