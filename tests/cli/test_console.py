"""Messages of a command besides its output, and the exit codes of errors."""

from __future__ import annotations

import io
import sys

import pytest

from flowstone.cli import console
from flowstone.errors import FlowstoneError
from flowstone.xlog.errors import DamagedLog, NotALogFile


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (FlowstoneError("it broke", hint="mend it"), 1, "flowstone: it broke; mend it"),
        (FlowstoneError("two\nlines"), 1, "flowstone: two lines"),
        (DamagedLog("a.xlog", 7, "bad"), 1, "flowstone: a.xlog: damaged at byte 7: bad; "),
        (NotALogFile("a.xlog", "the file is empty"), 2, "flowstone: a.xlog: not a log file: the file is empty; "),
        (console.UsageError("wrong"), 2, "flowstone: wrong"),
        (FileNotFoundError(2, "No such file or directory", "x"), 2, "flowstone: x: No such file or directory"),
        (OSError(28, "No space left on device", "x"), 1, "flowstone: x: No space left on device"),
    ],
)
def test_error_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    assert console.fail(error) == code
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(line)


def test_connection_refused_has_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    console.say("hello")


def test_progress_bar_appears_for_long_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = console.ProgressBar(100, wanted=True)
    bar.advance(50, "a.xlog")
    bar.close()
    assert "a.xlog" in capsys.readouterr().err


def test_progress_bar_is_hidden_without_a_terminal_or_for_short_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "SHOW_AFTER_SECONDS", 3600.0)
    with console.progress_bar(100) as bar:
        bar.advance(100, "a.xlog")
    short = console.ProgressBar(100, wanted=True)
    short.advance(100, "a.xlog")
    short.close()
    assert capsys.readouterr().err == ""
