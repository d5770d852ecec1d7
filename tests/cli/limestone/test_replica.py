"""`flowstone limestone replica`: a process that masters can reach, and that exits with 0 on a signal."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowstone.cli.limestone.replica import ENDPOINT_VARIABLE, SECRET_VARIABLE
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.outside import production
from tests.cli.conftest import Command
from tests.limestone.peer import Connector, Master, row, session
from tests.warm_command import warm

COMMAND = [sys.executable, "-m", "flowstone.cli", "limestone", "replica"]


class Running:
    """A replica process and its output."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.first = self.next_event()
        self.endpoint = Endpoint.parse(self.first["endpoint"])

    def next_event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        event: dict[str, Any] = json.loads(self.process.stdout.readline())
        return event

    def stop(self, number: signal.Signals) -> list[dict[str, Any]]:
        """Stop the process, check that it exits with 0, and return its last output."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        rest = [json.loads(line) for line in self.process.stdout]
        assert self.process.wait(30) == 0
        return rest


@contextmanager
def started(directory: Path, *options: str, is_fresh: bool = False, **environment: str) -> Iterator[Running]:
    """Start a replica process; with `is_fresh`, in an interpreter of its own."""
    replica = COMMAND if is_fresh else (*warm("flowstone.cli"), "limestone", "replica")
    command = [*replica, str(directory), "--json", *options]
    others = {"env": os.environ | environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **others) as process:  # type: ignore[call-overload]
        try:
            yield Running(process)
        finally:
            process.kill()


async def write(endpoint: Endpoint, epoch: int, secret: str | None = None) -> None:
    connector = Connector(production().network)
    try:
        master = Master(connector, endpoint)
        await master.begin()
        if secret is not None:
            await master.hello(secret=secret)
        await (await master.open(0)).acknowledged(session(epoch, row("k", "v", epoch)))
        await master.commit(epoch)
    finally:
        await connector.close()


def test_help_has_an_example_and_the_exit_codes(flowstone: Command) -> None:
    text = flowstone("limestone", "replica", "--help").text
    assert "Example:" in text
    assert "Exit codes:" in text
    assert "--compatible" in text


def test_replica_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    """Each log channel takes two files, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with started(tmp_path, "--listen", "tcp://127.0.0.1:0", is_fresh=True) as running:
            assert resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_replica_serves_masters_until_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path / "made", "--listen", "tcp://127.0.0.1:0", is_fresh=True) as running:
        assert running.first["event"] == "listening"
        assert running.first["durable_epoch"] == 0
        for epoch in (1, 2):
            await write(running.endpoint, epoch)
            told = [running.next_event()["event"], running.next_event()["event"]]
            assert told == ["connected", "disconnected"]
        assert running.stop(number)[-1] == {"event": "stopped", "durable_epoch": 2}
    with started(tmp_path / "made", is_fresh=False, **{ENDPOINT_VARIABLE: "tcp://127.0.0.1:0"}) as running:
        assert running.first["durable_epoch"] == 2


async def test_replica_prompts_for_the_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from a file\nnot this\n")
    with started(tmp_path / "a", "--listen", "tcp://[::1]:0", "--secret-file", str(tmp_path / "secret")) as running:
        await write(running.endpoint, 1, "from a file")
    with started(
        tmp_path / "b", "--listen", "tcp://127.0.0.1:0", is_fresh=False, **{SECRET_VARIABLE: "hidden"}
    ) as running:
        await write(running.endpoint, 1, "hidden")
        with pytest.raises(AssertionError):
            await write(running.endpoint, 2)
        assert "hidden" not in json.dumps(running.stop(signal.SIGTERM))


def test_replica_lists_the_masters_that_can_write(tmp_path: Path) -> None:
    with started(tmp_path / "a", "--listen", "tcp://0.0.0.0:0") as running:
        running.stop(signal.SIGTERM)
        assert running.process.stderr is not None
        assert b"any client that reaches 0.0.0.0:0 can write to this replica" in running.process.stderr.read()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--listen", "127.0.0.1:1"], "invalid endpoint"),
        (["--listen", "tls://127.0.0.1:0"], "TLS needs a certificate"),
        (["--listen", "tcp://127.0.0.1:0", "--ssl-ca-file", "x"], "TLS needs a certificate"),
        (["--secret-file", "{}/missing"], "No such file"),
        (["--secret-file", "{}/empty"], "is empty"),
        (["--secret-file", "{}/secret", "--compatible"], "--compatible does not support a secret"),
        (["--listen", "tls://127.0.0.1:0", "--ssl-cert-file", "{}/missing"], "cannot read ssl_cert_file"),
    ],
)
def test_invalid_command_line_is_reported(
    options: list[str], what: str, flowstone: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
    (tmp_path / "empty").touch()
    (tmp_path / "secret").write_text("s")
    result = flowstone(
        "limestone", "replica", tmp_path / "data", *(text.replace("{}", str(tmp_path)) for text in options)
    )
    assert result.code == 2
    assert what in result.errors[-1]


def test_error_names_an_unavailable_address_and_creates_nothing(flowstone: Command, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        result = flowstone("limestone", "replica", tmp_path / "data", "--listen", address)
    assert result.code == 1
    assert f"cannot listen at {address}: address already in use" in result.errors[-1]
    assert "another port" in result.errors[-1]
    result = flowstone("limestone", "replica", tmp_path / "data", "--listen", "tcp://no-such-host.invalid:1")
    assert result.code == 1
    assert "cannot listen at tcp://no-such-host.invalid:1: " in result.errors[-1]
    assert list(tmp_path.iterdir()) == []


def test_file_is_rejected_as_directory_and_empty_secret_as_secret(
    flowstone: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    result = flowstone("limestone", "replica", tmp_path / "file", "--listen", "tcp://127.0.0.1:0")
    assert result.code == 2
    assert "is not a directory" in result.errors[-1]
    monkeypatch.setenv(SECRET_VARIABLE, "")
    result = flowstone("limestone", "replica", tmp_path / "data", "--listen", "tcp://127.0.0.1:0")
    assert result.code == 2
    assert f"{SECRET_VARIABLE} is empty" in result.errors[-1]


def test_directory_in_use_or_with_other_data_is_rejected(flowstone: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = flowstone("limestone", "replica", tmp_path, "--listen", "tcp://127.0.0.1:0")
    assert refused.code == 1
    with started(tmp_path / "data", "--listen", "tcp://127.0.0.1:0"):
        refused = flowstone("limestone", "replica", tmp_path / "data", "--listen", "tcp://127.0.0.1:0")
        assert refused.code == 1
        assert "in use" in refused.errors[-1]


async def test_replica_continues_when_its_output_is_closed(tmp_path: Path) -> None:
    with started(tmp_path / "data", "--listen", "tcp://127.0.0.1:0") as running:
        assert running.process.stdout is not None
        running.process.stdout.close()
        for epoch in (1, 2, 3):
            await write(running.endpoint, epoch)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
