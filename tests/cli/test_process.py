"""The log of a served node; its signals are tested on real processes in test_serve.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from flowstone.cli.process import SEVERITIES, set_level, start_log
from flowstone.node.option_checks import LOG_LEVELS


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The logger of the package, put back as it was."""
    log = logging.getLogger("flowstone")
    before = log.level, list(log.handlers), log.propagate
    yield log
    log.level, log.handlers, log.propagate = before
    log.setLevel(before[0])


def test_a_line_has_a_time_a_level_and_a_text(capfd: pytest.CaptureFixture[str]) -> None:
    start_log()
    set_level({})
    logging.getLogger("flowstone.node").info("listening on %s", "here")
    line = capfd.readouterr().err
    date, time, level, text = line.rstrip().split(" ", 3)
    assert (len(date), len(time), level, text) == (10, 12, "INFO", "listening on here")


@pytest.mark.parametrize(("level", "shown"), [("error", False), ("2", False), ("warn", True), ("5", True), (7, True)])
def test_what_is_less_grave_than_the_level_is_left_out(
    capfd: pytest.CaptureFixture[str], level: str | int, shown: bool
) -> None:
    start_log()
    set_level({"log_level": str(level)})
    logging.getLogger("flowstone.node").warning("careful")
    assert bool(capfd.readouterr().err) is shown


def test_every_level_of_tarantool_has_a_severity() -> None:
    assert list(SEVERITIES) == list(LOG_LEVELS)
