"""Listings: every entry of a file in its place, with its session's epoch, and whether the entry is durable."""

from __future__ import annotations

from pathlib import Path

from flowstone.limestone.format import epoch_file
from flowstone.limestone.format.entries import Entry, EntryType, Marker, Torn
from flowstone.limestone.tools import listing
from flowstone.outside import production
from tests.limestone import damage, recorded

DISK = production().disk


def test_listing_shows_epoch_and_durability_of_each_entry(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"\x06" + damage.SIX[1:] + damage.SIX + damage.ENTRY[:-1])
    found = list(listing.listing(DISK, str(directory), "pwal_0000", 5))
    told = [(each.epoch, each.is_durable, type(each.token)) for each in found]
    one = [(Marker, True), (Entry, True), (Marker, True)]
    assert told == [
        *((4, counts, kind) for kind, counts in one),
        *((5, counts, kind) for kind, counts in one),
        *((6, False, kind) for kind, _ in one * 2),
        (None, False, Torn),
    ]
    assert [each.offset for each in found][:3] == [0, 9, 44]


def test_records_of_an_epoch_file_have_their_own_epoch(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_bytes(epoch_file.record(3) + epoch_file.record(9))
    found = list(listing.listing(DISK, str(tmp_path), "epoch", 0))
    assert [(each.epoch, each.is_durable) for each in found] == [(3, True), (9, True)]


def test_log_files_are_found_by_name() -> None:
    directory = str(recorded.HERE / "quirk-offline-remove/dir")
    assert listing.files(DISK, directory) == ["pwal_0000", "pwal_0000.compacted"]
    found = listing.listing(DISK, directory, "pwal_0000.compacted", 0)
    puts = {EntryType.NORMAL, EntryType.NORMAL_WITH_BLOB}
    assert {each.token.type for each in found if isinstance(each.token, Entry)} == puts
