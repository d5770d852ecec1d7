"""The log of a long-running command: plain lines and JSON lines, which peers cannot forge."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from flowstone.cli import console
from flowstone.cli.lake import mirror
from flowstone.cli.log import JSON, SEVERITIES, escaped, say_event, set_format, set_level, start_log
from flowstone.iproto.uri import UriError, parse_uri
from flowstone.limestone.replica.events import MasterConnected
from flowstone.node.option_checks import LOG_LEVELS
from flowstone.spark.mirror.progress import MirrorDataLoss, MirrorOpened, MirrorProgress

NODE = logging.getLogger("flowstone.node")
FORGED = "peer\n2026-01-01 00:00:00.000 INFO all is well\r\x1b[2J\u2028x"


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The logger of the package, restored afterwards."""
    log = logging.getLogger("flowstone")
    before = log.level, list(log.handlers), log.propagate
    yield log
    log.level, log.handlers, log.propagate = before
    log.setLevel(before[0])
    console.write_lines_as(None)


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


def objects(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(capfd)]


def test_line_has_time_level_and_text(capfd: pytest.CaptureFixture[str]) -> None:
    start_log()
    set_level({})
    NODE.info("listening on %s", "here")
    [line] = lines(capfd)
    date, time, level, text = line.split(" ", 3)
    assert (len(date), len(time), level, text) == (10, 12, "INFO", "listening on here")


@pytest.mark.parametrize(("level", "shown"), [("error", False), ("2", False), ("warn", True), ("5", True), (7, True)])
def test_records_below_the_level_are_omitted(capfd: pytest.CaptureFixture[str], level: str | int, shown: bool) -> None:
    start_log()
    set_level({"log_level": str(level)})
    NODE.warning("careful")
    assert bool(lines(capfd)) is shown


def test_every_level_of_tarantool_has_a_severity() -> None:
    assert list(SEVERITIES) == list(LOG_LEVELS)


def test_record_is_one_line_despite_control_characters_of_a_peer(capfd: pytest.CaptureFixture[str]) -> None:
    start_log()
    NODE.warning("%s is refused", FORGED)
    [line] = lines(capfd)
    assert line.endswith("peer\\n2026-01-01 00:00:00.000 INFO all is well\\r\\x1b[2J\\u2028x is refused")


def test_no_line_of_a_traceback_looks_like_an_event(capfd: pytest.CaptureFixture[str]) -> None:
    start_log()
    try:
        raise ValueError(FORGED)
    except ValueError:
        NODE.exception("a bug")
    first, *rest = lines(capfd)
    assert first.endswith("ERROR a bug")
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in "".join(rest)


def test_json_has_the_fields_of_tarantool_and_of_the_event(capfd: pytest.CaptureFixture[str]) -> None:
    start_log(JSON)
    NODE.warning("%s is slow", "a", extra={"peer": "127.0.0.1:5000", "connection": 7, "request_id": "7-42"})
    [told] = objects(capfd)
    assert datetime.fromisoformat(told["time"]).tzinfo is not None
    assert isinstance(told["pid"], int)
    assert isinstance(told["line"], int)
    wanted = {
        "level": "WARN",
        "message": "a is slow",
        "logger": "flowstone.node",
        "cord_name": "main",
        "file": "test_log.py",
        "peer": "127.0.0.1:5000",
        "connection": 7,
        "request_id": "7-42",
    }
    assert told.items() >= wanted.items()
    assert told.keys() == wanted.keys() | {"time", "pid", "line"}


def test_json_is_one_line_despite_control_characters_of_a_peer(capfd: pytest.CaptureFixture[str]) -> None:
    start_log(JSON)
    NODE.warning("%s", FORGED)
    [told] = objects(capfd)
    assert told["message"] == FORGED


def test_json_has_the_traceback_of_an_internal_error(capfd: pytest.CaptureFixture[str]) -> None:
    start_log(JSON)
    try:
        raise ValueError("what")
    except ValueError:
        NODE.exception("a bug", extra={"what": object})
    [told] = objects(capfd)
    assert told["exception"].endswith("ValueError: what")


def test_messages_outside_the_log_have_its_format(capfd: pytest.CaptureFixture[str]) -> None:
    start_log(JSON)
    console.say("ready")
    set_format("plain")
    console.say("ready")
    first, second = lines(capfd)
    assert json.loads(first)["message"] == "ready"
    assert second == "ready"


FIELDS = {"time", "level", "message", "logger", "pid", "cord_name", "file", "line"}


def test_line_outside_the_log_has_all_fields_of_a_record(capfd: pytest.CaptureFixture[str]) -> None:
    start_log(JSON)
    console.say("ready")
    say_event(MasterConnected("127.0.0.1:5000"), "flowstone.limestone")
    said, event = objects(capfd)
    assert said.keys() == FIELDS
    assert event.keys() == FIELDS | {"event"}
    assert (said["level"], said["cord_name"], said["file"]) == ("INFO", "main", "test_log.py")
    assert (event["level"], event["cord_name"]) == ("INFO", "main")


def test_exception_is_an_error_with_its_location(capfd: pytest.CaptureFixture[str]) -> None:
    start_log(JSON)
    with pytest.raises(UriError) as refused:
        parse_uri("nowhere")
    assert console.fail(refused.value) == console.USAGE
    assert console.fail(OSError(28, "No space left on device")) == console.FAILED
    first, second = objects(capfd)
    assert (first["level"], first["file"]) == ("ERROR", "uri.py")
    assert first["message"].startswith("flowstone: 'nowhere' is not a valid address")
    assert (second["level"], second["message"]) == ("ERROR", "flowstone: No space left on device")
    assert second.keys() == FIELDS


def test_text_in_other_scripts_is_unchanged() -> None:
    assert escaped("Grüße\t☃") == "Grüße\t☃"


def test_job_event_is_a_line_with_its_fields(capfd: pytest.CaptureFixture[str]) -> None:
    say_event(MasterConnected("127.0.0.1:5000\n"), "flowstone.limestone")
    say_event(MirrorDataLoss("uuid", "rows are gone"), "flowstone.mirror")
    first, second = objects(capfd)
    assert first["message"] == "master 127.0.0.1:5000\n connected"
    assert (first["level"], first["logger"]) == ("INFO", "flowstone.limestone")
    assert first["event"] == {"event": "connected", "peer": "127.0.0.1:5000\n"}
    assert (second["level"], second["event"]["event"]) == ("WARN", "data_loss")


def test_mirror_logs_events_and_exports_figures_as_metrics(capfd: pytest.CaptureFixture[str]) -> None:
    teller = mirror.Teller(as_json=False, log_format=JSON)
    teller.tell(MirrorOpened("lake", {}, []))
    teller.tell(MirrorProgress({}, 5, 1.0, None, 0, {}))
    teller.close()
    [told] = objects(capfd)
    assert (told["message"], told["logger"]) == ("new lake in lake", "flowstone.mirror")
