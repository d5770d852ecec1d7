"""Blocks: our encoder reproduces those of a real server byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import limits
from flowstone.outside import production
from flowstone.xlog import block
from flowstone.xlog.block import (
    COMPRESS_THRESHOLD,
    EOF_MAGIC,
    ROW_MAGIC,
    ZROW_MAGIC,
    Fixheader,
    checksum,
    decode_fixheader,
    encode_block,
    encode_fixheader,
    new_compressor,
)
from flowstone.xlog.block_table import BLOCK_COLUMNS, FIXHEADER_SIZE, OTHER
from flowstone.xlog.errors import BlockTooLarge
from flowstone.xlog.reader import LogFile
from flowstone.xlog.walk import walk
from tests.places import VECTORS

LOGS = VECTORS / "xlog"
COMPRESSOR = new_compressor()
RECORDED = sorted(LOGS.glob("*.xlog")) + sorted(LOGS.glob("*.snap"))


def recorded_blocks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Return fixheader and payload of every block of a recorded file."""
    data = path.read_bytes()
    at = data.index(b"\n\n") + 2
    while data[at : at + 4] != EOF_MAGIC:
        found = decode_fixheader(data[at : at + FIXHEADER_SIZE])
        assert found is not None
        end = at + FIXHEADER_SIZE + found.size
        yield data[at : at + FIXHEADER_SIZE], data[at + FIXHEADER_SIZE : end]
        at = end
    assert at + 4 == len(data)


def unpacked(payload: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(payload)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_fixheaders_decode_and_encode_to_themselves(path: Path) -> None:
    blocks = list(recorded_blocks(path))
    assert blocks
    for fixheader, payload in blocks:
        found = decode_fixheader(fixheader)
        assert found is not None
        assert found.crc == checksum(payload)
        assert encode_fixheader(*found) == fixheader


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_encoded_rows_of_a_recorded_block_equal_the_block(path: Path) -> None:
    """Compare plain blocks byte for byte, and the rows of compressed ones (our frames have a content size)."""
    with LogFile.open(production().disk, str(path)) as log:
        rows = [row.raw for row in log.rows()]
    for fixheader, payload in recorded_blocks(path):
        content = unpacked(payload) if fixheader.startswith(ZROW_MAGIC) else payload
        mine: list[bytes] = []
        while len(content) > sum(map(len, mine)):
            mine.append(rows.pop(0))
        built = b"".join(encode_block(mine, COMPRESSOR))
        if fixheader.startswith(ROW_MAGIC):
            assert built == fixheader + payload
        else:
            assert built.startswith(ZROW_MAGIC)
            assert unpacked(built[FIXHEADER_SIZE:]) == content
    assert not rows


def test_blocks_are_compressed_from_two_kibibytes_including_the_fixheader() -> None:
    last_plain = bytes(COMPRESS_THRESHOLD - FIXHEADER_SIZE - 1)
    assert b"".join(encode_block(last_plain, COMPRESSOR)).startswith(ROW_MAGIC)
    assert b"".join(encode_block(last_plain + b"\0", COMPRESSOR)).startswith(ZROW_MAGIC)


@given(st.booleans(), st.integers(0, 2**40), st.integers(0, 2**32 - 1))
def test_fixheader_has_19_bytes_and_round_trips(is_compressed: bool, size: int, crc: int) -> None:
    data = encode_fixheader(is_compressed, size, crc)
    assert len(data) == FIXHEADER_SIZE
    assert decode_fixheader(data) == Fixheader(is_compressed, size, crc)


@given(st.binary(max_size=25) | st.binary(max_size=20).map(lambda tail: ROW_MAGIC + tail))
def test_any_bytes_yield_a_fixheader_or_none(data: bytes) -> None:
    found = decode_fixheader(data)
    assert found is None or data[:3] == ROW_MAGIC[:3]


@given(st.binary(min_size=FIXHEADER_SIZE, max_size=FIXHEADER_SIZE).map(lambda data: ROW_MAGIC + data[4:]))
def test_walker_reads_the_same_fixheader(data: bytes) -> None:
    table = np.zeros((1, BLOCK_COLUMNS), np.int64)
    found = decode_fixheader(data)
    count, _, why = walk(np.frombuffer(data, np.uint8), 0, table, 0, False)
    assert (why == OTHER) == (found is None)
    assert count == (found is not None and found.size == 0)


@pytest.mark.parametrize("size", [2**63 - 1, 2**63, 2**64 - 1])
def test_size_beyond_63_bits_is_rejected(size: int) -> None:
    assert (decode_fixheader(encode_fixheader(False, size, 0)) is not None) == (size < 2**63)


@given(st.lists(st.binary(max_size=600), max_size=20))
def test_rows_of_a_block_round_trip(rows: list[bytes]) -> None:
    fixheader, payload = encode_block(rows, COMPRESSOR)
    found = decode_fixheader(fixheader)
    assert found is not None
    assert (found.size, found.crc) == (len(payload), checksum(payload))
    assert (unpacked(payload) if found.is_compressed else payload) == b"".join(rows)


def test_oversized_block_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "BLOCK_SIZE_MAX", 1000)
    assert limits.BLOCK_SIZE_MAX > 1000
    with pytest.raises(BlockTooLarge, match="block at byte 77 holds 1001 bytes: at most 1000"):
        encode_block([b"x" * 1001], COMPRESSOR, "a.xlog", 77)


def test_checksum_is_the_raw_crc32c() -> None:
    # The usual CRC32C of "123456789" is 0xe3069283; this is the value without the two inversions.
    assert checksum(b"123456789") == 0x58E3FA20
