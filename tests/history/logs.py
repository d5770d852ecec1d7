"""Small logs for reader tests: one call per transaction; LSNs are counted automatically."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.outside import production
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.transactions import make_transaction
from flowstone.xlog.writer import LogWriter

INSTANCE = "11111111-0000-4000-8000-000000000001"
SYNC_FLAGS = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value


class Log:
    """Builds an `.xlog` with rows of replica 1. Each call writes one transaction in a block of its own."""

    def __init__(self, directory: Path, *, version: str = "2.11.9", start: int = 0) -> None:
        vclock = {1: start} if start else {}
        meta = Meta(FileType.XLOG, INSTANCE, vclock, version=version)
        directory.mkdir(parents=True, exist_ok=True)
        self.writer = LogWriter.create(production().disk, str(directory), meta)
        self.lsn = start

    @property
    def path(self) -> str:
        return self.writer.path

    def write(self, *statements: tuple[RequestType, dict[int, Any]], flags: int = 0) -> int:
        """Write one transaction of these statements; return the LSN of its last row."""
        rows = []
        for kind, body in statements:
            self.lsn += 1
            rows.append(Row(kind, replica_id=1, lsn=self.lsn, timestamp=1000.0 + self.lsn, body=pack(body)))
        self.writer.append([make_transaction(rows, flags)])
        return self.lsn

    def insert(self, space_id: int, *values: Any, flags: int = 0) -> int:
        return self.write((RequestType.INSERT, {0x10: space_id, 0x21: values}), flags=flags)

    def delete(self, space_id: int, *key: Any) -> int:
        return self.write((RequestType.DELETE, {0x10: space_id, 0x20: key}))

    def confirm(self, lsn: int) -> int:
        return self.write((RequestType.RAFT_CONFIRM, {0x02: 1, 0x03: lsn}))

    def rollback(self, lsn: int) -> int:
        return self.write((RequestType.RAFT_ROLLBACK, {0x02: 1, 0x03: lsn}))

    def create_space(self, space_id: int, name: str, *fields: tuple[str, str], **options: Any) -> None:
        layout = [{"name": field, "type": kind} for field, kind in fields]
        self.insert(280, space_id, 1, name, "memtx", 0, options, layout)
        self.insert(288, space_id, 0, "pk", "tree", {"unique": True}, [[0, fields[0][1] if fields else "unsigned"]])

    def drop_space(self, space_id: int) -> None:
        self.delete(288, space_id, 0)
        self.delete(280, space_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.writer.close()


def multiply(log: Path, directory: Path, size: int) -> None:
    """Fill `directory` with copies of one log, with consecutive names and LSNs, until it has `size` bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    header, body = log.read_bytes().split(b"\n\n", 1)
    number = 0
    while number * (len(header) + len(body)) < size:
        start = number * 10_000_000
        vclock = b"VClock: {1: %d}" % start if start else b"VClock: {}"
        (directory / f"{start:020}.xlog").write_bytes(header.replace(b"VClock: {}", vclock) + b"\n\n" + body)
        number += 1
