"""A Flowstone node in place of a recorded master, started on copies of that master's files."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import flowstone
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.reader import LogFile
from flowstone.xlog.writer import LogWriter
from tests.conversations import recording
from tests.conversations.recording import Packet

DIALECTS = {"2.6": "2.6", "2.11": "2.11", "3.8": "2.11"}
"""The dialect that replaces a recorded version."""

ALL_LOGS = "*.xlog"
CLUSTER_ID = 320


def copy_files(version: str, scenario: str, node: str, target: Path, *patterns: str) -> Path:
    """Copy the files of a recorded node: its first snapshot, and files matching the patterns."""
    source = recording.scenario(version, scenario) / "files" / node
    target.mkdir(parents=True)
    for pattern in (min(source.glob("*.snap")).name, *patterns):
        found = list(source.glob(pattern))
        assert found, f"{source} has no {pattern}"
        for file in found:
            shutil.copy(file, target)
    return target


def copy_until(version: str, scenario: str, node: str, target: Path, lsn: int, replica_id: int = 1) -> Path:
    """Copy the files of a recorded node as they were when it had written row `lsn` of `replica_id`."""
    copy_files(version, scenario, node, target)
    disk, source = SystemDisk(), recording.scenario(version, scenario) / "files" / node
    for path in sorted(source.glob(ALL_LOGS)):
        with LogFile.open(disk, str(path)) as log, LogWriter.create(disk, str(target), log.meta) as writer:
            for transaction in log.transactions():
                if any(row.replica_id == replica_id and row.lsn > lsn for row in transaction.rows):
                    return target
                writer.append([transaction])
    return target


class Originator:
    """Makes a node write the recorded master's rows when the recording sends them next."""

    def __init__(self, node: flowstone.Node, replica_id: int = 1) -> None:
        self._node = node
        self._replica_id = replica_id
        self._rows: list[Packet] = []

    async def __call__(self, packet: Packet) -> None:
        """`packet` was the next one of the master; a transaction is written with its last row."""
        if not packet.lsn or packet.content(Key.SPACE_ID) == CLUSTER_ID:  # the master registers members itself
            return
        if packet.field(Key.REPLICA_ID) != self._replica_id or packet.lsn <= self._lsn:
            return
        self._rows.append(packet)
        if Key.TSN in packet.header and not packet.field(Key.FLAGS, 0) & Flag.COMMIT:
            return
        rows, self._rows = self._rows, []
        if any(row.type == RequestType.NOP for row in rows):
            await self._write_rows(rows)
        else:
            await self._node.write(lambda transaction: execute(transaction, self._node, rows))

    @property
    def _lsn(self) -> int:
        return int(self._node.info()["vclock"].get(self._replica_id, 0))

    async def _write_rows(self, rows: Sequence[Packet]) -> None:
        """Write rows that no client can request: a NOP of a cancelled change, or a local row."""
        journal = self._node._instance.journal
        data = b"".join(row.payload for row in rows)
        journal.submit_replicated(data, {self._replica_id: rows[-1].lsn}, lambda error: None)
        journal.flush()
        await journal.drain()


def execute(transaction: BoxTransaction, node: flowstone.Node, rows: Sequence[Packet]) -> None:
    """Execute the statements that produced these rows."""
    for row in rows:
        _execute(transaction, node, row)


def _execute(transaction: BoxTransaction, node: flowstone.Node, row: Packet) -> None:
    body = row.body or {}
    space, base = node.box.space(row.content(Key.SPACE_ID)), row.content(Key.INDEX_BASE, 0)
    match row.type:
        case RequestType.INSERT:
            statements.insert(transaction, space, body[Key.TUPLE])
        case RequestType.REPLACE:
            statements.replace(transaction, space, body[Key.TUPLE])
        case RequestType.UPDATE:
            statements.update(transaction, space, 0, body[Key.KEY], body[Key.TUPLE], base)
        case RequestType.DELETE:
            statements.delete(transaction, space, 0, body[Key.KEY])
        case RequestType.UPSERT:
            statements.upsert(transaction, space, body[Key.TUPLE], body[Key.OPS], base)
        case other:
            raise ValueError(f"no statement writes {RequestType(other).name}")


@asynccontextmanager
async def serving(directory: Path, **options: Any) -> AsyncIterator[flowstone.Node]:
    """Run a node that listens on its own port."""
    async with flowstone.Node(directory, listen="127.0.0.1:0", **options) as node:
        _go_on_as_owner(node)
        yield node


def _go_on_as_owner(node: flowstone.Node) -> None:
    """Unfreeze the queue: a restarted owner decides nothing before it is promoted; the recorded one had not
    restarted."""
    instance = node._instance
    if instance.queue.limbo.is_owner:
        instance.queue.limbo._is_frozen_until_promotion = False
        instance.settle_read_only()


def port_of(node: flowstone.Node) -> int:
    assert node.address is not None
    return int(node.address.rpartition(":")[2])
