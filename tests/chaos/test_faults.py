"""Only effective faults are counted: not a pause that no peer notices, nor a kill after the snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from tests.chaos import faults
from tests.chaos.faults import FELT_SECONDS, ProcessNemesis
from tests.chaos.seats import Seats


class Dummy:
    """A member without behaviour; can be killed, paused and resumed."""

    name = "a"

    def kill(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@contextmanager
def calm(members: Sequence[Dummy]) -> Iterator[None]:
    yield


@pytest.fixture
def nemesis(tmp_path: Path) -> ProcessNemesis:
    member = Dummy()
    seats = SimpleNamespace(
        members=[member],
        nodes=[member],
        disks={member: SimpleNamespace(directory=tmp_path)},
        calm=calm,
        start=lambda *_: None,
        is_followed=lambda _: True,
    )
    nemesis = ProcessNemesis(cast("Seats", seats), Random(0))
    nemesis._ending.set()  # each fault heals at once
    return nemesis


@pytest.mark.parametrize(("file", "is_felt"), [("1.snap.inprogress", True), ("1.snap", False)])
def test_kill_counts_only_during_a_snapshot(
    nemesis: ProcessNemesis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, is_felt: bool
) -> None:
    def ask(member: Dummy, function: str) -> bool:
        (tmp_path / file).touch()
        return False

    monkeypatch.setattr(faults, "_ask", ask)
    assert nemesis._snapshot(is_killed=True) is is_felt


@pytest.mark.parametrize(("seconds", "is_felt"), [(FELT_SECONDS / 2, False), (2 * FELT_SECONDS, True)])
def test_pause_counts_only_if_it_outlasts_a_heartbeat(
    nemesis: ProcessNemesis, monkeypatch: pytest.MonkeyPatch, seconds: float, is_felt: bool
) -> None:
    moments = iter((100.0, 100.0 + seconds))
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    assert nemesis._pause(nemesis.seats.members) is is_felt
