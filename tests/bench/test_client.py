"""The client part of the benchmark at a tiny scale, against the real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import client


def test_client_benchmark_runs_to_its_end(tarantool: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS": 1, "REQUESTS": 20, "BATCH": 20, "BATCHES": 2}.items():
        monkeypatch.setattr(client, name, value)
    results = list(client.run(tmp_path))
    assert len(results) == 7
    assert all(result.ratio is not None and result.ratio > 0 for result in results)
