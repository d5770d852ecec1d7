"""The compaction catalog: the original's text, lines in any order, and a copy that survives crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import catalog, copying, names
from flowstone.limestone.format.catalog import Catalog, encode, parse
from flowstone.outside import Disk, production
from tests.limestone import original, recorded
from tests.limestone.crashes import DIRECTORY, crashed, fresh

TEXT = b"""COMPACTION_CATALOG_HEADER
COMPACTED_FILE pwal_0000.compacted 1
DETACHED_PWAL pwal_0000.01794772615522.0
DETACHED_PWAL pwal_0001.01794772615522.0
MAX_EPOCH_ID 7
MAX_BLOB_ID 3
COMPACTION_CATALOG_FOOTER
"""
FULL = Catalog((("pwal_0000.compacted", 1),), ("pwal_0000.01794772615522.0", "pwal_0001.01794772615522.0"), 7, 3)
words = st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"]), min_size=1, max_size=10)
catalogs = st.builds(
    Catalog,
    st.lists(st.tuples(words, recorded.ids), max_size=3).map(lambda found: tuple(sorted(found))),
    st.lists(words, max_size=3).map(lambda found: tuple(sorted(found))),
    recorded.ids,
    recorded.ids,
)


def test_recorded_catalogs_are_read_and_written_byte_for_byte() -> None:
    for path in sorted(recorded.HERE.rglob(names.CATALOG)):
        data = path.read_bytes()
        assert encode(parse(data, str(path))) == data
    assert parse(TEXT, "x") == FULL
    assert encode(FULL) == TEXT
    assert encode(Catalog()) == (recorded.HERE / "basic" / "master-dir" / names.CATALOG).read_bytes()


@given(catalogs)
def test_catalog_round_trips(found: Catalog) -> None:
    assert parse(encode(found), "x") == found


def test_lines_may_be_in_any_order_with_blank_lines() -> None:
    header, *lines, footer, _ = TEXT.split(b"\n")
    assert parse(b"\n".join([header, *reversed(lines), b"", b"  ", footer, b""]), "x") == FULL


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b"COMPACTION_CATALOG_HEADER", b"HEADER", "header is missing"),
        (b"COMPACTION_CATALOG_FOOTER\n", b"", "footer is missing"),
        (b"MAX_EPOCH_ID 7\n", b"", "MAX_EPOCH_ID is missing"),
        (b"MAX_EPOCH_ID 7", b"MAX_EPOCH_ID", "unknown line"),
        (b"MAX_EPOCH_ID 7", b"MAX_EPOCH_ID -7", "not a 64-bit number"),
        (b"MAX_BLOB_ID 3", b"MAX_BLOB_ID 18446744073709551616", "not a 64-bit number"),
        (b"MAX_BLOB_ID 3", b"COLOUR blue", "COLOUR"),
        (b"FOOTER\n", b"FOOTER\nMAX_BLOB_ID 4\n", "after the footer"),
        (b"DETACHED_PWAL", b"DETACHED\xff", "not UTF-8"),
    ],
)
def test_invalid_catalog_is_rejected(old: bytes, new: bytes, word: str) -> None:
    with pytest.raises(DamagedFile, match=word):
        parse(TEXT.replace(old, new, 1), "x")


def test_every_truncation_is_rejected_except_of_the_last_newline() -> None:
    for size in range(len(TEXT) - 1):
        with pytest.raises(DamagedFile):
            parse(TEXT[:size], "x")
    assert parse(TEXT[:-1], "x") == FULL


def test_name_that_does_not_fit_a_line_is_not_written() -> None:
    for name in ("", "a b", "a\nb"):
        with pytest.raises(LocalProtocolError):
            encode(Catalog(detached=(name,)))


def test_previous_catalog_is_kept_unless_unreadable(tmp_path: Path) -> None:
    disk, directory = production().disk, str(tmp_path)
    assert catalog.read(disk, directory) is None
    catalog.write(disk, directory, Catalog())
    catalog.write(disk, directory, FULL)
    assert parse((tmp_path / names.CATALOG_BACK).read_bytes(), "x") == Catalog()
    (tmp_path / names.CATALOG).write_bytes(TEXT[:50])
    assert catalog.read(disk, directory) == Catalog()
    catalog.write(disk, directory, FULL)
    assert parse((tmp_path / names.CATALOG_BACK).read_bytes(), "x") == Catalog()
    (tmp_path / names.CATALOG_BACK).unlink()
    (tmp_path / names.CATALOG).write_bytes(b"")
    with pytest.raises(DamagedFile):
        catalog.read(disk, directory)


def test_crash_leaves_the_old_or_the_new_catalog() -> None:
    def prepare(disk: Disk) -> None:
        catalog.write(disk, DIRECTORY, Catalog())
        catalog.write(disk, DIRECTORY, Catalog(max_epoch_id=1))

    for disk, is_done in crashed(prepare, lambda disk: catalog.write(disk, DIRECTORY, FULL)):
        found = catalog.read(disk, DIRECTORY)
        assert found in ((FULL,) if is_done else (Catalog(max_epoch_id=1), FULL))
        assert original.listed(disk, DIRECTORY) == found


@pytest.mark.parametrize("main", [None, b"", TEXT[:50]], ids=["missing", "empty", "torn"])
def test_settle_restores_the_main_file_after_any_crash(main: bytes | None) -> None:
    """A crash of the original between its rename and its write leaves this state."""

    def prepare(disk: Disk) -> None:
        copying.write(disk, f"{DIRECTORY}/{names.CATALOG_BACK}", TEXT)
        if main is not None:
            copying.write(disk, f"{DIRECTORY}/{names.CATALOG}", main)
        disk.sync_directory(DIRECTORY)

    for disk, is_done in crashed(prepare, lambda disk: catalog.settle(disk, DIRECTORY)):
        if is_done:
            assert original.listed(disk, DIRECTORY) == FULL
        catalog.settle(disk, DIRECTORY)
        assert original.listed(disk, DIRECTORY) == catalog.read(disk, DIRECTORY) == FULL
        assert names.CATALOG_TEMPORARY not in disk.list_directory(DIRECTORY)


def test_settle_leaves_two_unreadable_files_alone() -> None:
    _, disk = fresh()
    for name in (names.CATALOG, names.CATALOG_BACK):
        copying.write(disk, f"{DIRECTORY}/{name}", TEXT[:50])
    catalog.settle(disk, DIRECTORY)
    with pytest.raises(DamagedFile):
        catalog.read(disk, DIRECTORY)


def test_back_file_is_never_a_hard_link_to_the_main_file(tmp_path: Path) -> None:
    """The original renames the main file to `.back` and then truncates the main file; with one inode both would be
    lost.
    """
    disk = production().disk
    catalog.write(disk, str(tmp_path), Catalog())
    catalog.write(disk, str(tmp_path), FULL)
    main, back = (tmp_path / name for name in (names.CATALOG, names.CATALOG_BACK))
    assert (main.stat().st_nlink, back.stat().st_nlink) == (1, 1)


@pytest.mark.parametrize("room", range(0, 300, 30))
def test_full_disk_leaves_the_old_catalog_in_place(room: int) -> None:
    machine, disk = fresh()
    old = Catalog(max_epoch_id=1)
    catalog.write(disk, DIRECTORY, old)
    machine.room = room
    try:
        catalog.write(disk, DIRECTORY, FULL)
        written = FULL
    except OSError:
        written = old
    assert original.listed(disk, DIRECTORY) == catalog.read(disk, DIRECTORY) == written
