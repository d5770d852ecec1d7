"""An operator that cannot continue is a violation: stopped replication would not be restarted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import pytest

from tests.chaos import upkeep
from tests.chaos.upkeep import Operator


class Nonsense:
    """A reachable member whose answers are not understood."""

    def __init__(self, port: int, **options: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def call(self, name: str) -> dict[str, Any]:
        return {"replication of": name}


def test_malformed_answer_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "Client", Nonsense)
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.0)
    seats: Any = SimpleNamespace(members=[SimpleNamespace(port=3301)])
    operator = Operator(seats)
    operator.start()
    operator._thread.join(10)
    operator.stop()
    assert operator.violations == ["the operator could not make sense of what a member said: KeyError('replication')"]
