"""Files of real servers 2.6, 2.11 and 3.8 decode to the rows of an independent listing, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstone.iproto.constants import Flag, Key
from flowstone.iproto.row import Row, decode_row
from flowstone.iproto.scan import SPAN
from flowstone.outside import production
from flowstone.xlog.block import decode_fixheader
from flowstone.xlog.block_table import BLOCK_AT, FIXHEADER_SIZE, IS_ZSTD, PAYLOAD_AT, PAYLOAD_END
from flowstone.xlog.meta import encode
from flowstone.xlog.reader import Ending, EndingKind, LogFile
from tests.vectors import recorded

FILES = recorded.files()
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(recorded.HERE).as_posix())


def opened(path: Path) -> LogFile:
    return LogFile.open(production().disk, str(path))


def listed(path: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in recorded.listing(path) if kind in entry]


def listed_bytes(entry: dict[str, Any]) -> bytes:
    """Return the listed bytes of the row, at most 300."""
    return bytes.fromhex(entry["row"].removesuffix("..."))


def row_of(entry: dict[str, Any]) -> Row:
    """Return the row that an entry of the listing describes; its bytes are compared, never decoded."""
    header = {int(key): value for key, value in entry["header"].items()}
    lsn = header.get(Key.LSN, 0)
    flags = header.get(Key.FLAGS, 0)
    return Row(
        header[Key.REQUEST_TYPE],
        replica_id=header.get(Key.REPLICA_ID, 0),
        group_id=header.get(Key.GROUP_ID, 0),
        lsn=lsn,
        timestamp=header[Key.TIMESTAMP],
        tsn=(lsn - header.get(Key.TSN, 0)) % 2**64,
        flags=flags if Key.TSN in header else flags | Flag.COMMIT.value,
        raw=listed_bytes(entry),
    )


def test_all_recorded_files_exist() -> None:
    assert len(FILES) == 85
    assert sum(len(listed(path, "row")) for path in FILES) == 16614


@every_file
def test_text_header_equals_the_listing(path: Path) -> None:
    (entry,) = listed(path, "meta")
    with opened(path) as log:
        assert log.first_block == entry["size"]
        assert encode(log.meta).decode().splitlines() == [*entry["meta"], ""]


@every_file
def test_blocks_have_the_listed_offsets_sizes_and_checksums(path: Path) -> None:
    with opened(path) as log:
        found = []
        for chunk in log.chunks():
            for at, start, end, is_zstd in chunk.blocks[:, [BLOCK_AT, PAYLOAD_AT, PAYLOAD_END, IS_ZSTD]].tolist():
                fixheader = chunk.raw[at : at + FIXHEADER_SIZE]
                decoded = decode_fixheader(fixheader)
                assert decoded is not None
                assert start == at + FIXHEADER_SIZE
                found.append(
                    {
                        "block": chunk.base + at,
                        "zstd": bool(is_zstd),
                        "fixheader": fixheader.hex(),
                        "size": end - start,
                        "crc": decoded.crc,
                    }
                )
    assert found == listed(path, "block")


@every_file
def test_rows_have_the_listed_headers_and_bytes(path: Path) -> None:
    expected = [row_of(entry) for entry in listed(path, "row")]
    with opened(path) as log:
        found = list(log.rows())
    for row, entry in zip(found, listed(path, "row"), strict=True):
        assert row == decode_row(row.raw)
        row.body = b""
        if entry["row"].endswith("..."):
            row.raw = row.raw[: len(listed_bytes(entry))]
    assert found == expected


@every_file
def test_rows_have_the_block_offset_of_the_listing(path: Path) -> None:
    expected: list[int] = []
    block = -1
    for entry in recorded.listing(path):
        block = entry.get("block", block)
        if "row" in entry:
            expected.append(block)
    with opened(path) as log:
        found = [offset for slab in log.slabs() for offset in slab.offsets[slab.cells[SPAN]].tolist()]
    assert found == expected


@every_file
def test_file_ends_at_the_listed_offset(path: Path) -> None:
    (entry,) = listed(path, "end")
    with opened(path) as log:
        for _ in log.chunks():
            pass
        assert log.ending == Ending(EndingKind.COMPLETE, entry["end"])
    assert entry["end"] + 4 + entry["after"] == path.stat().st_size


@every_file
def test_transactions_of_a_recorded_log_are_complete(path: Path) -> None:
    with opened(path) as log:
        grouped = [row.lsn for transaction in log.transactions() for row in transaction.rows]
    assert grouped == [entry["header"].get("3", 0) for entry in listed(path, "row")]
