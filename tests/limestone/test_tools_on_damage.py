"""The tools on files with any damage: an answer or a clean error, and repaired directories are intact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.format.snippets import snippets
from flowstone.limestone.store.recovery import recover
from flowstone.limestone.tools import inspection, listing, repair
from flowstone.limestone.tools.offline_compaction import compact_offline
from flowstone.outside import production
from tests.limestone import damage, recorded

OUTSIDE = production()
DISK = OUTSIDE.disk
OURS = Manifest(damage.UUID)

sessions = st.lists(st.tuples(st.integers(1, 7), st.lists(recorded.entries, max_size=3)), max_size=4)
places = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=3)


def written(found: list[tuple[int, list[Entry]]], changes: list[tuple[int, int]], cut: int) -> bytes:
    data = bytearray()
    for epoch, entries in found:
        data += encode(Marker(EntryType.MARKER_BEGIN, epoch))
        data += b"".join(map(encode, entries))
        data += encode(Marker(EntryType.MARKER_END, epoch))
    for at, value in changes:
        if at < len(data):
            data[at] = value
    return bytes(data[: len(data) - cut])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "data"


@given(sessions, places, st.integers(0, 30), st.booleans(), st.binary(max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_directory_is_judged_and_intact_after_a_repair(
    place: Path, found: list[tuple[int, list[Entry]]], changes: list[tuple[int, int]], cut: int, cuts: bool, more: bytes
) -> None:
    shutil.rmtree(place, ignore_errors=True)
    directory = str(damage.write(place, b""))
    data = written(found, changes, cut)
    (place / "pwal_0000").write_bytes(data)
    (place / names.EPOCH).write_bytes((place / names.EPOCH).read_bytes() + more)
    list(snippets(DISK, f"{directory}/pwal_0000"))
    list(listing.listing(DISK, directory, "pwal_0000", 5))
    before = inspection.inspect(DISK, directory, OURS)
    planned = repair.plan(DISK, directory, 0, cuts=cuts)
    is_lost = planned.status is repair.RepairStatus.UNREPAIRABLE
    assert is_lost == (before.status is inspection.InspectionStatus.UNREPAIRABLE)
    repair.execute(OUTSIDE, directory, OURS, planned, keeps_backup=False)
    if is_lost:
        assert (place / "pwal_0000").read_bytes() == data
        with pytest.raises(LimestoneError):
            compact_offline(OUTSIDE, directory, keeps_backup=False)
        return
    after = inspection.inspect(DISK, directory, OURS)
    assert after.status is inspection.InspectionStatus.OK
    assert after.counts == before.counts
    assert after.max_epoch <= before.max_epoch
    rows = recover(DISK, directory, repairs=False).snapshot.rows()
    compact_offline(OUTSIDE, directory, keeps_backup=False)
    compacted = recover(DISK, directory, repairs=False).snapshot.rows()
    assert compacted == [row._replace(version=WriteVersion(0, 0)) for row in rows]
