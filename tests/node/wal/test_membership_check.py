"""The check that rejects the data of an expelled member at the start, without changing it."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from flowstone import Node
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto import errors
from flowstone.node.wal import membership_check
from flowstone.node.wal.membership_check import check_files
from flowstone.node.wal.recovery import find_files, recover
from flowstone.outside import production
from tests.node.expelled_files import leave_expelled

OUTSIDE = production()


async def check(directory: Path, *, is_anonymous: bool = False) -> None:
    files = find_files(OUTSIDE.disk, str(directory), str(directory))
    await check_files(OUTSIDE, files, is_anonymous=is_anonymous, force=False)


@pytest.mark.parametrize(("is_anonymous", "kind"), [(False, errors.UnknownReplica), (True, errors.Cfg)])
async def test_files_of_an_expelled_member_are_rejected_like_by_a_start(
    tmp_path: Path, is_anonymous: bool, kind: type[errors.TarantoolError]
) -> None:
    uuid = await leave_expelled(tmp_path / "data", tmp_path / "other")
    with pytest.raises(kind) as checked:
        await check(tmp_path / "data", is_anonymous=is_anonymous)
    assert str(uuid) in checked.value.message
    with pytest.raises(kind) as started:
        await Node(tmp_path / "data", replication_anon=is_anonymous, read_only=is_anonymous).start()
    assert str(started.value) == str(checked.value)
    await check(tmp_path / "other")


async def test_data_is_recovered_only_if_rows_of_cluster_are_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recoveries: list[str] = []

    async def counted(*arguments: object, **options: object) -> object:
        recoveries.append("recover")
        return await recover(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(membership_check, "recover", counted)
    async with Node(tmp_path) as node:
        await node.space(CLUSTER_ID).insert([2, str(UUID(int=2))])
    await check(tmp_path)
    await check(tmp_path, is_anonymous=True)
    assert recoveries == []
    async with Node(tmp_path) as node:
        await node.space(CLUSTER_ID).delete(2)
    await check(tmp_path)
    assert recoveries == ["recover"]
