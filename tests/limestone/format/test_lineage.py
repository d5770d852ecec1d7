"""Former identities of a directory: kept across changes, limited in number, and never fatal."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.limestone.format import lineage
from flowstone.outside import Disk, production
from tests.limestone.crashes import DIRECTORY, crashed

DISK = production().disk
UUIDS = [f"{number:08x}-1111-4111-8111-111111111111" for number in range(50)]


def test_latest_identities_are_remembered_once_each(tmp_path: Path) -> None:
    assert lineage.read(DISK, str(tmp_path)) == ()
    for uuid in UUIDS:
        lineage.add(DISK, str(tmp_path), [uuid, None])
    lineage.add(DISK, str(tmp_path), [UUIDS[-2].upper()])
    kept = lineage.read(DISK, str(tmp_path))
    assert len(kept) == lineage.FORMER_MAX
    assert kept[:3] == (UUIDS[-2], UUIDS[-1], UUIDS[-3])
    assert [path.name for path in tmp_path.iterdir()] == [lineage.FILE]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"formerly": 7}', b'{"formerly": ["x", 7, null]}', b"\xff"])
def test_unreadable_lineage_is_empty(tmp_path: Path, data: bytes) -> None:
    (tmp_path / lineage.FILE).write_bytes(data)
    assert lineage.read(DISK, str(tmp_path)) == ()
    lineage.add(DISK, str(tmp_path), UUIDS[:1])
    assert lineage.read(DISK, str(tmp_path)) == (UUIDS[0],)


def test_crash_leaves_the_old_or_the_new_lineage() -> None:
    def prepare(disk: Disk) -> None:
        lineage.add(disk, DIRECTORY, UUIDS[:1])

    for disk, is_done in crashed(prepare, lambda disk: lineage.add(disk, DIRECTORY, UUIDS[1:2])):
        found = lineage.read(disk, DIRECTORY)
        assert found in ([(UUIDS[1], UUIDS[0])] if is_done else [(UUIDS[0],), (UUIDS[1], UUIDS[0])])
