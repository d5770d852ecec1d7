"""A node without its server: box, journal and checkpoints on any disk, for recovery tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowstone.box import system
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto.msgpack import pack
from flowstone.node.synchro.limbo_driver import Revocable
from flowstone.node.wal.checkpoint import Checkpointer
from flowstone.node.wal.commits import Commits
from flowstone.node.wal.gc import GarbageCollector
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.node.wal.recovery import RecoveredBox, bootstrap, dialect_of, find_files, is_empty, recover
from flowstone.outside import Outside
from flowstone.replication.limbo.queue import Pending

State = dict[int, list[bytes]]


@dataclass
class SmallNode:
    outside: Outside
    directory: str
    box: Box
    journal: Journal
    commits: Commits
    collector: GarbageCollector
    checkpointer: Checkpointer
    recovered: RecoveredBox

    async def write(self, work: Callable[[BoxTransaction], object]) -> None:
        """Run one transaction; it is written on return."""
        transaction = self.box.begin()
        try:
            work(transaction)
        except BaseException:
            transaction.rollback()
            raise
        await self.commits.commit(transaction)

    async def replace(self, space: str, *tuples: list[Any]) -> None:
        """Write tuples in one transaction."""

        def work(transaction: BoxTransaction) -> None:
            for values in tuples:
                statements.replace(transaction, self.box.space(space), pack(values))

        await self.write(work)

    async def create_space(self, name: str, number: int = 512, /, **flags: Any) -> None:
        """Create a space with an unsigned primary key; `index_type`, `key_type` and flags as given."""
        index_type, key_type = flags.pop("index_type", "tree"), flags.pop("key_type", "unsigned")
        engine = flags.pop("engine", "memtx")
        space = [number, 1, name, engine, 0, flags, []]
        index = [number, 0, "pk", index_type, {"unique": True}, [[0, key_type]]]
        await self.write(lambda txn: statements.insert(txn, self.box.space(system.SPACE_ID), pack(space)))
        await self.write(lambda txn: statements.insert(txn, self.box.space(system.INDEX_ID), pack(index)))

    async def close(self) -> None:
        self.commits.queue.close()
        await self.checkpointer.stop()
        await self.journal.close()


async def start(
    outside: Outside,
    directory: str,
    *,
    dialect: Dialect = Dialect.V2_6,
    mode: WalMode = WalMode.WRITE,
    force: bool = False,
    wal_max_size: int = 2**28,
    checkpoint_count: int = 2,
    **checkpoints: Any,
) -> SmallNode:
    """Recover the directory, or bootstrap in it."""
    outside.disk.make_directory(directory)
    files = find_files(outside.disk, directory, directory)
    box = Box(dialect_of(files) or dialect)
    if is_empty(files):
        recovered = await bootstrap(outside, directory, box)
    else:
        recovered = await recover(outside, files, box, force=force)
    journal = Journal(
        outside,
        directory,
        instance_uuid=str(recovered.instance_uuid),
        vclock=recovered.vclock,
        replica_id=recovered.replica_id,
        mode=mode,
        wal_max_size=wal_max_size,
        version=box.dialect.version_text,
        last=recovered.last,
    )
    collector = GarbageCollector(outside, directory, directory, checkpoint_count=checkpoint_count)
    commits = Commits(box, journal, outside.clock)
    synchro = recovered.synchro
    pending: list[Pending[Revocable]] = [
        Pending(each.effect, each.lsn, each.is_synchronous) for each in synchro.pending
    ]
    commits.queue.start(recovered.replica_id, synchro.promote(), synchro.tenures, pending)
    checkpointer = Checkpointer(
        outside,
        box,
        journal,
        collector,
        memtx_dir=directory,
        instance_uuid=str(recovered.instance_uuid),
        queue=commits.queue,
        raft=lambda: recovered.synchro.raft,
        **checkpoints,
    )
    return SmallNode(outside, directory, box, journal, commits, collector, checkpointer, recovered)


def state(box: Box) -> State:
    """Return all tuples of all spaces that store tuples."""
    return {
        number: sorted(space.tuples())
        for number, space in sorted(box.spaces.items())
        if space.definition.engine in ("memtx", "vinyl") and not space.definition.is_temporary
    }
