"""Forged files: their readers report the error and its place, in bounded memory, and accept no row."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import UUID

import pytest
import zstandard

import flowstone
from flowstone.archive.archive import Archive
from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from flowstone.xlog.block import EOF_MAGIC, encode_fixheader
from tests.hostile.liar import MARK, SPACE_ID, Liar, Role, Talk, row, tuple_body
from tests.xlog.files import framed

MEMORY_MAX: Final = BLOCK_SIZE_MAX + (128 << 20)
"""A block without a content size is decompressed up to the bound; the file is read in parts."""


def replace(lsn: int) -> bytes:
    return Row(3, 1, lsn=lsn, tsn=lsn, flags=1, timestamp=1.5, body=tuple_body(lsn)).encode()


TRUE: Final = replace(99)

BLOCKS: Final = {
    "bomb": (framed(zstandard.compress(bytes(2 * BLOCK_SIZE_MAX)), True), r"holds \d+ bytes: at most \d+ are allowed"),
    "bomb of unknown size": (
        framed(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2 * BLOCK_SIZE_MAX)), True),
        r"at most \d+ are allowed",
    ),
    "wrong checksum": (encode_fixheader(False, len(TRUE), 5) + TRUE, r"damaged at byte \d+.*checksum"),
    "size of 4 gigabytes": (encode_fixheader(False, 2**32 - 1, 5) + TRUE, r"4294967295|no end|damaged"),
    "no zstd": (framed(TRUE, True), r"damaged at byte \d+.*zstd"),
    "no row": (framed(MARK.encode() * 20), r"damaged at byte \d+|is no row|no rows"),
    "row of type 99": (framed(Row(99, 1, lsn=9, tsn=9, body=tuple_body(9)).encode()), r"unexpected row of type 99"),
    "going back": (framed(replace(1)), r"LSN|backwards|damaged"),
}
"""The bytes after the valid rows of a log, and the expected error."""

OF_ROWS: Final = ("row of type 99", "going back")
"""A reader that does not apply rows notices only that its server lacks them."""


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_MAX


def put_behind(directory: Path, block: bytes) -> Path:
    """A log with a lie, followed by more valid rows."""
    path = max(directory.glob("*.xlog"))
    path.write_bytes(path.read_bytes().removesuffix(EOF_MAGIC) + block + framed(TRUE) + EOF_MAGIC)
    return path


async def node_with_rows(directory: Path) -> None:
    async with flowstone.Node(directory, dialect="2.6") as node:
        space = await node.create_space("plain", id=SPACE_ID)
        await space.create_index("pk")
        await space.replace([1, "true"])


async def archive_with_rows(directory: Path) -> None:
    async def be_honest(talk: Talk) -> None:
        await talk.subscribed(vclock=VClock({1: 4, 3: 5}))
        await talk.say(row(5, body=tuple_body(5, "true")))

    role = Role(Dialect.V2_6, UUID("55555555-5555-4555-8555-555555555555"), VClock({1: 4}))
    async with Liar(role, be_honest) as server, asyncio.timeout(60):
        await Archive(server.address, directory, replication_timeout=0.2).run(once=True)


@pytest.mark.parametrize("kind", BLOCKS)
async def test_node_does_not_start_from_a_forged_log(kind: str, tmp_path: Path) -> None:
    block, reason = BLOCKS[kind]
    await node_with_rows(tmp_path)
    path = put_behind(tmp_path, block)
    with little_memory(), pytest.raises(FlowstoneError, match=reason) as caught:
        await flowstone.Node(tmp_path, dialect="2.6").start()
    assert path.name in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind not in OF_ROWS])
async def test_archive_does_not_continue_from_a_forged_log(kind: str, tmp_path: Path) -> None:
    block, _ = BLOCKS[kind]
    await archive_with_rows(tmp_path)
    path = put_behind(tmp_path, block)
    before = path.read_bytes()
    with little_memory(), pytest.raises(FlowstoneError) as caught:
        await archive_with_rows(tmp_path)
    assert path.name in str(caught.value)
    assert path.read_bytes() == before
