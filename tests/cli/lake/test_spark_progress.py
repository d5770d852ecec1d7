"""On a terminal, one line shows progress; elsewhere there is no output."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flowstone.cli.lake.spark_progress import CLEAR_LINE, Line, tasks_shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line_is_updated_and_cleared() -> None:
    screen = Terminal()
    line = Line(screen)
    line.tell("sorting")
    line.progress(" (1 of 2 tasks)")
    line.close()
    line.close()
    assert screen.getvalue() == f"{CLEAR_LINE}sorting…{CLEAR_LINE}sorting (1 of 2 tasks)…{CLEAR_LINE}"


def test_no_progress_is_written_without_a_terminal() -> None:
    screen = io.StringIO()
    line = Line(screen)
    line.tell("sorting")
    line.close()
    assert screen.getvalue() == ""


def test_tasks_are_counted_while_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    class Tracker:
        def getActiveStageIds(self) -> list[int]:  # noqa: N802 - Spark's name
            return [1, 2]

        def getStageInfo(self, number: int) -> Any:  # noqa: N802 - Spark's name
            return SimpleNamespace(numCompletedTasks=number, numTasks=10) if number == 1 else None

    class OnDone(Line):
        def progress(self, more: str) -> None:
            told.append(more)
            asked.set()

    told: list[str] = []
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", SimpleNamespace(statusTracker=Tracker))
    with tasks_shown(OnDone(io.StringIO())):
        assert asked.wait(60)
    assert " (1 of 10 tasks)" in told
