"""`flowstone archive`: exit codes, output, and termination."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone.archive import events as events
from flowstone.cli.logs.archive import CLEAR_LINE, _Teller
from tests.cli.conftest import Command
from tests.interop.member import eventually
from tests.node.archived_server import RealServer
from tests.real_tarantool import free_port
from tests.warm_command import warm
from tests.web.exposition import checked


@pytest.fixture
def server(tarantool: object, tmp_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path / "master") as running:
        yield running


def test_help_has_an_example_and_the_exit_codes(flowstone: Command) -> None:
    text = flowstone("archive", "--help").text
    assert "Example:" in text
    assert "Exit codes:" in text
    assert "--register" in text


@pytest.mark.real
def test_once_archives_the_existing_rows_and_exits_with_0(
    flowstone: Command, server: RealServer, tmp_path: Path
) -> None:
    server.eval("fill(1, 100)")
    first = flowstone("archive", "--once", server.uri, tmp_path / "archive")
    assert first.code == 0
    assert first.errors[0] == f"flowstone: new archive in {tmp_path / 'archive'}"
    assert any("snapshot" in line for line in first.errors)
    assert "caught up" in first.errors[-2]
    server.eval("fill(101, 200)")
    second = flowstone("archive", "--once", "--json", server.uri, tmp_path / "archive")
    assert second.code == 0
    told = [json.loads(line) for line in second.text.splitlines()]
    assert [event["event"] for event in told if event["event"] != "progress"] == [
        "opened",
        "connected",
        "caught_up",
        "stopped",
    ]
    assert told[-1]["position"] == {"1": server.vclock()[1]}
    assert told[-1]["rows"] == 100
    assert second.errors == []


@pytest.mark.real
def test_signal_ends_the_archive_with_0(server: RealServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flowstone.cli", "archive", "--json", server.uri, str(tmp_path / "archive")]
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(json.loads(line))
                if seen[-1]["event"] == "connected":
                    server.eval("fill(1, 10)")
                if seen[-1].get("position") == {"1": server.vclock()[1]} and seen[-1]["event"] == "progress":
                    process.send_signal(number)
                    break
            rest = [json.loads(line) for line in process.stdout]
            assert process.wait(30) == 0
            assert rest[-1]["event"] == "stopped"
            assert process.stderr is not None
            assert process.stderr.read() == b""
    assert server.recovered(tmp_path / "archive")[1] == server.vclock()


@pytest.mark.real
@pytest.mark.parametrize(
    ("user", "text"),
    [("replicator:wrong@", "check the user and the password"), ("nobody:secret@", "box.schema.user.grant")],
)
def test_missing_privileges_are_reported_in_one_line(
    flowstone: Command, server: RealServer, tmp_path: Path, user: str, text: str
) -> None:
    result = flowstone("archive", f"{user}{server.address}", tmp_path / "archive")
    assert result.code == 1
    *_, line = result.errors
    assert line.startswith(f"flowstone: cannot archive {user.split(':')[0]}@{server.address}: ")
    assert text in line
    assert len(result.errors) == 1
    assert not (tmp_path / "archive").exists()


@pytest.mark.real
def test_credentials_are_read_from_the_environment(
    flowstone: Command, server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TT_CLI_USERNAME", "replicator")
    monkeypatch.setenv("TT_CLI_PASSWORD", "secret")
    assert flowstone("archive", "--once", server.address, tmp_path / "archive").code == 0


def test_unreachable_server_is_an_error_with_once(flowstone: Command, tmp_path: Path) -> None:
    result = flowstone("archive", "--once", "127.0.0.1:1", tmp_path / "new" / "archive")
    assert result.code == 1
    assert result.errors == ["flowstone: cannot connect to 127.0.0.1:1: connection refused"]
    assert list(tmp_path.iterdir()) == []


def test_existing_empty_directory_is_kept(flowstone: Command, tmp_path: Path) -> None:
    assert flowstone("archive", "--once", "127.0.0.1:1", tmp_path).code == 1
    assert tmp_path.is_dir()


def test_directory_that_cannot_be_created_is_reported(flowstone: Command) -> None:
    result = flowstone("archive", "127.0.0.1:1", "/proc/none/archive")
    assert result.code == 2
    what = "cannot create archive directory /proc/none/archive: No such file or directory"
    assert result.errors == [f"flowstone: {what}; use another directory"]


def test_usage_error_has_its_own_exit_code(flowstone: Command, tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "00000000000000000000.snap").touch()
    (tmp_path / "file").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    for arguments, text in (
        (("archive", "no address", tmp_path / "a"), "is not a valid address"),
        (("archive", "127.0.0.1:1", tmp_path / "node"), "is not an archive"),
        (("archive", "127.0.0.1:1", tmp_path / "photos"), "is not an archive"),
        (("archive", "127.0.0.1:1"), "Missing argument"),
        (("archive", "--snapshot-interval", "-1", "127.0.0.1:1", tmp_path / "a"), "--snapshot-interval"),
    ):
        result = flowstone(*arguments)
        assert result.code == 2, arguments
        assert text in result.errors[-1]
    assert flowstone("archive", "--once", "127.0.0.1:1", tmp_path / "file" / "a").code == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_stays_on_one_line_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Terminal()
    teller = _Teller(False, screen=screen)
    progress = events.Progress({1: 9}, {1: 9}, 5, 10.0, 0.1, "follow")
    teller.tell(progress)
    teller.tell(progress)
    teller.tell(events.CaughtUp({1: 9}, {1: 9}))
    teller.close()
    assert screen.getvalue() == f"{CLEAR_LINE}{progress}" * 2 + CLEAR_LINE
    assert "caught up" in capsys.readouterr().err


def test_progress_is_hidden_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _Teller(False).tell(events.Progress({1: 9}, {1: 9}, 5, 10.0, 0.1, "follow"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.real
def test_archive_serves_http_and_logs_json(server: RealServer, tmp_path: Path) -> None:
    port = free_port()
    options = [f"--http-listen=127.0.0.1:{port}", "--log-format=json"]
    command = [*warm("flowstone.cli"), "archive", *options, server.uri, str(tmp_path / "archive")]
    server.eval("fill(1, 100)")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    base = f"http://127.0.0.1:{port}"
    eventually("the archive follows", lambda: reached(f"{base}/health/ready") == 200, seconds=240)
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as answer:
        found = checked(answer.read().decode())
    assert found.value("flowstone_archive_position", id="1") == server.vclock()[1]
    process.terminate()
    _, lines = process.communicate(timeout=60)
    assert process.returncode == 0
    told = [json.loads(line) for line in lines.splitlines()]
    assert told[0]["message"] == f"flowstone: metrics and health at {base}/"
    names = [line["event"]["event"] for line in told if "event" in line]
    assert names == ["opened", "snapshot", "connected", "stopped"]
    assert {line["logger"] for line in told if "event" in line} == {"flowstone.archive"}


def reached(url: str) -> int:
    """Return the HTTP status; 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0
