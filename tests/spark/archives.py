"""Archives for the tests of changes: written by the archive's own log, by default on a disk in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowstone.archive.archive_log import ArchiveLog
from flowstone.archive.manifest import ArchiveManifest, Gap, save
from flowstone.archive.settled_tracker import Verdicts
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.replication.vclock import VClock
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import SnapWriter
from tests.node.archived_rows import INSTANCE, new_disk
from tests.spark.change_rows import UUID, define, define_key, whole

DIRECTORY = "archive"


class WrittenArchive:
    """An archive that begins with an empty snapshot at `{}`; `write` adds blocks, and `save` publishes them."""

    def __init__(
        self,
        disk: Any = None,
        directory: str = DIRECTORY,
        *,
        snapshot_at: float = 1.0,
        uuid: str = UUID,
        **options: Any,
    ) -> None:
        self.disk = new_disk() if disk is None else disk
        self.directory = directory
        self.disk.make_directory(directory)
        self.options = options
        self.uuid = uuid
        self.gaps: list[Gap] = []
        self.log = self._begin(VClock(), snapshot_at)

    def _begin(self, start: VClock, at: float) -> ArchiveLog:
        # Like every snapshot, it has the schema version.
        self.snapshot(start, [(272, ("version", 2, 11, 1))], at)
        verdicts = Verdicts()
        verdicts.start(start)
        how = {"instance_uuid": INSTANCE, "vclock": start, "verdicts": verdicts, "version": "2.11.9", **self.options}
        return ArchiveLog(self.disk, self.directory, **how)

    def begin_at(self, start: VClock) -> None:
        """Begin at this position instead of `{}`."""
        self.disk.unlink(f"{self.directory}/{0:020d}.snap")
        self.log = self._begin(start, 1.0)

    def define_orders(self) -> None:
        """Write the definition of space `orders` of `change_rows.ORDERS` as LSN 1 and 2."""
        self.write(whole(define(1, 512, "orders", ("id", "unsigned"), ("name", "string")), define_key(2, 512)))

    def write(self, *transactions: bytes) -> None:
        """Write one block and a line of the index."""
        self.log.write(b"".join(transactions))
        self.log.flush()

    def snapshot(self, vclock: VClock, rows: Sequence[tuple[int, Any]], at: float = 1.0) -> None:
        """Write a snapshot of these tuples, each with the id of its space."""
        writer = SnapWriter(
            self.disk, self.directory, Meta(FileType.SNAP, INSTANCE, vclock.to_mapping(), version="2.11.9"), at
        )
        for space_id, values in rows:
            writer.add_row(RequestType.INSERT, pack({0x10: space_id, 0x21: values}))
        writer.finish()

    def lose(self, until: VClock, at: float = 1.0) -> None:
        """Add a gap up to `until`, where the log continues."""
        after = self.log.vclock
        self.log.close()
        missing = tuple((number, after.get(number) + 1, lsn) for number, lsn in until)
        self.gaps.append(Gap(after.to_mapping(), until.to_mapping(), missing, 1.0, "they were collected"))
        self.log = self._begin(until, at)

    def save(self, *, known_until: float = 0.0) -> None:
        manifest = ArchiveManifest("dddddddd-0000-4000-8000-000000000000", INSTANCE, self.uuid, gaps=self.gaps)
        manifest.known_until = known_until
        manifest.position = self.log.vclock.to_mapping()
        manifest.settled = self.log.verdicts.settled.to_mapping()
        save(self.disk, self.directory, manifest)
