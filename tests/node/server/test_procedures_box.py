"""The built-in procedures that do not concern the schema."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.node.instance import NoFiles
from flowstone.node.server import procedures_schema, procedures_space
from flowstone.node.server.procedures_box import built_in
from flowstone.replication.limbo.control_rows import RaftState
from tests.node.conversations import Conversation
from tests.node.instances import UUID, make_instance
from tests.places import ROOT


@pytest.fixture
def client() -> Conversation:
    return Conversation(make_instance())


class Files(NoFiles):
    """Answers queries about files without any files."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def snapshot(self) -> None:
        self.log.append("snapshot")

    def start_backup(self, checkpoint: int) -> list[str]:
        self.log.append(checkpoint)
        return ["a.snap"]

    def stop_backup(self) -> None:
        self.log.append("stop")

    def gc_info(self) -> dict[str, Any]:
        return {"checkpoints": []}


async def test_box_info_is_returned_whole_and_by_part(client: Conversation) -> None:
    (info,) = await client.call("box.info")
    assert info["uuid"] == str(UUID)
    assert await client.call("box.info.uuid") == (str(UUID),)
    assert await client.call("box.info.vclock") == ({1: 1},)
    assert await client.call("box.info.gc") == ({},)
    with pytest.raises(errors.NoSuchProc):
        await client.call("box.info.nothing")


async def test_box_info_wrapped_for_call_16(client: Conversation) -> None:
    ((info,),) = await client.call("box.info", type=RequestType.CALL_16)
    assert info["status"] == "running"


async def test_box_cfg_is_returned_whole_and_by_option(client: Conversation) -> None:
    (options,) = await client.call("box.cfg")
    assert (options["wal_mode"], options["read_only"]) == ("write", False)
    assert "listen" not in options
    assert await client.call("box.cfg.net_msg_max") == (768,)
    with pytest.raises(errors.NoSuchProc):
        await client.call("box.cfg.listen")


async def test_box_cfg_shows_no_secrets() -> None:
    secret: dict[str, Any] = {"ssl_cert_file": "cert.pem", "ssl_key_file": "key.pem", "ssl_password": "hush"}
    instance = make_instance(**secret)
    client = Conversation(instance)
    (options,) = await client.call("box.cfg")
    assert options["ssl_key_file"] == "key.pem"
    assert "hush" not in f"{options}{instance.configuration}"
    with pytest.raises(errors.NoSuchProc):
        await client.call("box.cfg.ssl_password")


async def test_box_cfg_with_options_reconfigures_the_node(client: Conversation) -> None:
    with pytest.raises(errors.Unsupported, match="changing options"):
        await client.call("box.cfg", {"read_only": True})
    applied: list[dict[str, Any]] = []

    async def reload(options: dict[str, Any]) -> None:
        applied.append(options)

    client.instance.reload = reload
    assert await client.call("box.cfg", {"read_only": True}) == ()
    assert applied == [{"read_only": True}]
    with pytest.raises(errors.IllegalParams):
        await client.call("box.cfg", 5)


async def test_snapshots_and_backups_are_delegated_to_the_files(client: Conversation) -> None:
    client.instance.files = files = Files()
    assert await client.call("box.snapshot") == ("ok",)
    assert await client.call("box.backup.start") == (("a.snap",),)
    assert await client.call("box.backup.start", 1) == (("a.snap",),)
    assert await client.call("box.backup.stop") == ()
    assert files.log == ["snapshot", 0, 1, "stop"]
    assert await client.call("box.info.gc") == ({"checkpoints": ()},)
    with pytest.raises(errors.IllegalParams):
        await client.call("box.backup.start", -1)


async def test_wait_for_read_only_and_read_write(client: Conversation) -> None:
    assert await client.call("box.ctl.wait_rw") == ()
    with pytest.raises(errors.System, match="timed out") as caught:
        await client.call("box.ctl.wait_ro", 0)
    assert caught.value.stack is not None
    assert caught.value.stack.errors[0].type == "TimedOut"
    waiting = asyncio.create_task(client.call("box.ctl.wait_ro", 60))
    client.instance.box.is_read_only = True
    assert await waiting == ()
    with pytest.raises(errors.IllegalParams):
        await client.call("box.ctl.wait_rw", "soon")


async def test_other_functions_of_box_ctl(client: Conversation) -> None:
    assert await client.call("box.ctl.is_recovery_finished") == (True,)
    assert await client.call("box.ctl.promote") == (), "there is no data yet"


@pytest.mark.parametrize("name", ["box.ctl.promote", "box.ctl.clear_synchro_queue"])
async def test_queue_is_claimed_and_released(client: Conversation, name: str) -> None:
    instance = client.instance
    instance.queue.registered(1)
    instance.elections.start(RaftState(term=1), 1)
    assert await client.call(name) == ()
    assert await client.call("box.info.synchro") == (
        {
            "queue": {"len": 0, "owner": 1, "term": 2, "busy": False, "size": 0, "age": 0.0, "rollback_count": 0},
            "quorum": 1,
        },
    )
    assert await client.call("box.info.election") == ({"state": "follower", "vote": 0, "leader": 0, "term": 2},)
    assert await client.call("box.ctl.demote") == ()
    (synchro,) = await client.call("box.info.synchro")
    assert (synchro["queue"]["owner"], synchro["queue"]["term"]) == (0, 3)
    await instance.elections.close()


async def test_2_6_has_no_promotion_but_clears_its_queue() -> None:
    client = Conversation(make_instance(dialect=Dialect.V2_6))
    for name in ("box.ctl.promote", "box.ctl.demote"):
        with pytest.raises(errors.NoSuchProc, match=f"Procedure '{name}' is not defined"):
            await client.call(name)
    assert await client.call("box.ctl.clear_synchro_queue") == ()


async def test_session_returns_its_id_and_user(client: Conversation) -> None:
    values = [(await client.call(f"box.session.{name}"))[0] for name in "id user uid euid type peer".split()]
    assert values == [5, "admin", 1, 1, "binary", "127.0.0.1:5000"]
    assert await client.call("box.session.sync") == (7,)


async def test_watchers_receive_broadcasts(client: Conversation) -> None:
    await client.response(RequestType.WATCH, {0x57: "mine"})
    await client.response(RequestType.WATCH, {0x57: "mine"})
    assert await client.call("box.broadcast", "mine", {"a": 1}) == ()
    client.watchers.check()
    assert client.events[-1].values()[0x58] == {"a": 1}
    with pytest.raises(errors.IllegalParams, match="reserved"):
        await client.call("box.broadcast", "box.id", 1)


async def test_box_is_in_txn_is_true_inside_a_transaction(client: Conversation) -> None:
    assert await client.call("box.is_in_txn") == (False,)
    await client.request(RequestType.BEGIN, stream=1)
    assert await client.call("box.is_in_txn", stream=1) == (True,)


def names_of_the_registry() -> list[str]:
    """Return all built-in names, with NAME, PART or OPTION in place of variable parts."""
    tables: dict[str, Iterable[str]] = {
        "box.space.NAME:": {**procedures_space.READS_OF_SPACE, **procedures_space.WRITES_OF_SPACE},
        "box.space.NAME.index.NAME:": {**procedures_space.READS_OF_INDEX, **procedures_space.WRITES_OF_INDEX},
        "box.sequence.NAME:": procedures_schema._METHODS,
        "": built_in()._table,
    }
    found = [prefix + name for prefix, table in tables.items() for name in table]
    return sorted([*found, "box.info.PART", "box.cfg.OPTION"])


def test_documentation_lists_exactly_the_built_in_procedures() -> None:
    text = (ROOT / "docs" / "reference" / "procedures.md").read_text()
    assert sorted(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)) == names_of_the_registry()


async def test_disk_usage_returns_the_free_space_or_the_error(tmp_path: Path) -> None:
    (free,) = await Conversation(make_instance(tmp_path)).call("flowstone.disk_usage")
    assert sorted(free) == ["memtx_free_bytes", "wal_free_bytes"]
    assert all(room > 0 for room in free.values())
    gone = Conversation(make_instance(tmp_path, wal_dir="gone"))
    assert await gone.call("flowstone.disk_usage") == ({"failure": "No such file or directory"},)
