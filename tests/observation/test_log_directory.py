"""Reading the directory of a real server or of a node without changing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.history.files import NoSuchLog
from flowstone.observation.log_directory import digests_of, look_into, transactions_behind
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from tests import real_tarantool
from tests.observation.directories import LOGS, ROWS, leave

KINDS = pytest.mark.parametrize("kind", ["real", "ours"])


@KINDS
def test_inspection_covers_all_files_of_a_server(kind: str, tmp_path: Path) -> None:
    seen = look_into(production(), str(leave(kind, tmp_path / "data")))
    assert len(seen.listing.snapshots) == LOGS
    assert (seen.is_in_use, seen.foreign, seen.unreadable, seen.failure) == (False, (), (), None)
    assert seen.instance_uuid
    assert seen.replicaset_uuid
    assert seen.end.get(1) >= LOGS * ROWS
    assert seen.end == seen.end_of_logs
    newest = seen.listing.newest_snapshot()
    assert newest is not None
    assert newest.path in seen.needed()
    assert seen.listing.snapshots[0].path not in seen.needed()


@KINDS
def test_rows_are_found_by_lsn_with_the_names_of_their_spaces(kind: str, tmp_path: Path) -> None:
    seen = look_into(production(), str(leave(kind, tmp_path / "data")))
    assert len(digests_of(production(), seen)) == seen.end.get(1)
    last = VClock({1: seen.end.get(1) - 2})
    transactions, schema, is_whole = transactions_behind(production(), seen, last, 10)
    assert [one.lsn for one in transactions] == [seen.end.get(1) - 1, seen.end.get(1)]
    assert is_whole
    assert schema.space(600).name == "things"
    assert transactions_behind(production(), seen, VClock(), 5)[2] is False


def test_directory_of_a_running_server_is_reported_as_in_use(tmp_path: Path) -> None:
    with real_tarantool.serve(tmp_path / "data"):
        assert look_into(production(), str(tmp_path / "data")).is_in_use
    assert not look_into(production(), str(tmp_path / "data")).is_in_use


def test_directory_without_logs_is_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(NoSuchLog):
            look_into(production(), str(path))
