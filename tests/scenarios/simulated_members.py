"""Members of simulated replica sets: a space for writes, their contents, and files of real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowstone.iproto.msgpack import unpack
from flowstone.iproto.row import Row
from flowstone.xlog.reader import LogFile
from tests.simulation.disk import Inode, SimulatedDisk
from tests.simulation.loop import Life
from tests.simulation.simulation import Machine, Simulation

SPACE = "ledger"
CLUSTER = 320


def uris(sim: Simulation, *names: str) -> list[str]:
    return [sim.uri(name) for name in names]


async def make_space(sim: Simulation, name: str, space: str = SPACE, **options: Any) -> None:
    """Create a space of tuples with a number and any value."""

    async def make() -> None:
        made = await sim.node(name).create_space(space, **options)
        await made.create_index("pk")

    await sim.on(name, make())


async def insert(sim: Simulation, name: str, *keys: int, space: str = SPACE) -> None:
    """Write one transaction; each tuple names its writer."""

    async def write() -> None:
        async with sim.node(name).transaction() as transaction:
            for key in keys:
                transaction.space(space).insert([key, name])

    await sim.on(name, write())


def held(sim: Simulation, name: str, space: str = SPACE) -> dict[int, str]:
    """Return the writers and their rows, as known to the node."""
    found = sim.node(name).box.names.get(space)
    if found is None or found.primary is None:
        return {}
    return {key: writer for key, writer, *_ in map(unpack, found.tuples())}


def ids(sim: Simulation, name: str) -> dict[str, int]:
    """Return the members that a node knows: ids by UUID."""
    return {member["uuid"]: number for number, member in sim.node(name).info()["replication"].items()}


async def reconfigure(sim: Simulation, name: str, **options: Any) -> None:
    await sim.on(name, sim.node(name).reconfigure(**options))


async def snapshot(sim: Simulation, name: str) -> None:
    await sim.on(name, sim.node(name).snapshot())


def files(sim: Simulation, name: str, suffix: str) -> list[str]:
    return sorted(path for path in sim.storage(name).names if path.endswith(suffix))


def rows_of(sim: Simulation, name: str, replica_id: int, after: int) -> list[Row]:
    """Return the rows of an originator in a member's log."""
    disk = SimulatedDisk(sim.storage(name), Life("reader"))
    found = []
    for path in files(sim, name, ".xlog"):
        with LogFile.open(disk, path) as log:
            found += [row for one in log.transactions() for row in one.rows if row.replica_id == replica_id]
    return [row for row in found if row.lsn > after]


def log_of(sim: Simulation, name: str) -> str:
    """Return the log lines of a node since the start of the run, from the trace."""
    return "\n".join(line for line in sim.trace.lines if name in line)


def move_in(sim: Simulation, name: str, directory: Path) -> None:
    """Create a machine whose disk has the files of a real server; the caller starts its node."""
    machine = sim._machines[name] = Machine(sim, name)
    machine.storage.directories[f"/{name}"] = None
    for path in sorted(directory.iterdir()):
        if path.suffix in (".snap", ".xlog"):
            machine.storage.change_names({f"/{name}/{path.name}": Inode(path.read_bytes())})
