"""The options of `flowstone.connect`, and its two forms."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import flowstone
from tests.client.scripted_server import Script
from tests.node.fake_server import answering, greeting, peer
from tests.node.upstream_server import Upstream
from tests.real_tarantool import free_port


async def test_client_is_open_for_the_duration_of_the_async_with_block(node: Upstream) -> None:
    user, _, address = node.uri.partition("@")
    name, _, password = user.partition(":")
    connecting = flowstone.connect(address, user=name, password=password)
    async with connecting as client:
        assert await client.space("fruit").get(1) is None
    with pytest.raises(flowstone.LocalProtocolError, match="already used"):
        async with connecting:
            pass


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate, which is its own authority, and its key."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


async def test_connection_is_encrypted_when_the_address_asks_for_tls(certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    talk = answering(Script(), (2, 6, 0))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await talk(reader, writer)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with flowstone.connect(f"{address}?transport=ssl&ssl_ca_file={certificate[0]}") as client:
            rows = await asyncio.gather(*[client.space("fruit").insert((1,)) for _ in range(100)])
            assert rows == [(1,)] * 100
            assert await client.space("fruit").insert_many([(1,)] * 2000) == 2000
        with pytest.raises(flowstone.FlowstoneError, match="the server may require TLS"):
            async with flowstone.connect(address, connect_timeout=0.2):
                pass


def test_failed_connection_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(flowstone.ConnectionFailed), flowstone.connect(f"127.0.0.1:{free_port()}"):
        pass
    assert threading.active_count() == before


async def test_connection_fails_at_once_when_the_server_answers_with_invalid_packets() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting())
        while await reader.read(1024):
            writer.write(b"\xff" * 10)

    async with peer(talk) as uri, asyncio.timeout(20):
        with pytest.raises(flowstone.FlowstoneError, match="sent an invalid packet"):
            async with flowstone.connect(uri):
                pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read_from": "follower"}, "read_from is 'follower'; use 'leader', 'any', or a number"),
        ({"read_from": -1}, "read_from is -1"),
        ({"read_from": True}, "read_from is True"),
        ({"connect_timeout": 0}, "connect_timeout is 0; use a number of seconds"),
        ({"request_timeout": "10"}, "request_timeout is '10'"),
        ({"password": "x"}, "password given without a user"),
    ],
)
def test_wrong_option_is_rejected_with_its_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(flowstone.FlowstoneError, match=message):
        flowstone.connect("127.0.0.1:3301", **options)


@pytest.mark.parametrize("login", [{"user": 5}, {"user": "app", "password": b"secret"}, {"user": "\ud800"}])
def test_login_that_is_not_a_text_is_rejected_without_showing_it(login: dict[str, Any]) -> None:
    with pytest.raises(flowstone.LocalProtocolError, match="is not a text; use a str") as error:
        flowstone.connect("127.0.0.1:3301", **login)
    assert "secret" not in str(error.value)


def test_invalid_address_is_rejected_at_once() -> None:
    with pytest.raises(flowstone.UriError):
        flowstone.connect("no address")
    with pytest.raises(flowstone.UriError, match="list of URIs is empty"):
        flowstone.connect([])
