"""`python -m tests.simulation`: output and exit codes."""

from __future__ import annotations

import pytest

from tests.simulation import __main__ as command
from tests.simulation.fresh import Fresh
from tests.simulation.plan import plan
from tests.simulation.run import Figures, Outcome


def run_badly_twice(seed: int, *, is_verbose: bool = False) -> Outcome:
    violations = ["b went back"] if seed in (4, 6) else []
    figures = Figures(seconds=60 + seed, asked=400, answered=300 + seed, faults={"kill": 10, "cut": seed})
    return Outcome(seed, plan(seed), violations, f"hash{seed}", figures, ["1.000000 a start"] if is_verbose else [])


@pytest.fixture(autouse=True)
def fast_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run", run_badly_twice)


def test_single_run_ends_with_verdict_and_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "seed 3: ok hash hash3"


def test_violated_run_reports_the_reason_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "4", "--verbose"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  1.000000 a         start"
    assert lines[-2:] == ["violated: b went back", "seed 4: VIOLATED hash hash4"]


def test_many_runs_are_summarized(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--runs", "4", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "operations answered: min 300, median 302, max 303, all 1206" in out
    assert "faults that took effect: min 10, median 12, max 13, all 46" in out
    assert "virtual seconds under faults: min 60, median 62, max 63, all 246" in out
    assert "faults: cut 6, kill 40" in out
    assert out.splitlines()[-1] == "violations: 0"


def test_violated_seeds_are_named_and_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--runs", "5", "--first", "2", "--jobs", "2"]) == 1
    out = capsys.readouterr().out
    assert "seed 4: VIOLATED: b went back" in out
    assert out.splitlines()[-1].endswith("4, 6")


def test_soak_ends_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--soak", "0.2", "--jobs", "2", "--first", "100"]) == 0
    assert "seeds 100 to" in capsys.readouterr().out


def test_fresh_seeds_run_after_the_fixed_ones_and_are_named_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "fresh", lambda count: Fresh(5, count, "commit abc"))
    assert command.main(["--runs", "2", "--fresh", "2", "--jobs", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fresh seeds 5 to 6, derived from commit abc"
    assert lines[1:3] == [
        "seed 6: VIOLATED: b went back",
        "  to run it again: python -m tests.simulation --seed 6 --verbose",
    ]
    assert any(line.startswith("runs: 4 in") for line in lines)


@pytest.mark.parametrize("arguments", [[], ["--seed", "1", "--fresh", "2"], ["--soak", "1", "--fresh", "2"]])
def test_command_line_without_runs_or_with_conflicting_options_is_rejected(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
