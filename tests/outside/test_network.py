"""Byte streams against real ends on this machine, over TCP, a Unix socket and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from flowstone.outside.network import QUEUE_MAX, Client, Listener, SocketOptions, Stream, SystemNetwork, Tls, TlsRefused


async def shout_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each chunk in upper case, and closes when its peer stops sending or says "bye"."""
    while (data := await reader.read(1 << 16)) and data != b"bye":
        writer.write(data.upper())
    writer.close()
    await writer.wait_closed()


@asynccontextmanager
async def tcp_server() -> AsyncIterator[int]:
    async with await asyncio.start_server(shout_back, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_tcp_round_trip() -> None:
    async with tcp_server() as port:
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        stream.write(b"ping")
        await stream.drain()
        assert await stream.read(2) == b"PI"
        assert await stream.read(100) == b"NG"
        await stream.close()


async def test_bytes_are_delivered_without_a_read() -> None:
    arrived = bytearray()
    changed = asyncio.Event()

    def receive(data: bytes) -> None:
        arrived.extend(data)
        changed.set()

    async with tcp_server() as port:
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        stream.write(b"ping")
        assert await stream.read(100) == b"PING"
        ended = asyncio.Event()
        assert stream.deliver(receive, ended.set)
        stream.write(b"pong")
        await stream.drain()
        async with asyncio.timeout(10):
            while arrived != b"PONG":
                changed.clear()
                await changed.wait()
            stream.write(b"bye")
            await ended.wait()
        assert not stream.deliver(receive, ended.set)
        await stream.close()


async def test_unix_socket_round_trip(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(shout_back, path):
        stream = await SystemNetwork().connect(path, None, timeout=10)
        stream.write(memoryview(b"ping"))
        assert await stream.read(100) == b"PING"
        await stream.close()


async def test_nodelay_and_keepalive_are_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    open_connection = asyncio.open_connection

    async def remember(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_connection(host, port)
        opened.append(writer.get_extra_info("socket"))
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", remember)
    async with tcp_server() as port:
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        assert opened[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert opened[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        await stream.close()


async def test_socket_options_are_set_as_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    open_connection = asyncio.open_connection

    async def remember(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_connection(host, port)
        opened.append(writer.get_extra_info("socket"))
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", remember)
    options = SocketOptions(no_delay=False, send_buffer=40_000, receive_buffer=50_000)
    async with tcp_server() as port:
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10, options=options)
        assert opened[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0
        # Linux doubles the requested size, for its own bookkeeping.
        assert 40_000 <= opened[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 80_000
        assert 50_000 <= opened[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 100_000
        await stream.close()


async def test_read_from_a_closed_peer_returns_no_bytes() -> None:
    async with tcp_server() as port:
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        stream.write(b"bye")
        assert await stream.read(100) == b""
        await stream.close()
        await stream.close()


async def _write_for_ever(stream: Stream) -> None:
    async with asyncio.timeout(10):
        while True:
            stream.write(b"more")
            await stream.drain()
            await asyncio.sleep(0)


def test_drain_fails_on_a_lost_connection_and_write_does_not() -> None:
    async def write_on() -> None:
        async with tcp_server() as port:
            stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
            stream.write(b"bye")
            assert await stream.read(100) == b""
            with pytest.raises(ConnectionError):
                await _write_for_ever(stream)
            stream.write(b"still more")
            await stream.close()

    asyncio.run(write_on())
    uvloop.run(write_on())


async def test_refused_connection_is_an_os_error() -> None:
    async with tcp_server() as port:
        pass
    with pytest.raises(ConnectionRefusedError):
        await SystemNetwork().connect("127.0.0.1", port, timeout=10)


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example", "a\0b", "\ud800"])
async def test_invalid_host_is_an_os_error(host: str) -> None:
    with pytest.raises(OSError, match="invalid host name"):
        await SystemNetwork().connect(host, 3301, timeout=10)


async def test_a_missing_unix_socket_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await SystemNetwork().connect(str(tmp_path / "missing"), None, timeout=10)


async def test_connection_timeout_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(host: str, port: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    with pytest.raises(TimeoutError, match=r"connection to db1:3301 timed out after 0\.01 s"):
        await SystemNetwork().connect("db1", 3301, timeout=0.01)


class Recorder:
    """The recorded server side of one connection; answers in upper case."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.events: list[str] = []

    def received(self, data: bytes) -> None:
        self.events.append(data.decode())
        self.client.write(data.upper())

    def congested(self) -> None:
        self.events.append("congested")

    def drained(self) -> None:
        self.events.append("drained")

    def closed(self) -> None:
        self.events.append("closed")


class Listening:
    def __init__(self) -> None:
        self.accepted: list[Recorder] = []
        self.listener: Listener

    def __call__(self, client: Client) -> Recorder:
        self.accepted.append(Recorder(client))
        return self.accepted[-1]


@asynccontextmanager
async def listening(
    host: str = "127.0.0.1", port: int | None = 0, tls: Tls | None = None
) -> AsyncIterator[tuple[Listening, int | None]]:
    server = Listening()
    server.listener = await SystemNetwork().listen(host, port, server, tls=tls)
    try:
        yield server, server.listener.port
    finally:
        await server.listener.close()
        for recorder in server.accepted:
            recorder.client.abort()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  any state of the two ends is waited for
            await asyncio.sleep(0.001)


async def test_listener_passes_on_clients_and_their_bytes() -> None:
    async with listening() as (server, port):
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        stream.write(b"ping")
        assert await stream.read(100) == b"PING"
        (recorder,) = server.accepted
        assert recorder.events == ["ping"]
        assert recorder.client.peer.startswith("127.0.0.1:")
        await stream.close()
        await until(lambda: recorder.events == ["ping", "closed"])
        recorder.client.write(b"nobody hears this")


async def test_listener_accepts_connections_on_a_unix_socket(tmp_path: Path) -> None:
    async with listening(str(tmp_path / "s"), None) as (server, port):
        assert port is None
        stream = await SystemNetwork().connect(str(tmp_path / "s"), None, timeout=10)
        stream.write(b"ping")
        assert await stream.read(100) == b"PING"
        assert server.accepted[0].client.peer == "unix/:"
        await stream.close()


async def test_an_accepted_client_is_answered_without_delay() -> None:
    async with listening() as (server, port):
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        await until(lambda: server.accepted)
        transport = server.accepted[0].client._transport  # type: ignore[attr-defined]
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        await stream.close()


async def test_client_that_reads_nothing_is_congested_until_it_reads() -> None:
    async with listening() as (server, port):
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        await until(lambda: server.accepted)
        recorder = server.accepted[0]
        size = QUEUE_MAX * 16
        recorder.client.write(bytes(size))
        assert recorder.events == ["congested"]
        assert recorder.client.queued > QUEUE_MAX
        while size:
            size -= len(await stream.read(1 << 20))
        await until(lambda: recorder.events == ["congested", "drained"])
        await stream.close()


async def test_bytes_of_a_paused_client_are_received_when_reading_resumes() -> None:
    async with listening() as (server, port):
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        await until(lambda: server.accepted)
        recorder = server.accepted[0]
        recorder.client.pause_reading()
        recorder.client.pause_reading()
        stream.write(b"ping")
        await stream.drain()
        recorder.client.resume_reading()
        assert await stream.read(100) == b"PING"
        await stream.close()


async def test_close_sends_queued_bytes_and_abort_does_not() -> None:
    async with listening() as (server, port):
        first = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        second = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        await until(lambda: len(server.accepted) == 2)
        for recorder in server.accepted:
            recorder.client.write(b"bye")
            recorder.client.close()
        assert await first.read(100) == b"bye"
        assert await first.read(100) == b""
        assert await second.read(100) == b"bye"
        await first.close()
        await second.close()


async def test_port_in_use_is_an_os_error() -> None:
    async with listening() as (_, port):
        with pytest.raises(OSError, match="address already in use"):
            await SystemNetwork().listen("127.0.0.1", port, Listening())


async def test_closed_listener_accepts_no_connection() -> None:
    async with listening() as (server, port):
        await server.listener.close()
        with pytest.raises(ConnectionRefusedError):
            await SystemNetwork().connect("127.0.0.1", port, timeout=10)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Return a self-signed certificate, which is its own CA, and its encrypted key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = str(directory / "cert.pem"), str(directory / "key.pem")
    command = (
        f"openssl req -x509 -newkey rsa:2048 -days 2 -subj /CN=test -passout pass:secret -keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return Tls(cert_file=cert, key_file=key, password="secret")


async def test_tls_round_trip(certificate: Tls) -> None:
    async with listening(tls=certificate) as (_, port):
        for tls in (Tls(), Tls(ca_file=certificate.cert_file)):
            stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10, tls=tls)
            stream.write(b"ping")
            assert await stream.read(100) == b"PING"
            await stream.close()


async def test_listener_with_a_ca_accepts_only_signed_clients(certificate: Tls) -> None:
    strict = Tls(certificate.cert_file, certificate.key_file, certificate.cert_file, None, certificate.password)
    async with listening(tls=strict) as (server, port):
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10, tls=strict)
        stream.write(b"ping")
        assert await stream.read(100) == b"PING"
        await stream.close()
        stranger = await SystemNetwork().connect("127.0.0.1", port, timeout=10, tls=Tls())
        with contextlib.suppress(ssl.SSLError):  # depending on timing, the alert arrives before the end or not
            assert await stranger.read(1) == b""
        await stranger.close()
        assert all("closed" in recorder.events for recorder in server.accepted)


async def refused(tls: Tls) -> str:
    with pytest.raises(TlsRefused) as caught:
        await SystemNetwork().listen("127.0.0.1", 0, Listening(), tls=tls)
    assert not isinstance(caught.value, OSError)
    return str(caught.value)


async def test_wrong_key_password_is_reported_and_never_shown(certificate: Tls) -> None:
    cert, key = certificate.cert_file, certificate.key_file
    wrong = Tls(cert, key, password="hidden-word")
    assert "hidden-word" not in repr(wrong)
    said = await refused(wrong)
    assert said.startswith(f"ssl_key_file {key} cannot be decrypted with the given password; ")
    assert "hidden-word" not in said
    assert (await refused(Tls(cert, key))).startswith(f"ssl_key_file {key} is encrypted and needs a password")


async def test_error_names_an_unusable_tls_file(certificate: Tls, tmp_path: Path) -> None:
    cert, key, missing, empty = certificate.cert_file, certificate.key_file, tmp_path / "missing", tmp_path / "empty"
    empty.write_bytes(b"")
    text = await refused(Tls(str(missing), key))
    assert text.startswith(f"cannot read ssl_cert_file {missing}: No such file or directory")
    assert (await refused(Tls(str(empty), key))).startswith(f"ssl_cert_file {empty} contains no certificate")
    assert (await refused(Tls(cert, cert))).startswith(f"ssl_key_file {cert} contains no private key")
    assert (await refused(Tls(cert))).startswith(f"ssl_key_file {cert} contains no private key")
    assert (await refused(Tls(ca_file=key))).startswith(f"ssl_ca_file {key} contains no certificate")
    assert (await refused(Tls(ciphers="nonsense"))).startswith("ssl_ciphers 'nonsense': No cipher")
    with pytest.raises(TlsRefused, match="ssl_ca_file"):
        await SystemNetwork().connect("127.0.0.1", 1, timeout=1, tls=Tls(ca_file=str(missing)))


@pytest.fixture
def stranger_key(tmp_path: Path) -> str:
    """Return an unencrypted key that belongs to no certificate."""
    path = str(tmp_path / "key.pem")
    subprocess.run(["openssl", "genrsa", "-out", path, "2048"], check=True, capture_output=True)
    return path


async def test_error_names_the_file_with_a_malformed_pem_block(tmp_path: Path, stranger_key: str) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    assert (await refused(Tls(ca_file=str(broken)))).startswith(f"ssl_ca_file {broken}: ")
    text = await refused(Tls(str(broken), stranger_key))
    assert text.startswith(f"ssl_cert_file {broken} with ssl_key_file {stranger_key}: ")


async def test_mismatched_key_and_certificate_are_reported(certificate: Tls, stranger_key: str) -> None:
    text = await refused(Tls(certificate.cert_file, stranger_key))
    assert text.startswith(f"ssl_key_file {stranger_key} does not match ssl_cert_file {certificate.cert_file}")


async def test_unix_socket_file_is_removed_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with listening(str(path), None):
        assert path.is_socket()
    assert not path.exists()


async def test_listener_keeps_the_socket_file_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with listening(str(path), None) as (_, _):
        successor = await SystemNetwork().listen(str(path), None, Listening())
    assert path.is_socket()
    stream = await SystemNetwork().connect(str(path), None, timeout=10)
    await stream.close()
    await successor.close()
    assert not path.exists()
