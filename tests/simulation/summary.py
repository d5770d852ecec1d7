"""A summary of many runs: their number, kinds and statistics, and the failed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, median

from tests.simulation.run import Outcome


class Summary:
    """Call `add` with each outcome, then `text`."""

    def __init__(self) -> None:
        self.violated: list[int] = []
        self._outcomes: list[Outcome] = []

    @property
    def runs(self) -> int:
        return len(self._outcomes)

    def add(self, outcome: Outcome) -> None:
        outcome.story.clear()  # thousands of them are kept
        self._outcomes.append(outcome)
        if outcome.violations:
            self.violated.append(outcome.seed)

    def text(self, seconds: float) -> str:
        outcomes = self._outcomes
        if not outcomes:
            return "no runs"
        figures = [outcome.figures for outcome in outcomes]
        slowest = max(outcomes, key=lambda outcome: outcome.figures.cpu_seconds)
        faults: Counter[str] = Counter()
        for each in figures:
            faults.update(each.faults)
        seeds = [outcome.seed for outcome in outcomes]
        cpu_seconds = mean(each.cpu_seconds for each in figures)
        losses, unsynced = (sum(each.power_losses for each in figures), sum(each.unsynced_losses for each in figures))
        lines = [
            f"runs: {self.runs} in {seconds:.0f} s, seeds {min(seeds)} to {max(seeds)}",
            _shares("members", [outcome.plan.size for outcome in outcomes]),
            _shares("dialect", [outcome.plan.dialect for outcome in outcomes]),
            _shares("elections", [outcome.plan.election_mode for outcome in outcomes]),
            _spread("operations answered", [each.answered for each in figures]),
            _spread("faults that took effect", [each.fault_count for each in figures]),
            _spread("virtual seconds under faults", [each.seconds for each in figures]),
            f"losses of power: {losses}, with something unsynced: {unsynced}",
            f"writes asked of a deposed leader: {sum(each.deposed for each in figures)}",
            f"processor seconds: mean {cpu_seconds:.2f}, max {slowest.figures.cpu_seconds:.1f} (seed {slowest.seed})",
            "faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())),
            f"violations: {len(self.violated)}",
        ]
        if self.violated:
            violated = ", ".join(map(str, sorted(self.violated)))
            lines.append(f"violated seeds, each to be replayed with --seed N --verbose: {violated}")
        return "\n".join(lines)


def _shares(name: str, values: Sequence[object]) -> str:
    counts = Counter(str(value) for value in values)
    parts = (f"{value} in {100 * count / len(values):.0f} %" for value, count in sorted(counts.items()))
    return f"{name}: {', '.join(parts)}"


def _spread(name: str, values: Sequence[float]) -> str:
    return f"{name}: min {min(values):.0f}, median {median(values):.0f}, max {max(values):.0f}, all {sum(values):.0f}"
