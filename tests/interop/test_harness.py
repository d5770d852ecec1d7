"""The harness itself: the servers of a test, and the faults of a proxy."""

from __future__ import annotations

import socket
import time
from threading import Thread

import pytest

from tests.interop.member import eventually
from tests.interop.proxy import Proxy, Way
from tests.interop.versions import is_fit


@pytest.mark.parametrize(
    ("specification", "fitting"),
    [("2.6", [(2, 6, 0)]), (">=2.11", [(2, 11, 9), (3, 8, 0)]), ("<2.11", [(2, 6, 0), (2, 10, 1)])],
)
def test_specification_selects_its_versions(specification: str, fitting: list[tuple[int, int, int]]) -> None:
    versions = [(2, 6, 0), (2, 10, 1), (2, 11, 9), (3, 8, 0)]
    assert [version for version in versions if is_fit(version, specification)] == fitting


@pytest.fixture
def echo_port() -> int:
    """Run a server that echoes its input."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            Thread(target=_echo, args=(connection,), daemon=True).start()

    Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def _echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(100):
            connection.sendall(data)


def test_proxy_relays_holds_and_cuts(echo_port: int) -> None:
    proxy = Proxy(echo_port)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as one:
        one.sendall(b"hello")
        assert one.recv(10) == b"hello"
        proxy.hold()
        one.sendall(b"held")
        one.settimeout(0.05)
        with pytest.raises(TimeoutError):
            one.recv(10)
        one.settimeout(10)
        proxy.release()
        assert one.recv(10) == b"held"
        proxy.cut_after(3)
        one.sendall(b"abcdef")
        assert one.recv(10) == b"abc"
        assert one.recv(10) == b""
    eventually("no connection is left", lambda: proxy.connections == 0)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as two:
        assert two.recv(10) == b""
    proxy.mend()
    proxy.close()


def test_proxy_can_block_one_direction(echo_port: int) -> None:
    proxy = Proxy(echo_port)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as one:
        eventually("it is connected", lambda: proxy.connections)
        proxy.hold(Way.BACK)
        one.sendall(b"answer me")
        eventually("the answer is held back, the question was not", lambda: proxy.troubled == 1)
        proxy.heal()
        assert one.recv(10) == b"answer me"
    proxy.close()


def test_throttled_proxy_relays_bytes_at_its_rate(echo_port: int) -> None:
    proxy = Proxy(echo_port)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as one:
        proxy.clog(100)
        began = time.monotonic()
        one.sendall(b"x" * 10)
        assert one.recv(10) == b"x" * 10
        assert time.monotonic() - began >= 0.2
        proxy.clog(0.001)
        one.sendall(b"stuck")
        eventually("it is slowed down", lambda: proxy.troubled == 3)
        proxy.heal()
        assert one.recv(10) == b"stuck"
    proxy.close()
