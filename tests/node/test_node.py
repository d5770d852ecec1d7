"""A node in a program: bootstrap, restart, functions, triggers, dynamic options, and failed starts."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest

import flowstone
from flowstone.client.connection import Connection, ConnectionFailed
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.node.changes import Change
from flowstone.node.wal.journal import JournalClosed
from flowstone.outside import AlreadyLocked, Tls, production
from flowstone.xlog.errors import XlogError
from tests.node.fault_disk import FaultDisk

UUID = "5313b8d5-82a0-4fb4-a280-9e8bf79e1cac"


async def connect(node: flowstone.Node, user: str = "") -> Connection:
    return await Connection.open(production(), parse_uri(f"{user}{node.address}"))


async def call(connection: Connection, name: str, *arguments: Any) -> Any:
    body = pack({Key.FUNCTION_NAME.value: name, Key.TUPLE.value: arguments})
    return (await connection.request(RequestType.CALL, body))[Key.DATA.value]


def files(directory: Path, suffix: str) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix == suffix)


async def test_data_survives_a_restart(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path) as node:
        space = await node.create_space("numbers", format=[("n", "unsigned"), ("square", "unsigned")])
        await space.create_index("primary")
        for number in range(100):
            await space.insert((number, number * number))
        before = node.info()
    async with flowstone.Node(tmp_path) as node:
        assert [row.square for row in node.space("numbers").select(98, iterator="GE")] == [98 * 98, 99 * 99]
        after = node.info()
        assert (after["uuid"], after["vclock"]) == (before["uuid"], before["vclock"])


async def test_data_survives_a_restart_from_a_snapshot(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path) as node:
        space = await node.create_space("numbers")
        await space.create_index("primary")
        await space.insert((1,))
        await node.snapshot()
        await space.insert((2,))
    assert len(files(tmp_path, ".snap")) == 2
    async with flowstone.Node(tmp_path) as node:
        assert [row[0] for row in node.space("numbers")] == [1, 2]


async def test_new_node_has_the_given_names_and_dialect(tmp_path: Path) -> None:
    options: dict[str, Any] = {"instance_uuid": UUID, "replicaset_uuid": UUID.replace("5", "6"), "dialect": "2.6"}
    async with flowstone.Node(tmp_path, **options) as node:
        assert node.info()["uuid"] == UUID
        assert node.info()["version"].startswith("2.6.0")
    async with flowstone.Node(tmp_path) as node:
        assert node.info()["version"].startswith("2.6.0")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"instance_uuid": UUID}, "Instance UUID mismatch: expected 5313"),
        ({"replicaset_uuid": UUID}, "Replica set UUID mismatch: expected 5313"),
        ({"dialect": "2.6"}, "has data of dialect 2.11"),
    ],
)
async def test_data_of_another_name_or_dialect_is_rejected(
    tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    async with flowstone.Node(tmp_path):
        pass
    with pytest.raises(FlowstoneError, match=complaint):
        async with flowstone.Node(tmp_path, **options):
            pass


async def test_directory_cannot_be_used_by_two_nodes(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path):
        with pytest.raises(AlreadyLocked, match="another instance is running"):
            async with flowstone.Node(tmp_path):
                pass
    async with flowstone.Node(tmp_path):
        pass


async def test_directory_cannot_be_shared_by_a_node_and_a_tarantool(tarantool: Any, tmp_path: Path) -> None:
    with (
        tarantool.serve(tmp_path),
        pytest.raises(AlreadyLocked, match=f"another instance is running in {tmp_path}"),
    ):
        await flowstone.Node(tmp_path).start()
    async with flowstone.Node(tmp_path):
        with pytest.raises(RuntimeError, match=r"Failed to lock WAL directory .* and hot_standby mode is off"):
            tarantool.run("box.cfg{wal_dir='.', memtx_dir='.'}", tmp_path)
    assert tarantool.run("box.cfg{log='real.log'} print(box.info.status) os.exit()", tmp_path) == "running\n"


async def test_transaction_that_outlives_its_node_is_rejected_without_affecting_the_next_node(tmp_path: Path) -> None:
    node = flowstone.Node(tmp_path)
    await node.start()
    space = await node.create_space("t")
    await space.create_index("pk")
    transaction = node.transaction()
    await transaction.__aenter__()
    transaction.space("t").insert((1,))
    await node.stop()
    async with flowstone.Node(tmp_path) as other:
        await other.space("t").insert((7,))
        with pytest.raises(JournalClosed, match=f"the log in {tmp_path} is closed"):
            await transaction.__aexit__(None, None, None)
    async with flowstone.Node(tmp_path) as other:
        assert other.space("t").select() == [(7,)]


async def test_address_in_use_is_rejected_with_one_sentence(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path / "a", listen="127.0.0.1:0") as node:
        with pytest.raises(FlowstoneError, match=f"cannot listen on {node.address}: "):
            async with flowstone.Node(tmp_path / "b", listen=node.address):
                pass
    async with flowstone.Node(tmp_path / "b"):
        pass  # the failed node released its directory


async def test_damaged_log_is_rejected_unless_forced(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path) as node:
        space = await node.create_space("numbers")
        await space.create_index("primary")
        for number in range(5):
            await space.insert((number, "x" * 100))
    log = files(tmp_path, ".xlog")[-1]
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(content)
    with pytest.raises(XlogError):
        async with flowstone.Node(tmp_path):
            pass
    async with flowstone.Node(tmp_path, force_recovery=True) as node:
        assert 0 < len(node.space("numbers")) < 5


async def test_calls_fail_when_the_node_is_not_running(tmp_path: Path) -> None:
    node = flowstone.Node(tmp_path)
    with pytest.raises(FlowstoneError, match="not running"):
        node.space("_space")


async def test_unknown_option_is_rejected_before_any_change(tmp_path: Path) -> None:
    with pytest.raises(errors.Cfg, match="'wal_mod': unexpected option"):
        flowstone.Node(tmp_path / "new", wal_mod="write")  # type: ignore[call-arg]
    assert not (tmp_path / "new").exists()


async def test_clients_call_python_functions(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret")) as node:

        @node.function("add")
        def add(a: int, b: int) -> int:
            return a + b

        async def slow(text: str) -> tuple[str, str]:
            await node.snapshot()
            return text, text.upper()

        node.register("slow", slow)
        async with await connect(node, "app:secret@") as connection:
            assert await call(connection, "add", 1, 2) == (3,)
            assert await call(connection, "slow", "tea") == ("tea", "TEA")


async def test_first_user_has_all_privileges_and_is_created_with_new_data_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with flowstone.Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret")) as node:
        async with await connect(node, "app:secret@") as connection:
            await connection.request(RequestType.INSERT, pack({0x10: 280, 0x21: (600, 1, "made", "memtx", 0, {}, [])}))
        assert node.space("made").id == 600
    async with flowstone.Node(tmp_path, user=("other", "secret")) as node:
        assert node.space("_user").index("name").get("other") is None
    assert "other" in caplog.text
    assert "secret" not in caplog.text


async def test_users_are_created_and_granted_privileges(node: flowstone.Node) -> None:
    await node.create_user("reader", "secret")
    await node.grant("reader", "read", "space", "fruit")
    await node.reconfigure(listen="127.0.0.1:0")
    await node.space("fruit").insert((1, "apple", 5))
    async with await connect(node, "reader:secret@") as connection:
        body = {0x10: node.space("fruit").id, 0x11: 0, 0x12: 10, 0x13: 0, 0x14: 0, 0x20: ()}
        reply = await connection.request(RequestType.SELECT, pack(body))
        assert reply[0x30] == ((1, "apple", 5),)
        with pytest.raises(errors.AccessDenied):
            await connection.request(RequestType.INSERT, pack({0x10: node.space("fruit").id, 0x21: (2, "pear")}))
    await node.revoke("reader", "read", "space", "fruit")
    await node.drop_user("reader")
    with pytest.raises(FlowstoneError):
        await connect(node, "reader:secret@")


async def test_triggers_receive_commits_and_rollbacks(node: flowstone.Node) -> None:
    done: list[Any] = []

    @node.on_commit
    def note(changes: tuple[Change, ...]) -> None:
        done.extend((change.type, change.space, change.fields) for change in changes)

    fruit = node.space("fruit")
    await fruit.insert((1, "apple", 5))
    async with node.transaction() as transaction:
        transaction.space("fruit").replace((1, "pear", 5))
        transaction.space("fruit").delete(1)
    assert done == [
        ("INSERT", "fruit", (1, "apple", 5)),
        ("REPLACE", "fruit", (1, "pear", 5)),
        ("DELETE", "fruit", None),
    ]


async def test_full_disk_rolls_back_pending_writes_and_keeps_the_node_readable() -> None:
    disk = FaultDisk()
    async with flowstone.Node("data", outside=disk.outside()) as node:
        undone: list[Any] = []
        node.on_rollback(lambda changes: undone.extend(change.fields for change in changes))
        space = await node.create_space("space")
        await space.create_index("primary")
        await space.insert((1, "kept"))
        disk.room = 0
        results = await asyncio.gather(*(space.insert((n, "lost")) for n in (2, 3)), return_exceptions=True)
        assert [type(result) for result in results] == [errors.WalIo, errors.WalIo]
        assert undone == [(3, "lost"), (2, "lost")]
        assert [tuple(row) for row in space] == [(1, "kept")]
        disk.room = None
        await space.insert((2, "later"))
    async with flowstone.Node("data", outside=disk.outside()) as node:
        assert [tuple(row) for row in node.space("space")] == [(1, "kept"), (2, "later")]


async def test_node_after_a_kill_has_all_acknowledged_writes() -> None:
    disk = FaultDisk()
    node = flowstone.Node("data", outside=disk.outside())
    await node.start()
    space = await node.create_space("space")
    await space.create_index("primary")
    await asyncio.gather(*(space.insert((number,)) for number in range(100)))
    found = disk.after_death()
    await node.stop()
    async with flowstone.Node("data", outside=found.outside()) as successor:
        assert len(successor.space("space")) == 100


async def test_snapshots_and_logs_may_have_separate_directories(tmp_path: Path) -> None:
    for expected in ([], [(1,)]):
        async with flowstone.Node(tmp_path, memtx_dir="snapshots", wal_dir="logs") as node:
            space = await node.create_space("space", if_not_exists=True)
            await space.create_index("primary", if_not_exists=True)
            assert [tuple(row) for row in space] == expected
            await space.replace((1,))
            await node.snapshot()
    assert files(tmp_path / "snapshots", ".snap")
    assert files(tmp_path / "logs", ".xlog")


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate and its key."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=node -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def locked(certified: tuple[Path, Path]) -> Path:
    """Return the key, encrypted with the password "hush"."""
    path = certified[1].with_name("locked.pem")
    command = f"openssl pkey -in {certified[1]} -out {path} -aes256 -passout pass:hush"
    subprocess.run(command.split(), check=True, capture_output=True)
    return path


async def test_key_may_be_encrypted(tmp_path: Path, certified: tuple[Path, Path], locked: Path) -> None:
    certificate, _ = certified
    options: dict[str, Any] = {"listen": "127.0.0.1:0", "ssl_cert_file": str(certificate), "ssl_key_file": str(locked)}
    async with flowstone.Node(tmp_path / "data", ssl_password="hush", **options) as node:
        assert node.address is not None
    with pytest.raises(FlowstoneError, match="password"):
        await flowstone.Node(tmp_path / "data", **options).start()


async def test_clients_connect_over_tls(tmp_path: Path, certified: tuple[Path, Path]) -> None:
    certificate, key = certified
    options: dict[str, Any] = {"ssl_cert_file": str(certificate), "ssl_key_file": str(key)}
    async with flowstone.Node(tmp_path / "data", listen="127.0.0.1:0", **options) as node:
        assert node.address is not None
        port = parse_uri(node.address).port
        stream = await production().network.connect("127.0.0.1", port, timeout=10, tls=Tls(ca_file=str(certificate)))
        assert (await stream.read(128)).startswith(b"Tarantool 2.11")
        await stream.close()
    with pytest.raises(FlowstoneError, match=r"key\.pem contains no certificate"):
        async with flowstone.Node(tmp_path / "data", listen="127.0.0.1:0", **(options | {"ssl_cert_file": str(key)})):
            pass


async def ping_for_ever(connection: Connection) -> None:
    while True:
        await connection.request(RequestType.PING, b"\x80")


async def test_limits_on_clients_change_at_run_time(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret")) as node:
        stranger = await connect(node)
        known = await connect(node, "app:secret@")
        await node.reconfigure(auth_timeout=0.01)
        with pytest.raises(ConnectionFailed):
            await asyncio.wait_for(ping_for_ever(stranger), 20)
        await stranger.close()
        await known.request(RequestType.PING, b"\x80")
        await known.close()


async def test_options_change_at_run_time(node: flowstone.Node) -> None:
    fruit = node.space("fruit")
    assert await node.reconfigure(read_only=True, memtx_max_tuple_size=100) == ["read_only", "memtx_max_tuple_size"]
    with pytest.raises(errors.Readonly):
        await fruit.insert((1, "apple", 5))
    await node.reconfigure(read_only=False)
    with pytest.raises(errors.MemtxMaxTupleSize):
        await fruit.insert((1, "x" * 100, 5))
    await fruit.insert((1, "apple", 5))


async def test_reconfigure_trigger_gets_the_names_of_changed_options(
    node: flowstone.Node, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[list[str]] = []

    @node.on_reconfigure
    def fail(changed: list[str]) -> None:
        raise RuntimeError(changed)

    node.on_reconfigure(calls.append)
    await node.reconfigure(read_only=True)
    await node.reconfigure(read_only=True)
    with pytest.raises(errors.ReloadCfg):
        await node.reconfigure(read_only=False, wal_mode="fsync")
    assert calls == [["read_only"]]
    assert "reconfiguration trigger failed" in caplog.text


async def test_clients_read_and_change_options(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret")) as node:
        async with await connect(node, "app:secret@") as connection:
            assert await call(connection, "box.cfg.wal_mode") == ("write",)
            await call(connection, "box.cfg", {"read_only": True})
            assert (await call(connection, "box.info.ro"))[0] is True
            with pytest.raises(errors.ReloadCfg):
                await call(connection, "box.cfg", {"wal_mode": "fsync"})
        assert node.configuration.read_only is True


async def test_unchangeable_options_are_rejected_and_the_others_kept(node: flowstone.Node) -> None:
    with pytest.raises(errors.ReloadCfg, match="Can't set option 'wal_mode' dynamically"):
        await node.reconfigure(read_only=True, wal_mode="fsync")
    assert node.configuration.read_only is False
    with pytest.raises(errors.ReloadCfg, match="instance_uuid"):
        await node.reconfigure(instance_uuid=UUID)
    assert await node.reconfigure(instance_uuid=node.info()["uuid"]) == []


async def test_options_of_another_dialect_are_rejected_and_the_others_kept(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path, dialect="2.6") as node:
        pass
    async with flowstone.Node(tmp_path) as node:
        with pytest.raises(errors.Cfg, match="'election_mode': unexpected option"):
            await node.reconfigure(election_mode="candidate", read_only=True)
        with pytest.raises(errors.Cfg, match="'replication_synchro_quorum': should be of type number"):
            await node.reconfigure(replication_synchro_quorum="N / 2 + 1")
        assert node.configuration == flowstone.Node(tmp_path).configuration
        assert await node.reconfigure(replication_synchro_quorum=1) == ["replication_synchro_quorum"]


async def test_listen_address_changes_at_run_time(node: flowstone.Node) -> None:
    assert node.address is None
    await node.reconfigure(listen="127.0.0.1:0")
    first = node.address
    async with await connect(node):
        await node.reconfigure(listen=None)
        assert node.address is None
    assert first is not None
    with pytest.raises(ConnectionFailed, match="refused"):
        await Connection.open(production(), parse_uri(first))


async def test_concurrent_reconfigurations_are_applied_one_at_a_time(node: flowstone.Node) -> None:
    first = node.reconfigure(listen="127.0.0.1:0", checkpoint_count=7)
    changed = await asyncio.gather(first, node.reconfigure(read_only=True))
    assert list(changed) == [["listen", "checkpoint_count"], ["read_only"]]
    configuration = node.configuration
    assert (configuration.checkpoint_count, configuration.read_only) == (7, True)


async def test_failed_change_of_the_listener_keeps_the_old_one(node: flowstone.Node, tmp_path: Path) -> None:
    await node.reconfigure(listen="127.0.0.1:0")
    async with flowstone.Node(tmp_path / "other", listen="127.0.0.1:0") as other:
        with pytest.raises(FlowstoneError, match="cannot listen"):
            await node.reconfigure(listen=other.address)
    async with await connect(node):
        assert node.configuration.listen == "127.0.0.1:0"


async def test_promoted_node_accepts_synchronous_writes_and_a_demoted_one_does_not(node: flowstone.Node) -> None:
    safe = await node.create_space("safe", is_sync=True)
    await safe.create_index("primary")
    with pytest.raises(errors.SyncQueueUnclaimed) as refused:
        await safe.insert((1,))
    assert refused.value.message == "The synchronous transaction queue doesn't belong to any instance"
    assert refused.value.hint == "claim it with await node.promote(), or start with election_mode"
    await node.promote()
    assert (node.info()["synchro"]["queue"]["owner"], node.info()["election"]["term"]) == (1, 2)
    await safe.insert((1,))
    async with node.transaction(is_sync=True) as transaction:
        transaction.space("fruit").insert((1, "apple", 5))
    await node.demote()
    assert (node.info()["synchro"]["queue"]["owner"], node.info()["election"]["term"]) == (0, 3)
    with pytest.raises(errors.SyncQueueUnclaimed):
        await safe.insert((2,))
    await node.clear_synchro_queue()
    assert node.info()["synchro"]["queue"]["owner"] == 1, "the old name of a promotion"
    async with node.transaction("linearizable") as transaction:
        assert [tuple(row) for row in transaction.space("safe").select()] == [(1,)]


async def test_2_6_has_synchronous_writes_and_no_promotion(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path, dialect="2.6") as node:
        safe = await node.create_space("safe", is_sync=True)
        await safe.create_index("primary")
        await safe.insert((1,))
        await node.clear_synchro_queue()
        for refused in (node.promote(), node.demote()):
            with pytest.raises(errors.Unsupported):
                await refused


async def test_triggers_receive_elections_and_programs_can_await_their_outcome(tmp_path: Path) -> None:
    node, seen = flowstone.Node(tmp_path), []

    @node.on_election
    async def note() -> None:
        seen.append(node.info()["election"]["state"])

    async with node:
        await node.wait_rw(5)
        await node.reconfigure(election_mode="voter")
        await node.wait_ro(5)
        with pytest.raises(errors.System, match="timed out"):
            await node.wait_rw(0.01)
        await node.reconfigure(election_mode="manual")
        await node.promote()
        await node.wait_rw(5)
        assert node.info()["election"]["state"] == "leader"
    assert "leader" in seen


async def test_temporary_and_local_spaces_can_be_created(node: flowstone.Node) -> None:
    temporary = await node.create_space("temporary", temporary=True)
    await temporary.create_index("primary")
    before = node.info()["vclock"]
    await temporary.insert((1,))
    assert node.info()["vclock"] == before
    await node.reconfigure(read_only=True)
    await temporary.insert((2,))
    assert len(temporary) == 2


async def test_space_cannot_be_created_twice(node: flowstone.Node) -> None:
    with pytest.raises(errors.SpaceExists, match="Space 'fruit' already exists"):
        await node.create_space("fruit")
    assert (await node.create_space("fruit", if_not_exists=True)).id == node.space("fruit").id


@pytest.mark.parametrize("mode", ["none", "write", "fsync"])
async def test_node_serves_in_every_wal_mode(tmp_path: Path, mode: Literal["none", "write", "fsync"]) -> None:
    async with flowstone.Node(tmp_path, wal_mode=mode) as node:
        space = await node.create_space("space")
        await space.create_index("primary")
        assert await space.insert((1,)) == (1,)
    assert bool(files(tmp_path, ".xlog")) is (mode != "none")
