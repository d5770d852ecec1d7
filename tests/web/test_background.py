"""HTTP in a thread of a program without an event loop."""

from __future__ import annotations

import threading
import urllib.request

import pytest

from flowstone.errors import CannotListen
from flowstone.web.background import BackgroundServer
from flowstone.web.server import WebServer
from tests.web.test_server import APPLICATION


def test_server_runs_until_the_block_ends() -> None:
    with BackgroundServer(lambda: WebServer(APPLICATION, "127.0.0.1:0")) as web:
        with urllib.request.urlopen(web.url, timeout=30) as answer:
            assert answer.read() == b"hello"
        with pytest.raises(CannotListen, match="Address already in use"):
            BackgroundServer(lambda: WebServer(APPLICATION, web.url.split("/")[2])).__enter__()
    assert "http" not in [thread.name for thread in threading.enumerate()]


def test_server_ends_with_the_error_of_the_block() -> None:
    with pytest.raises(ZeroDivisionError), BackgroundServer(lambda: WebServer(APPLICATION, "127.0.0.1:0")):
        1 / 0
    assert "http" not in [thread.name for thread in threading.enumerate()]
