"""The benchmark of our own writers against libraries, at a tiny scale."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from bench import own_writers


def test_benchmark_of_own_writers_compares_equal_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_writers, "ROUNDS", 2)
    results = list(own_writers.run(tmp_path, rows=200, table_rows=500, changes=20))
    assert [result.what.split()[0] for result in results] == ["merge", "JSON", "YAML"]
    assert all(result.ratio is not None and result.ratio > 0 for result in results)
    # The reason for our own merge. Remove it once the library keeps the order, too.
    assert own_writers.in_key_order(DeltaTable(tmp_path / "ours"))
    assert not own_writers.in_key_order(DeltaTable(tmp_path / "theirs"))
