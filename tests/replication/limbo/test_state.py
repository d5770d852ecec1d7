"""The initial state of a limbo; the stories show its changes."""

from __future__ import annotations

import pytest

from flowstone.box.dialect import Dialect
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.limbo.state import LimboState
from flowstone.replication.vclock import VClock


def new(dialect: Dialect) -> LimboState[str]:
    return LimboState(instance_id=1, dialect=dialect, quorum=2)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_new_queue_is_empty_and_has_no_owner(dialect: Dialect) -> None:
    state = new(dialect)
    assert (len(state), state.pending, state.newest, state.size) == (0, (), None, 0)
    assert (state.owner_id, state.is_owner, state.term, state.confirmed_lsn) == (0, False, 0, 0)
    assert (state.is_busy, state.is_in_rollback, state.is_read_only) == (False, False, False)
    assert state.checkpoint() == Promote(0, 0, 0, VClock())
    assert str(state.history) == "nobody owns the queue since term 0, confirmed up to lsn 0"


def test_new_queue_requires_a_promotion_only_in_newer_dialects() -> None:
    assert new(Dialect.V2_11).is_frozen
    assert not new(Dialect.V2_6).is_frozen
