"""Targets for small files of archives, Limestone's directories and operators, in text or MessagePack."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from flowstone.archive import block_index as archive_blocks
from flowstone.archive import definitions_file as archive_definitions
from flowstone.archive import manifest as archive_manifest
from flowstone.box.schema import SchemaTracker
from flowstone.cli.node.settings import read_settings
from flowstone.limestone.format import lineage
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.outside import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.offsets import Offset, parse_offsets
from flowstone.xlog.meta import parse_vclock
from tests.xlog.files import MemoryFile

UUID = "7036c76f-ef9c-4258-9711-665964110f2a"


class _Opened(MemoryFile):
    """A file in memory that closes itself, like files of a disk."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class _OneFile:
    """A disk on which every path is the same file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def kind(self, path: str) -> str:
        return "file"

    def open(self, path: str) -> _Opened:
        return _Opened(self._data)


def _read_by(read: Callable[[Disk], object]) -> Callable[[bytes], None]:
    """Return the target of a file reader."""
    return lambda data: cast("None", read(cast("Disk", _OneFile(data))))


def _blocks(disk: Disk) -> None:
    """Check that the index has increasing positions for any lines."""
    found = archive_blocks.read_blocks(disk, "00000000000000000005.xlog")
    if found is not None:
        assert found.end >= found.header.offset
        assert found.up_to(found.end) == found.runs


def _definitions(disk: Disk) -> None:
    archive_definitions.read_definitions(disk, "some.definitions").apply_to(SchemaTracker())


blocks = _read_by(_blocks)
definitions = _read_by(_definitions)
manifest = _read_by(lambda disk: archive_manifest.load(disk, "archive"))
former_identities = _read_by(lambda disk: lineage.read(disk, "data"))
seeding_state = _read_by(lambda disk: replica_seeding.read(disk, "data"))


def settings(data: bytes) -> None:
    """Parse a configuration file of an operator."""
    with tempfile.NamedTemporaryFile(suffix=".toml", dir=SCRATCH) as file:
        file.write(data)
        file.flush()
        read_settings({"config": file.name}, {}, {})


def offsets(data: bytes) -> None:
    """Parse input from Spark and its users."""
    text = data.decode("utf-8", "replace")
    found = parse_offsets(text)
    if not isinstance(found, str):
        Offset.from_json(
            {uuid: {str(number): lsn for number, lsn in vclock} for uuid, vclock in found.items() if uuid is not None}
        )


def vclock_text(data: bytes) -> None:
    """Parse a vclock in the form of a file header."""
    text = data.decode("utf-8", "replace")
    try:
        found = VClock(parse_vclock(text))
    except ValueError:
        return
    assert VClock.parse(str(found)) == found


SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Thousands of files are written for `settings`: in memory, if possible."""

RUN: dict[str, Any] = {"vclock": {1: 9}, "settled": {1: 9}, "first_timestamp": 1.5, "last_timestamp": 2.5}
BLOCKS = (
    b"".join(
        msgspec.json.encode(line) + b"\n"
        for line in (
            archive_blocks.Header("00000000000000000005.xlog", UUID, {1: 5}, 100),
            archive_blocks.BlockRun(offset=100, end=200, row_count=4, spaces=(512,), **RUN),
            archive_blocks.BlockRun(offset=200, end=300, row_count=4, spaces=None, rolled_back=((1, 6, 7),), **RUN),
        )
    ),
)
MANIFESTS = (
    msgspec.json.encode(
        archive_manifest.ArchiveManifest(
            UUID,
            UUID,
            UUID,
            3,
            upstream=archive_manifest.ArchivedUpstream(UUID, "host:3301", "2.11.9"),
            position={1: 9},
            settled={1: 8},
            snapshots=[archive_manifest.ArchivedSnapshot("00000000000000000005.snap", {1: 5}, 1.5, "first")],
            gaps=[archive_manifest.Gap({1: 5}, {1: 9}, ((1, 6, 9),), 1.5, "collected")],
        )
    ),
)
DEFINITIONS = (
    msgspec.msgpack.encode(
        archive_definitions.DefinitionsFile(
            {1: 5},
            UUID,
            "2.11.9",
            (
                (280, msgspec.msgpack.encode((512, 1, "s", "memtx", 0, {}, ({"name": "id", "type": "unsigned"},)))),
                (288, msgspec.msgpack.encode((512, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),)))),
            ),
            (1, 5, 2),
        )
    ),
)
SETTINGS = (
    b"wal_mode = 'fsync'\nlisten = '127.0.0.1:3301'\nreplication = ['u:p@host:3301']\n",
    b"user = 'first:secret'\nread_only = true\nreplication_timeout = 0.5\nwal_max_size = 1_000\n",
)
OFFSETS = (b'{"1": 5, "2": 7}', b'{"' + UUID.encode() + b'": {"1": 5}}', b"earliest")
VCLOCKS = (b"{1: 5, 2: 300}", b"{}", b"{0: 1, 31: 9223372036854775807}")
IDENTITIES = (b'{"formerly": ["' + UUID.encode() + b'"]}',)
STATES = (b'{"follows": "' + UUID.encode() + b'", "phase": "settled"}',)
