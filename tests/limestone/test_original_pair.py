"""Our replica under a model of the original's master, in all of its message orders, with crashes of either side."""

from __future__ import annotations

from random import Random

import pytest

from tests.conftest import FULL
from tests.limestone.original_master import Ledger, Life, Session
from tests.limestone.original_pair import OriginalPair, run
from tests.simulation.simulation import Simulation, simulated


@pytest.mark.parametrize("seed", range(2000 if FULL else 8))
def test_acknowledged_data_is_never_lost_in_any_message_order(seed: int) -> None:
    violations, pair = run(seed)
    assert violations == []
    assert pair.ledger.commit_count > 10
    assert pair.hurt_count > 3
    assert pair.judged_count > 3


@simulated()
async def test_missing_and_unexpected_data_is_found(sim: Simulation) -> None:
    pair = OriginalPair(sim, Random(1))
    pair.start()
    await sim.sleep(1.0)
    never_sent = Session(Life(1), 1, {b"never sent": b""}, is_acknowledged=True)
    pair.ledger.sessions.append(never_sent)
    shown = next(session for session in pair.ledger.sessions if session.must_be_there and session.rows)
    shown.is_ended = shown.is_acknowledged = False
    pair.ledger.committed += 10**6
    found = " ".join(await pair.finish())
    assert "an acknowledged session of epoch 1 is lost" in found
    assert f"there is a session of epoch {shown.epoch} that never ended" in found
    assert "is forgotten" in found


def test_session_is_required_only_if_its_own_master_committed_it() -> None:
    session = Session(Life(4), 5, is_acknowledged=True)
    assert not session.must_be_there
    session.life.committed = 5
    assert session.must_be_there
    assert not Ledger().sessions
