"""Notifications to the service manager, from a real process; they are optional."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone.cli import service
from tests.real_tarantool import free_port

SECONDS = 60


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Return the socket of the service manager, at `notify` in the test's directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(SECONDS)
        yield listening


def test_node_notifies_the_manager_when_ready_and_stopping(manager: socket.socket, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "flowstone.cli", "serve", f"--listen=127.0.0.1:{port}"]
    environment = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as node:
        try:
            assert manager.recv(100) == b"READY=1"
            socket.create_connection(("127.0.0.1", port), SECONDS).close()
            node.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert node.wait(SECONDS) == 0
        finally:
            node.kill()


def test_abstract_socket_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0flowstone-test-{os.getpid()}")
        listening.settimeout(SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@flowstone-test-{os.getpid()}")
        service.tell(service.READY)
        assert listening.recv(100) == service.READY


@pytest.mark.parametrize("place", [None, "", "vsock:2:1", "/nowhere/at/all"])
def test_missing_service_manager_is_ignored(monkeypatch: pytest.MonkeyPatch, place: str | None) -> None:
    if place is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", place)
    service.tell(service.READY)
