"""The block walker: complete, valid blocks only, from any offset and in tables of any size."""

from __future__ import annotations

import crc32c
import numpy as np
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from flowstone.xlog.block import EOF_MAGIC, ZROW_MAGIC
from flowstone.xlog.block_table import (
    BLOCK_AT,
    BLOCK_COLUMNS,
    CONTENT_BOUND,
    FIXHEADER_SIZE,
    FULL,
    IS_ZSTD,
    NEED,
    OTHER,
    PAYLOAD_AT,
    PAYLOAD_END,
)
from flowstone.xlog.walk import checksum, checksums, walk
from tests.xlog.files import block, framed

A_MAP = b"\x80"
"""What rows begin with, as any payload does that is written."""
payloads = st.lists((st.binary(max_size=60) | st.integers(2030, 6000).map(bytes)).map(A_MAP.__add__), max_size=6)


def walked(data: bytes, room: int = 100, at: int = 0, verify: bool = True) -> tuple[list[list[int]], int, int]:
    table = np.zeros((room, BLOCK_COLUMNS), np.int64)
    count, at, why = walk(np.frombuffer(data, np.uint8), at, table, 0, verify)
    return table[:count].tolist(), at, why


@given(st.binary(max_size=100), st.integers(0, 20))
def test_checksum_equals_that_of_the_library(data: bytes, start: int) -> None:
    start = min(start, len(data))
    expected = crc32c.crc32c(data[start:], 0xFFFFFFFF) ^ 0xFFFFFFFF
    assert checksum(np.frombuffer(data, np.uint8), start, len(data)) == expected


@given(st.lists(st.binary(max_size=40), max_size=9))
def test_checksums_of_neighbouring_runs_equal_the_checksum_of_each(runs: list[bytes]) -> None:
    edges = np.cumsum([0, *map(len, runs)])
    out = np.empty(len(runs), np.int64)
    checksums(np.frombuffer(b"".join(runs) + b"\0", np.uint8), edges, out)
    assert out.tolist() == [checksum(np.frombuffer(run, np.uint8), 0, len(run)) for run in runs]


@given(payloads, st.binary(max_size=18))
def test_blocks_are_found_with_their_offsets_and_kinds(contents: list[bytes], tail: bytes) -> None:
    blocks = [block(content) for content in contents]
    found, at, why = walked(b"".join(blocks) + tail)
    assert (at, why) == (sum(map(len, blocks)), NEED)
    start = 0
    for entry, data, content in zip(found, blocks, contents, strict=True):
        is_zstd = data.startswith(ZROW_MAGIC)
        assert entry[BLOCK_AT] == start
        assert entry[PAYLOAD_AT] == start + FIXHEADER_SIZE
        assert entry[PAYLOAD_END] == start + len(data)
        assert entry[IS_ZSTD] == is_zstd
        assert entry[CONTENT_BOUND] >= len(content) if is_zstd else entry[CONTENT_BOUND] == len(content)
        start += len(data)


@given(st.integers(0, 100), st.booleans())
def test_zeros_are_not_a_block_although_their_checksum_matches(size: int, is_compressed: bool) -> None:
    sound = block(A_MAP)
    found, at, why = walked(sound + framed(bytes(size), is_compressed=is_compressed) + sound)
    assert (len(found), at, why) == (1, len(sound), OTHER)


@given(payloads.filter(bool), st.data())
def test_truncated_file_yields_the_complete_blocks(contents: list[bytes], data: st.DataObject) -> None:
    blocks = [block(content) for content in contents]
    whole = b"".join(blocks)
    cut = data.draw(st.integers(0, len(whole)))
    found, at, why = walked(whole[:cut])
    edges = np.cumsum([0, *map(len, blocks)]).tolist()
    assert at == max(edge for edge in edges if edge <= cut)
    assert len(found) == edges.index(at)
    assert why == NEED


@given(payloads.filter(bool), st.data())
def test_changed_byte_stops_the_walk_at_its_block_or_has_no_effect(contents: list[bytes], data: st.DataObject) -> None:
    blocks = [block(content) for content in contents]
    whole = bytearray(b"".join(blocks))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    edges = np.cumsum([0, *map(len, blocks)]).tolist()
    number = max(n for n, edge in enumerate(edges) if edge <= place)
    found, at, _ = walked(bytes(whole))
    before, _, _ = walked(b"".join(blocks))
    assert found[:number] == before[:number]
    if at == edges[number]:
        assert len(found) == number
    else:  # the checksum covers neither the padding nor the unused checksum nor the kind
        assert [entry[:IS_ZSTD] for entry in found] == [entry[:IS_ZSTD] for entry in before]
        assert place - edges[number] < FIXHEADER_SIZE


def test_full_table_is_reported_and_the_walk_resumes_from_there() -> None:
    data = b"".join(framed(A_MAP + bytes((n,))) for n in range(5))
    first, at, why = walked(data, room=2)
    assert (len(first), why) == (2, FULL)
    rest, at, why = walked(data, at=at)
    assert (len(rest), at, why) == (3, len(data), NEED)


def test_walk_stops_at_an_invalid_block() -> None:
    good = framed(b"x")
    for other in (EOF_MAGIC + bytes(20), bytes(30), good[:3] + b"\xac" + good[4:], good[:4] + b"\xa1" + good[5:]):
        assert walked(good + other)[1:] == (len(good), OTHER)


def test_walk_without_verification_ignores_checksums() -> None:
    damaged = bytearray(framed(b"abc"))
    damaged[-1] ^= 1
    assert walked(bytes(damaged))[1:] == (0, OTHER)
    assert walked(bytes(damaged), verify=False)[1:] == (len(damaged), NEED)


def test_payload_that_is_not_exactly_one_frame_has_no_bound() -> None:
    frame = zstandard.ZstdCompressor().compress(b"abc" * 100)
    for payload in (frame[:-1], frame + b"\0", b"x" * 30, frame + frame):
        (entry,), _, _ = walked(framed(payload, is_compressed=True))
        assert entry[CONTENT_BOUND] == -1
