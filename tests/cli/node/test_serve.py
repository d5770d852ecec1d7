"""`flowstone serve` as a process: its start, its signals, its exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tarantool

from tests import real_tarantool
from tests.cli.conftest import Command
from tests.warm_process import WarmProcess

SECONDS = 60
UNCHANGED = "ignoring node.toml, keeping current settings:"
NOT_WHILE_IT_RUNS = "Can't set option 'wal_mode' dynamically (ER_RELOAD_CFG, 58); restart the node to change wal_mode"


class Served:
    """A process of `flowstone serve` and its output so far; with `is_fresh` in an interpreter of its own."""

    def __init__(self, directory: Path, *options: str, is_fresh: bool = False, **variables: str) -> None:
        self.port = real_tarantool.free_port()
        self._log = directory / f"log-{self.port}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLOWSTONE_")}
        listens = any(option.startswith("--listen=") for option in options)
        given = options if listens else (f"--listen=127.0.0.1:{self.port}", *options)
        command = ["flowstone.cli", "serve", *given]
        self.process: subprocess.Popen[bytes] | WarmProcess
        with self._log.open("wb") as log:
            if is_fresh:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *command], cwd=directory, stderr=log, env=environment | variables
                )
            else:
                self.process = WarmProcess(command, cwd=directory, stdout=1, stderr=log, env=environment | variables)

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def wait_for(self, text: str, *, after: int = 0) -> str:
        """Return the line that ends in `text`, after `count` others."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = [line for line in self.lines[after:] if line.endswith(text)]
            if found:
                return found[0]
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.tell(number)
        return self.process.wait(SECONDS)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts processes in the test's own directory; running ones are terminated at the end."""
    started: list[Served] = []

    def start(*options: str, is_fresh: bool = False, **variables: str) -> Served:
        started.append(Served(tmp_path, *options, is_fresh=is_fresh, **variables))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


def connected(served: Served) -> closing[tarantool.Connection]:
    return closing(tarantool.Connection("127.0.0.1", served.port, user="app", password="secret"))


def greeting(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        return connection.recv(128)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_node_reports_ready_serves_and_stops(serve: Serve, tmp_path: Path, is_fresh: bool) -> None:
    served = serve(is_fresh=is_fresh)
    assert served.wait_for("ready") == "ready"
    assert served.lines[-1] == "ready"
    assert any(f"listening on 127.0.0.1:{served.port}" in line for line in served.lines)
    assert greeting(served.port).startswith(b"Tarantool 2.11")
    assert served.end() == 0
    assert served.lines[-1].endswith("stopped")
    assert sorted(path.suffix for path in (tmp_path / "data").iterdir() if path.suffix) == [".snap"]


def test_signals_before_ready_are_handled_when_ready(serve: Serve) -> None:
    served = serve()
    served.wait_for("new data in data, dialect 2.11")
    served.tell(signal.SIGHUP)
    served.tell(signal.SIGUSR1)
    served.wait_for("ready")
    served.wait_for("configuration reloaded; changed: nothing")
    assert served.end() == 0


def test_interrupt_stops_the_node(serve: Serve) -> None:
    served = serve("--dialect=2.6")
    served.wait_for("ready")
    assert greeting(served.port).startswith(b"Tarantool 2.6.0 ")
    assert served.end(signal.SIGINT) == 0


def test_second_process_is_rejected_and_the_first_continues(serve: Serve) -> None:
    first = serve()
    first.wait_for("ready")
    second = serve()
    assert second.process.wait(SECONDS) == 1
    assert second.lines[-1].startswith("flowstone: another instance is running in data; ")
    assert greeting(first.port)


def test_port_in_use_is_an_error(serve: Serve) -> None:
    first = serve()
    first.wait_for("ready")
    second = serve(f"--listen=127.0.0.1:{first.port}", "--work-dir=other")
    assert second.process.wait(SECONDS) == 1
    assert second.lines[-1].startswith(f"flowstone: cannot listen on 127.0.0.1:{first.port}: ")


def test_failed_start_in_json_is_an_error_with_the_usual_fields(serve: Serve) -> None:
    first = serve("--log-format=json")
    while not any('"ready"' in line for line in first.lines):
        first.wait_for("}", after=len(first.lines))
    second = serve(f"--listen=127.0.0.1:{first.port}", "--work-dir=other", FLOWSTONE_LOG_FORMAT="json")
    assert second.process.wait(SECONDS) == 1
    wrong = serve("--wal-mode=often", FLOWSTONE_LOG_FORMAT="json")
    assert wrong.process.wait(SECONDS) == 2
    for served, message, level in (
        (first, "ready", "INFO"),
        (second, f"flowstone: cannot listen on 127.0.0.1:{first.port}: ", "ERROR"),
        (wrong, "flowstone: Incorrect value for option 'wal_mode': often", "ERROR"),
    ):
        lines = [json.loads(line) for line in served.lines]
        (found,) = [line for line in lines if line["message"].startswith(message)]
        assert found["level"] == level
        assert all({"pid", "cord_name", "file", "line"} <= line.keys() for line in lines)


def test_damaged_snapshot_is_rejected(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "00000000000000000000.snap").write_bytes(b"SNAP\n0.13\n")
    served = serve()
    assert served.process.wait(SECONDS) == 1
    assert "00000000000000000000.snap" in served.lines[-1]


def test_data_of_a_killed_process_is_recovered(serve: Serve) -> None:
    first = serve(FLOWSTONE_USER="app:secret")
    first.wait_for("ready")
    with connected(first) as connection:
        connection.insert("_space", (600, 1, "kept", "memtx", 0, {}, []))
        connection.insert("_index", (600, 0, "primary", "tree", {"unique": True}, [[0, "unsigned"]]))
        connection.insert(600, (1, "one"))
    first.process.kill()
    first.process.wait()
    second = serve(FLOWSTONE_USER="app:other")
    second.wait_for("ready")
    with connected(second) as connection:
        assert list(connection.select("kept")) == [[1, "one"]]
    assert any("user app not created: the data directory is already initialized" in line for line in second.lines)
    assert not any("secret" in line or "other" in line for line in second.lines)


def test_sigusr1_makes_a_snapshot(serve: Serve, tmp_path: Path) -> None:
    served = serve("--user=app:secret")
    served.wait_for("ready")
    with connected(served) as connection:
        connection.insert("_space", (600, 1, "kept", "memtx", 0, {}, []))
    served.tell(signal.SIGUSR1)
    deadline = time.monotonic() + SECONDS
    while len(list((tmp_path / "data").glob("*.snap"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert served.end() == 0


def test_sighup_reloads_the_configuration_file(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("checkpoint_count = 3\n")
    served = serve("--config=node.toml")
    served.wait_for("ready")
    file.write_text("checkpoint_count = 4\nread_only = true\n")
    served.tell(signal.SIGHUP)
    served.wait_for("configuration reloaded; changed: checkpoint_count, read_only")
    said = len(served.lines)
    file.write_text("")
    served.tell(signal.SIGHUP)
    served.wait_for("configuration reloaded; changed: checkpoint_count, read_only", after=said)
    file.write_text('wal_mode = "fsync"\n')
    served.tell(signal.SIGHUP)
    served.wait_for(f"{UNCHANGED} {NOT_WHILE_IT_RUNS}")
    file.write_text("nonsense\n")
    served.tell(signal.SIGHUP)
    assert f"{UNCHANGED} node.toml: " in served.wait_for("wal_mode = 'fsync'")
    file.unlink()
    served.tell(signal.SIGHUP)
    served.wait_for(f"{UNCHANGED} [Errno 2] No such file or directory: 'node.toml'")
    assert served.end() == 0


def test_reload_with_one_unchangeable_option_changes_nothing(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("checkpoint_count = 3\n")
    served = serve("--config=node.toml")
    served.wait_for("ready")
    file.write_text('checkpoint_count = 4\nwal_mode = "fsync"\n')
    served.tell(signal.SIGHUP)
    served.wait_for(f"{UNCHANGED} {NOT_WHILE_IT_RUNS}")
    file.write_text("checkpoint_count = 4\n")
    served.tell(signal.SIGHUP)
    served.wait_for("configuration reloaded; changed: checkpoint_count")
    assert served.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("has_data", [False, True])
def test_signal_stops_a_start_that_waits_for_peers(serve: Serve, number: signal.Signals, has_data: bool) -> None:
    if has_data:
        before = serve()
        before.wait_for("ready")
        assert before.end() == 0
    waiting = serve(f"--replication=127.0.0.1:{real_tarantool.free_port()}")
    waiting.wait_for(f"listening on 127.0.0.1:{waiting.port}")
    assert_stops_at_once(waiting, number)
    again = serve()
    again.wait_for("ready")  # the directory is unlocked
    assert again.end() == 0


def test_signal_stops_a_start_with_a_wrong_password(serve: Serve) -> None:
    peer = serve("--user=app:secret", "--work-dir=peer")
    peer.wait_for("ready")
    waiting = serve(FLOWSTONE_REPLICATION=f"app:wrong@127.0.0.1:{peer.port}")
    waiting.wait_for(f"listening on 127.0.0.1:{waiting.port}")
    assert_stops_at_once(waiting, signal.SIGTERM)
    assert peer.end() == 0


def assert_stops_at_once(served: Served, number: signal.Signals) -> None:
    """Check that the process ends well before the 30 s timeout for peers."""
    begun = time.monotonic()
    assert served.end(number) == 0
    assert time.monotonic() - begun < 10
    assert served.lines[-1].endswith("stopped")
    assert "ready" not in served.lines


def test_first_user_is_ignored_with_a_log_line_when_data_comes_from_peers(serve: Serve) -> None:
    first = serve("--user=app:secret", "--work-dir=first")
    first.wait_for("ready")
    assert not any("not created" in line for line in first.lines)
    second = serve(
        "--user=other:secret",
        "--work-dir=second",
        FLOWSTONE_REPLICATION=f"app:secret@127.0.0.1:{first.port}",
    )
    second.wait_for("ready")
    assert [line for line in second.lines if line.endswith("user other not created: the data comes from peers")]
    assert second.end() == 0
    assert first.end() == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--wal-mode=often",), "flowstone: Incorrect value for option 'wal_mode': often (given as --wal-mode)"),
        (("--config=missing.toml",), "flowstone: missing.toml: No such file or directory"),
        (("--user=app",), "flowstone: invalid user (given as --user); use NAME:PASSWORD"),
        (("--walmode=write",), "flowstone serve: No such option: --walmode"),
    ],
)
def test_usage_error_is_one_line(flowstone: Command, arguments: tuple[str, ...], complaint: str) -> None:
    refused = flowstone("serve", *arguments)
    assert refused.code == 2
    assert len(refused.errors) == 1
    assert refused.errors[0].startswith(complaint)


def test_help_shows_every_option_an_example_and_the_exit_codes(flowstone: Command) -> None:
    from flowstone.cli.node.settings import EVERY_OPTION

    shown = " ".join(flowstone("serve", "--help").text.split())
    assert all(f" {option.dashed} " in shown for option in EVERY_OPTION.values())
    assert "Example: `FLOWSTONE_USER=app:secret flowstone serve" in shown
    assert "Exit codes: 0 stopped by a signal; 1 " in shown
