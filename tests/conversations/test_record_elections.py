"""Real servers repeat the recorded contest: the recorder works, and its recordings are complete."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowstone.iproto.constants import RequestType
from tests.conversations import record_elections, recording
from tests.interop.versions import Binary, parameters
from tests.replication.test_recorded_logs import rows_of

RECORDED = ("2.11", "3.8")


@pytest.mark.real
@pytest.mark.parametrize("binary", [each for series in RECORDED for each in parameters(series)])
def test_real_servers_contest_as_recorded(binary: Binary, tmp_path: Path) -> None:
    target = tmp_path / "recording"
    directory = tmp_path / "servers"
    directory.mkdir()
    asyncio.run(record_elections.record(binary.path, directory, target))
    logs = [path for node in record_elections.NODES for path in (target / "files" / node).glob("*.xlog")]
    kinds = {row.type for path in logs for row in rows_of(path)}
    wanted = {RequestType.RAFT, RequestType.RAFT_PROMOTE, RequestType.RAFT_CONFIRM, RequestType.RAFT_ROLLBACK}
    assert kinds >= wanted | {RequestType.NOP}
    names = sorted(path.name.removesuffix(".idx") for path in target.glob("*.idx"))
    recorded = recording.names(".".join(map(str, binary.version[:2])), record_elections.SCENARIO)
    assert set(names) >= {name for name in recorded if name.endswith("-01")}
