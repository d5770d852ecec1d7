"""The original's tool on our directories, including those of crashed replicas, and our tools on the original's."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Final

import pytest

from flowstone.limestone.format import names
from flowstone.limestone.format.epoch_file import read as read_epochs
from flowstone.limestone.settings import Settings
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.tools.offline_compaction import compact_offline
from flowstone.outside import Disk, production
from tests.conftest import FULL
from tests.limestone import recorded
from tests.limestone.interop.real_limestone import logutil
from tests.limestone.interop.test_master import EPOCHS, blobs, shown, written
from tests.limestone.model import Model
from tests.limestone.programs import ENDPOINT, MASTER, REPLICA, Program, Shape, start_master, start_replica
from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed, Simulation

OUTSIDE: Final = production()


async def test_real_tool_inspects_repairs_and_compacts_our_files(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await written(directory)
    before = shown(directory)
    said = logutil("inspect", directory)
    assert (said.code, said.status, said.fields["durable-epoch"]) == (0, "OK", str(EPOCHS)), said
    said = logutil("repair", directory)
    assert (said.code, said.status) == (0, "OK"), said
    assert not (directory / "pwal_0000").exists()
    assert shown(directory) == before
    assert (await written_again(directory))[-1] > EPOCHS
    before = shown(directory)
    said = logutil("compaction", directory, "--force")
    assert said.code == 0, said
    assert shown(directory) == before
    assert blobs(directory) == {}  # a defect of the original tool


async def written_again(directory: Path) -> list[int]:
    store, told = AsyncDatastore(OUTSIDE, Settings(str(directory))), list[int]()
    store.add_persistent_callback(told.append)
    channel = await store.create_channel()
    await store.ready()
    epoch = store.last_epoch + 1
    await store.switch_epoch(epoch)
    await channel.begin_session()
    channel.add_entry(1, b"again", b"v", (epoch, 1))
    await channel.end_session()
    await store.switch_epoch(epoch + 1)
    await store.shutdown()
    return told


async def test_real_tool_continues_from_our_compaction(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await written(directory)
    before, kept = shown(directory), blobs(directory)
    compact_offline(OUTSIDE, str(directory), keeps_backup=False)
    assert (shown(directory), blobs(directory)) == (before, kept)
    said = logutil("inspect", directory)
    assert (said.code, said.status) == (0, "OK"), said
    await written_again(directory)
    before = shown(directory)
    assert logutil("compaction", directory, "--force").code == 0
    assert shown(directory) == before


@pytest.mark.parametrize("command", ["repair", "compaction"])
@pytest.mark.parametrize("name", ["dirs-master/before", "dirs-replica/before", "restart/master-dir", "tail/dir"])
def test_our_tools_read_directories_written_by_the_real_tool(command: str, name: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(recorded.HERE / name, tmp_path / "data"))
    before = [row[:3] for row in shown(directory)]
    said = logutil(command, directory, *(["--force"] if command == "compaction" else []))
    assert said.code == 0, said
    assert [row[:3] for row in shown(directory)] == before


def copied(disk: Disk, source: str, target: Path) -> None:
    """Copy a directory of the simulator to this machine."""
    target.mkdir()
    for name in disk.list_directory(source):
        path = f"{source}/{name}"
        if disk.kind(path) == "directory":
            copied(disk, path, target / name)
        else:
            with disk.open(path) as file:
                (target / name).write_bytes(file.read_at(0, file.size()))


@pytest.mark.parametrize("seed", range(200 if FULL else 20))
def test_real_tool_repairs_either_side_after_a_crash_at_any_moment(seed: int, tmp_path: Path) -> None:
    """Our recovery needs no repair of the directory, and the tool finds the same rows."""
    rng = Random(seed)
    settings = Settings(f"/{MASTER}", (ENDPOINT,), spill=150)
    stage = Simulation(f"real/{seed}")

    async def scenario(_: object) -> None:
        stage.build(MASTER, REPLICA)
        victim = rng.choice((MASTER, REPLICA))
        try:
            await start_replica(stage)
            master = await start_master(stage, Model(), settings, 2)
            stage.crash_after(victim, rng.randint(1, 60), rng.choice(list(Loss)))
            program = stage.loop.create_task(Program(stage, Model(), Shape(), rng).run(master))
            await stage.until(lambda: program.done() or not stage.is_running(REPLICA))
            program.cancel()
        except Crashed:
            pass
        for name in (MASTER, REPLICA):
            stage.storage(name).spare()
            copied(stage.look(name), f"/{name}", tmp_path / name)

    stage.run(scenario)
    for name in (MASTER, REPLICA):
        directory = tmp_path / name
        ours = shown(directory)
        durable = read_epochs(OUTSIDE.disk, str(directory)).durable
        said = logutil("inspect", directory)
        assert said.code in (0, 1), (name, said)
        said = logutil("repair", directory)
        assert said.code == 0, (name, said)
        assert shown(directory) == ours
        assert read_epochs(OUTSIDE.disk, str(directory)).durable == durable
        assert not any(path.name == names.pwal(0) and path.stat().st_size for path in directory.iterdir())
