"""The replication part of the benchmark at a tiny scale, compared with the real server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import replication

ROWS = 2_000


@pytest.mark.parametrize("part", ["applied", "joined", "relayed", "archived", "write_rate"])
def test_replication_benchmark_runs_to_its_end(
    part: str, tarantool: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROUNDS", 1), ("ROWS", ROWS), ("JOINED_ROWS", ROWS)):
        monkeypatch.setattr(replication, name, value)
    with ExitStack() as stack:
        results = list(getattr(replication, part)(replication.Bench(tmp_path, stack)))
    assert results
    assert all(result.ratio is not None for result in results)
    if part != "archived":  # the start-up time is subtracted: with so few rows the rest may be negative
        assert all(result.ratio > 0 for result in results if result.ratio is not None)
