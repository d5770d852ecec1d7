"""The `flowstone` command as a process: help, version, closed pipes, an interrupt, its imports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowstone.cli import run
from tests.cli.conftest import Command

COMMAND = (sys.executable, "-m", "flowstone.cli")


def test_version_is_printed(flowstone: Command) -> None:
    assert flowstone("--version").text.startswith("flowstone 0.")


@pytest.mark.parametrize("command", ["cat", "play", "demo"])
def test_help_shows_an_example(flowstone: Command, command: str) -> None:
    shown = flowstone(command, "--help")
    assert shown.code == 0
    assert re.search(rf"Example: (\w+=\w+ )*flowstone {command}", " ".join(shown.text.split()))


@pytest.mark.parametrize("command", ["play", "archive", "serve"])
def test_help_names_safer_ways_to_pass_passwords(flowstone: Command, command: str) -> None:
    text = " ".join(re.sub(r"[│\s]+", " ", flowstone(command, "--help").text).split())
    variable = "FLOWSTONE_REPLICATION or the file" if command == "serve" else "TT_CLI_PASSWORD"
    assert text.count(f"{variable}: command lines can be seen by others") == (1 if command == "serve" else 2)


@pytest.mark.parametrize("command", ["cat", "play"])
def test_help_lists_exit_codes_and_exclusive_bounds(flowstone: Command, command: str) -> None:
    text = " ".join(flowstone(command, "--help").text.split())
    assert "Exit codes: 0 done; 1 " in text
    assert "--to and --timestamp are exclusive bounds" in text


def test_help_is_shown_without_a_command(flowstone: Command) -> None:
    shown = flowstone()
    assert shown.code == 2
    assert "cat" in shown.text + "".join(shown.errors)


def test_unknown_command_is_one_line(flowstone: Command) -> None:
    refused = flowstone("nope")
    assert (refused.code, refused.errors) == (2, ["flowstone: No such command 'nope'; see flowstone --help"])


@pytest.mark.parametrize(("form", "first"), [("yaml", b"---\n"), ("json", b'{"HEADER"'), ("csv", b'"replica_id"')])
def test_closed_pipe_is_not_an_error(shop: Path, form: str, first: bytes) -> None:
    many = [str(shop)] * 100
    with subprocess.Popen(
        [*COMMAND, "cat", "--force", "--format", form, *many], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(first)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 0
    assert errors == ""


def test_closed_stdout_is_not_an_error(shop: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "cat", "--format=json", shop], stdout=write, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(write)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_interrupt_exits_with_130_without_a_traceback(shop: Path) -> None:
    many = [str(shop)] * 200
    with subprocess.Popen(
        [*COMMAND, "cat", "--force", *many], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"---\n"
        # The output is much larger than a pipe buffer, so the command is still writing.
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
    assert b"Traceback" not in errors


def test_json_needs_no_library_of_other_formats(shop: Path) -> None:
    """Start-up is a large part of a short run, so the test limits its imports."""
    program = (
        "import sys; from flowstone.cli import run; "
        f"code = run(['cat', '--format=json', '--output', '/dev/null', {str(shop)!r}]); "
        "heavy = {'pyarrow', 'rich', 'flowstone.node', 'flowstone.columns.arrow_columns'} & set(sys.modules); "
        "sys.exit(code or (str(sorted(heavy)) if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, shop: Path) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("flowstone.cli.logs.cat.show", broken)
    with pytest.raises(ZeroDivisionError):
        run(["cat", str(shop)])
