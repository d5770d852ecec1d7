"""The verify command without Spark: errors before its start, and the form of a report."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowstone.cli import run
from flowstone.cli.lake.verify import show
from flowstone.spark.verification.report import ShownDifference, SideReport, SpaceResult, VerifyReport, WrongRow
from flowstone.spark.verification.tuple_differences import FieldDifference

A = SideReport("node", "127.0.0.1:3301", "uuid", {1: 421, 2: 7})
B = SideReport("lake", "/lake/[db1]", "uuid", {1: 421, 2: 7})


def shown(report: VerifyReport) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=100, soft_wrap=True, highlight=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def report(*spaces: SpaceResult, b: SideReport = B, **more: Any) -> VerifyReport:
    return VerifyReport(A, b, spaces, **{"differences": (), "wrong": (), "notes": (), **more}, seconds=4.06)


def test_equal_sides_are_listed_in_a_table() -> None:
    found = report(
        SpaceResult(280, "_space", 2, 2),
        SpaceResult(328, "_trigger", 0, 0),
        SpaceResult(512, "orders", 129, 129, encoded=3),
        SpaceResult(513, "empty", 0, 0),
        notes=("space 'mine' is not compared: it is local to each instance",),
    )
    assert (
        shown(found)
        == """\
A  127.0.0.1:3301 (node) at {1: 421, 2: 7}
B  /lake/[db1] (lake) at {1: 421, 2: 7}
space   rows in A  rows in B  not in A  not in B  differ
_space          2          2                              equal
orders        129        129                              equal (3 encoded differently, same values)
empty           0          0                              equal
note: space 'mine' is not compared: it is local to each instance
equal: 131 rows of 4 spaces, in 4.1 s"""
    )


def test_output_to_a_file_is_not_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    show(report(SpaceResult(512, "a_space_with_a_rather_long_name_" * 3, 1234567, 1234567)))
    assert "a_space_with_a_rather_long_name_" * 3 in capsys.readouterr().out


def test_differences_are_listed_with_both_values_and_the_field() -> None:
    differing = ShownDifference(
        512, "orders", "[34]", "differs", "[34,102]", "[34,102.0]", (FieldDifference("total", "102", "102.0"),)
    )
    missing = ShownDifference(512, "orders", "[35]", "missing in B", "[35,1]", None, count_b=0)
    twice = ShownDifference(512, "orders", "[36]", "twice", "[36]", "[36]", count_b=2)
    wrong = WrongRow("B", 512, "orders", "[37]", "name is 'x', but its tuple has 'y'")
    space = SpaceResult(512, "orders", 9, 9, missing_in_b=2, differing=1, twice=1, wrong_b=1)
    late = SideReport("lake", "/lake", "uuid", {1: 420}, ((1, 421, 421),))
    assert (
        shown(report(space, b=late, differences=(differing, missing, twice), wrong=(wrong,)))
        == """\
A  127.0.0.1:3301 (node) at {1: 421, 2: 7}
B  /lake (lake) at {1: 420}
space   rows in A  rows in B  not in A  not in B  differ
orders          9          9                   2       2  different (1 inconsistent)
lag: B (/lake) lacks LSN 421 of replica 1
orders [34]: differs in total
    total: A 102, B 102.0
  A  [34,102]
  B  [34,102.0]
orders [35]: missing in B
  A  [35,1]
orders [36]: twice (1 × in A, 2 × in B)
  A  [36]
  B  [36]
orders [37]: B is inconsistent: name is 'x', but its tuple has 'y'
… and 1 more (--limit)
different: 5 differences in 9 rows; B lacks rows, in 4.1 s"""
    )


def test_side_that_only_lags_is_equal_up_to_its_position() -> None:
    late = SideReport("archive", "/backup", "uuid", {1: 420}, ((1, 421, 421),))
    assert shown(report(SpaceResult(512, "orders", 9, 9), b=late)).endswith(
        "different: B lacks rows; the 9 compared rows are equal, in 4.1 s"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/none/a", "/none/b"], "/none/a: no such directory"),
        (["127.0.0.1:1", "127.0.0.1:1"], "cannot connect to 127.0.0.1:1"),
        (["--at", "noon", "127.0.0.1:1", "127.0.0.1:1"], "invalid --at: 'noon'"),
        (["--storage-option", "x", "127.0.0.1:1", "127.0.0.1:1"], "invalid --storage-option; use NAME=VALUE"),
        (["127.0.0.1:1"], "Missing argument 'B'"),
    ],
)
def test_errors_are_one_line_with_exit_code_2_and_spark_is_not_started(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowstone.spark.spark_session.session", None)
    assert run(["verify", "--wait", "0", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert said in line


def test_unreachable_node_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(["verify", "--wait", "0", "127.0.0.1:1", "127.0.0.1:1"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_unexpected_error_is_not_reported_as_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a worker exited")

    monkeypatch.setattr("flowstone.cli.lake.verify._verified", broken)
    assert run(["verify", "a", "b"]) == 2
    assert "a worker exited" in capsys.readouterr().err


def test_the_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "flowstone verify db1:3301 db2:3301" in text
    assert "1 they differ" in text
