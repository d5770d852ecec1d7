"""Backups: complete or absent, never written over anything, and checked against what was backed up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import flowstone
from flowstone.archive.archive import Archive
from flowstone.archive.backup import LIST, BackupExists, DamagedBackup, back_up_archive, back_up_member, check_backup
from flowstone.archive.manifest import NotAnArchive
from flowstone.errors import FlowstoneError
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.errors import XlogError
from tests.real_tarantool import free_port

DISK = SystemDisk()


@pytest.fixture
async def member(tmp_path: Path) -> AsyncIterator[flowstone.Node]:
    async with flowstone.Node(
        tmp_path / "member", listen=f"127.0.0.1:{free_port()}", user=("app", "secret"), checkpoint_count=100
    ) as node:
        space = await node.create_space("orders", format=[("id", "unsigned"), ("item", "string")])
        await space.create_index("primary")
        for number in range(50):
            await space.insert((number, "tea"))
        yield node


def uri(member: flowstone.Node) -> str:
    return f"app:secret@{member.address}"


async def keys(directory: Path) -> list[int]:
    async with flowstone.Node(directory) as node:
        return [found[0] for found in node.space("orders").select(limit=1000)]


async def test_backup_of_a_member_has_its_data_and_is_complete(member: flowstone.Node, tmp_path: Path) -> None:
    target = tmp_path / "backups" / "may"
    made = await back_up_member(uri(member), str(target))
    assert check_backup(DISK, str(target)) == made
    assert made.settled == made.position == {1: member.info()["lsn"]}
    assert {file.name for file in made.files} | {LIST} == {path.name for path in target.iterdir()}
    assert [path.name for path in target.parent.iterdir()] == ["may"]
    with pytest.raises(BackupExists, match="may exists"):
        await back_up_member(uri(member), str(target))
    assert await keys(target) == list(range(50))


async def test_archive_in_use_can_be_backed_up(member: flowstone.Node, tmp_path: Path) -> None:
    source = tmp_path / "archive"
    async with Archive(uri(member), source) as archive:
        for number in range(50, 80):
            await member.space("orders").insert((number, "tea"))
        async with asyncio.timeout(30):
            while archive.settled.get(1) < member.info()["lsn"]:  # noqa: ASYNC110 - it is told to nobody
                await asyncio.sleep(0.01)
        target = tmp_path / "copy"
        made = await asyncio.to_thread(back_up_archive, DISK, str(source), str(target))
        for number in range(80, 90):
            await member.space("orders").insert((number, "tea"))
    assert check_backup(DISK, str(target)) == made
    found = await keys(target)
    assert found == list(range(len(found)))
    assert 80 <= len(found) <= 90


async def test_failed_backup_leaves_no_directory_with_its_name(member: flowstone.Node, tmp_path: Path) -> None:
    source = tmp_path / "archive"
    await Archive(uri(member), source).run(once=True)
    (snapshot,) = source.glob("*.snap")
    data = bytearray(snapshot.read_bytes())
    data[len(data) // 2] ^= 0xFF
    snapshot.write_bytes(data)
    with pytest.raises(XlogError):
        back_up_archive(DISK, str(source), str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()
    assert list((tmp_path / "copy.inprogress").iterdir()) == []
    with pytest.raises(FlowstoneError):
        await back_up_member(f"127.0.0.1:{free_port()}", str(tmp_path / "nobody"))
    assert not (tmp_path / "nobody").exists()


async def test_changed_or_missing_file_of_a_backup_is_named(member: flowstone.Node, tmp_path: Path) -> None:
    target = tmp_path / "may"
    await back_up_member(uri(member), str(target))
    (snapshot,) = target.glob("*.snap")
    data = snapshot.read_bytes()
    snapshot.write_bytes(data[:-1] + bytes((data[-1] ^ 1,)))
    with pytest.raises(DamagedBackup, match=snapshot.name):
        check_backup(DISK, str(target))
    snapshot.unlink()
    with pytest.raises(DamagedBackup, match=snapshot.name):
        check_backup(DISK, str(target))
    with pytest.raises(DamagedBackup, match="not a complete backup"):
        check_backup(DISK, str(tmp_path))


async def test_directory_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAnArchive, match=r"manifest\.json"):
        back_up_archive(DISK, str(tmp_path), str(tmp_path / "copy"))
