"""The mirror command: its options, its errors before Spark starts, and its output."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from threading import Thread

import pytest

from flowstone.cli import run
from flowstone.cli.lake import mirror
from flowstone.spark.mirror.progress import (
    MirrorCaughtUp,
    MirrorOpened,
    MirrorProgress,
    MirrorStopped,
    MirrorTable,
    TableProgress,
)
from tests.real_tarantool import free_port

UUID = "aaaaaaaa-0000-4000-8000-000000000001"
PROGRESS = MirrorProgress(
    {UUID: {1: 5}}, 1234, 617.0, 0.4, 7, {"orders": TableProgress(1000, 500.0, 12), "users": TableProgress(234, 117.0)}
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/archive", "LAKE"], "/nowhere/archive: no such directory; specify an archive"),
        (["nosuch", "LAKE"], "'nosuch' is neither an existing directory nor an address (host:port)"),
        (["user:secret@nosuch", "LAKE"], "'nosuch' is not a valid address"),
        (["db1?transport=ssl&ssl_ca_file=/etc/ca.pem&ssl_password=secret", "LAKE"], "'db1' is not a valid address"),
        (["127.0.0.1:1", "s3a://bucket/lake"], "--spool is required: s3a://bucket/lake is not a local path"),
        (["--mask=users.email", "127.0.0.1:1", "LAKE"], "invalid mask 'users.email'; use SPACE.FIELD=KIND"),
        (["--mask=users.email=md5", "127.0.0.1:1", "LAKE"], "unknown kind of mask 'md5'"),
        (["--mask=users.email=null", "127.0.0.1:1", "LAKE"], "--mask needs --spool"),
        (["--mask=u.e=null", "--spool=LAKE/spool", "127.0.0.1:1", "LAKE"], "is inside the lake"),
        (["--columns=users", "127.0.0.1:1", "LAKE"], "invalid --columns 'users'"),
        (["--space=a", "--exclude=a", "127.0.0.1:1", "LAKE"], "both chosen and excluded"),
        (["--conf=spark.ui.enabled", "127.0.0.1:1", "LAKE"], "--conf 'spark.ui.enabled' has no value"),
        (["--transport=carrier-pigeon", "127.0.0.1:1", "LAKE"], "--transport"),
        (["127.0.0.1:1"], "Missing argument 'SOURCE...'"),
    ],
)
def test_invalid_options_are_reported_before_the_start(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["mirror", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "secret" not in shown
    assert list(tmp_path.iterdir()) == []


def test_spark_does_not_start_for_an_unreachable_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("nothing is to be mirrored")

    monkeypatch.setattr("flowstone.spark.spark_session.session", start)
    monkeypatch.chdir(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    assert run(["mirror", "--mask=users.email=null", "--spool=SPOOL", address, "LAKE"]) == 1
    assert address in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mirror", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "flowstone mirror db1:3301,db2:3301 /lake/shop" in shown
    assert "Exit codes: 0 stopped by a signal" in shown


def test_events_are_written_as_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    teller = mirror.Teller(as_json=True)
    for event in (MirrorOpened("lake", {}, []), PROGRESS, MirrorCaughtUp({UUID: {1: 5}})):
        teller.tell(event)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["opened", "progress", "caught_up"]
    assert lines[1]["tables"]["orders"] == {"changes": 1000, "changes_per_second": 500.0, "version": 12, "misfits": 0}


def test_output_without_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    teller = mirror.Teller(as_json=False)
    teller.tell(MirrorTable("orders", "created"))
    teller.tell(PROGRESS)
    assert capsys.readouterr().err.splitlines() == [
        "flowstone: table orders created",
        "flowstone: 617 changes/s, lag 0.4 s and 7 rows, at {1: 5}, 1,234 changes",
    ]


def test_progress_lines_are_printed_periodically_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    teller = mirror.Teller(as_json=False, now=lambda: now)

    def tell(changes: int, rate: float) -> None:
        teller.tell(MirrorProgress({UUID: {1: changes}}, changes, rate, 0.0, 0, {}))

    for second in range(60):  # busy for 25 ticks, then idle
        now = 100.0 + second
        tell(min(second, 25), 1.0 if second < 35 else 0.0)
    assert [line.rpartition(", ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "0 changes",
        "10 changes",
        "20 changes",
        "25 changes",
        "25 changes",
    ]
    tell(26, 0.1)
    teller.tell(MirrorStopped({UUID: {1: 26}}, 26, 3, 61.0))
    teller.close()
    assert [line.split(" ")[1] for line in capsys.readouterr().err.splitlines()] == ["0", "stopped"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_figures_per_table_in_place() -> None:
    screen = Terminal()
    teller = mirror.Teller(as_json=False, screen=screen)
    teller.tell(PROGRESS)
    teller.tell(MirrorTable("orders", "truncated"))
    teller.tell(PROGRESS)
    teller.close()
    shown = screen.getvalue()
    assert all(text in shown for text in ("orders", "1,000", "500", "617", "lag 0.4 s and 7 rows"))
    assert "flowstone: table orders truncated" in shown


def test_signals_stop_a_mirror_gracefully(capfd: pytest.CaptureFixture[str]) -> None:
    stopped: list[int] = []

    class Job:
        def stop(self) -> None:
            stopped.append(1)

    before = signal.getsignal(signal.SIGTERM)
    with mirror.stopped_by_signals(Job()):  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGTERM)
        assert stopped == [1]
        assert "stopping after the current batch; repeat the signal to stop immediately\n" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):  # an impatient user may repeat it
            signal.raise_signal(signal.SIGTERM)
        assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) is before


def test_lines_of_several_threads_are_not_interleaved(capsys: pytest.CaptureFixture[str]) -> None:
    teller = mirror.Teller(as_json=True)

    def tell() -> None:
        for _ in range(200):
            teller.tell(PROGRESS)

    threads = [Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["progress"] * 800
