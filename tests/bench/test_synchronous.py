"""The synchronous part of the benchmark at a tiny scale: the pairs, compared with the real server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import synchronous


def test_synchronous_benchmark_of_pairs_runs_to_its_end(
    tarantool: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROUNDS", 1), ("COMMITS", 2_000), ("SINGLE_COMMITS", 50)):
        monkeypatch.setattr(synchronous, name, value)
    with ExitStack() as stack:
        results = list(synchronous.pairs(tmp_path, stack))
    assert len(results) == 5
    assert all(result.ratio is not None and result.ratio > 0 for result in results)
