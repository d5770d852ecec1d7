"""Positions in the log of a table: written, read back, and compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowstone.lake.table import is_replay, position_in, transactions_of, user_metadata
from flowstone.lake.table_schema import LakeError
from flowstone.replication.vclock import VClock
from tests.spark.lake_rows_given import OTHER_UUID, UUID, at


def read(transactions: dict[str, int], *commits: Any, uuid: str = UUID) -> VClock | None:
    return position_in(transactions.get, lambda: commits, uuid)


@pytest.mark.parametrize("position", [VClock(), at(5), at(7, r0=3, r31=2)])
def test_position_round_trips(position: VClock) -> None:
    assert read(dict(transactions_of(position, UUID))) == position
    assert read(dict(transactions_of(position, UUID)), uuid=OTHER_UUID) is None


def test_position_is_read_from_the_newest_commit_that_has_one() -> None:
    transactions = dict(transactions_of(at(5, r2=1), UUID)) | {f"flowstone/{UUID}": 9}
    commits = [
        {"operation": "OPTIMIZE"},
        {"userMetadata": json.dumps({"mine": 1})},
        {"userMetadata": user_metadata({OTHER_UUID: at(1)})},
        {"userMetadata": user_metadata({UUID: at(5, r2=4)})},
        {"userMetadata": user_metadata({UUID: at(5, r2=1)})},
    ]
    assert read(transactions, *commits) == at(5, r2=4)
    with pytest.raises(LakeError, match="no commit has the vclock"):
        read(transactions, commits[0])


def test_known_position_is_a_replay_and_another_branch_an_error() -> None:
    assert not is_replay("t", None, at(1))
    assert not is_replay("t", at(1), at(1, r2=1))
    assert is_replay("t", at(5), at(5))
    assert is_replay("t", at(5, r2=2), at(4, r2=2))
    with pytest.raises(LakeError, match=r"is at \{1: 5, 2: 2\}.*end at \{1: 6, 2: 1\}"):
        is_replay("t", at(5, r2=2), at(6, r2=1))
