"""`flowstone explain` reports problems to people and programs, and in its exit code."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import flowstone
from flowstone.cli import run
from flowstone.cli.replica_set.explain import is_path, looked_at
from flowstone.lake.quarantine import Quarantine
from flowstone.observation.replica_set import replica_sets
from flowstone.spark.lake import Lake, LakeProgress
from tests import real_tarantool
from tests.node.expelled_files import leave_expelled
from tests.observation.directories import leave
from tests.observation.reports import downstream, report
from tests.real_tarantool import Server, free_port
from tests.spark.lake_rows_given import ORDERS, UUID, at, folded, packed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with real_tarantool.serve(tmp_path_factory.mktemp("explain") / "server") as running:
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave("real", tmp_path_factory.mktemp("explain") / "data")


def test_healthy_server_is_reported_healthy(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", server.uri]) == 0
    shown = capsys.readouterr()
    assert "no problems found" in shown.out
    assert f"1 of 1 members answered: {server.uri} (rw, " in shown.out
    assert shown.err == ""


def test_finding_has_a_headline_a_reason_and_advice(
    server: Server, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(directory, damaged)
    log = min(damaged.glob("*.xlog"))
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)
    assert run(["explain", server.uri, str(damaged)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"! {log} is damaged  [damaged_log]"
    assert lines[1].startswith("  why: at bytes ")
    assert lines[2].startswith("  what to do: ")
    assert f"checked {damaged}: instance" in lines[-1]
    assert run(["explain", "--evidence", str(damaged)]) == 1
    assert f"  evidence: {log}: bytes " in capsys.readouterr().out


def test_json_lists_the_findings_and_their_sources(
    server: Server, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    assert run(["explain", "--json", server.uri, gone, str(directory)]) == 1
    told = json.loads(capsys.readouterr().out)
    (finding,) = told["findings"]
    assert (finding["kind"], finding["severity"], finding["label"]) == ("unreachable", "stopped", gone)
    assert all(finding[key] for key in ("what", "why", "advice", "evidence"))
    assert [member["answered"] for one in told["replicasets"] for member in one["members"]] == [True, False]
    (seen,) = told["directories"]
    assert (seen["path"], seen["is_in_use"]) == (str(directory), False)
    assert seen["end"]["1"] > 60


def test_directory_of_an_expelled_member_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(leave_expelled(tmp_path / "data", tmp_path / "other"))
    assert run(["explain", str(tmp_path / "data")]) == 1
    shown = capsys.readouterr().out
    assert "its instance was expelled  [not_registered]" in " ".join(shown.split("\n")[:2])
    assert "flowstone rebootstrap" in shown
    assert run(["explain", str(tmp_path / "other")]) == 0


def test_two_directories_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def write(path: Path, *keys: int) -> None:
        async with flowstone.Node(str(path)) as node:
            space = await node.create_space("things", format=[("id", "unsigned")], if_not_exists=True)
            await space.create_index("pk", if_not_exists=True)
            for key in keys:
                await space.insert((key,))

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    asyncio.run(write(ours, 1))
    shutil.copytree(ours, theirs)
    asyncio.run(write(ours, 2))
    asyncio.run(write(theirs, 3))
    assert run(["explain", str(ours), str(theirs)]) == 1
    shown = capsys.readouterr().out
    assert f"✗ the histories of {ours} and {theirs} have diverged  [split_brain]" in shown
    assert f"only {ours} has 1 row, beginning with 1:" in shown
    assert "INSERT things {id: 2}" in shown


def test_rejected_login_is_reported_without_the_password(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "-u", "admin", "-p", "geheim", server.uri]) == 1
    shown = capsys.readouterr()
    assert "[wrong_password]" in shown.out
    assert "geheim" not in shown.out + shown.err


@pytest.mark.parametrize("where", ["nowhere/at/all", "no such place", "127.0.0.1:"])
def test_argument_that_is_neither_server_nor_directory_is_a_usage_error(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", where]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_file_argument_is_rejected_with_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "00000000000000000000.xlog"
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for where, directory in ((str(tmp_path / name), str(tmp_path)), (name, ".")):
        assert run(["explain", where]) == 2
        told = f"flowstone: {where} is a file; specify its directory, {directory};"
        assert capsys.readouterr().err.startswith(told)


def test_directories_are_distinguished_from_addresses(tmp_path: Path) -> None:
    assert is_path(str(tmp_path))
    assert is_path("data/a")
    assert not is_path("127.0.0.1:3301")
    assert not is_path("unix/:/run/tarantool.sock")
    assert not is_path("admin:secret@unix/:/run/tarantool.sock")
    assert not is_path("db1:3301?transport=ssl&ssl_ca_file=/etc/ca.pem")


@pytest.mark.parametrize(
    "where",
    [
        "admin:geheim@127.0.0.1:PORT?transport=ssl&ssl_ca_file=/nowhere/ca.pem",
        "admin:geh/eim@127.0.0.1:PORT",
        "admin:geheim@nowhere/at/all",
        "127.0.0.1:PORT?transport=ssl&ssl_ca_file=/nowhere/ca.pem&ssl_password=geheim",
        "127.0.0.1:PORT/?transport=ssl&ssl_password=geheim",
    ],
)
def test_address_with_a_path_is_not_a_directory_and_shows_no_password(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", where.replace("PORT", str(free_port()))]) in (1, 2)
    shown = capsys.readouterr()
    assert "no such directory" not in shown.err
    assert not any(part in shown.out + shown.err for part in ("geh", "eim"))


def test_servers_outside_the_set_are_not_counted_as_members() -> None:
    (line,) = looked_at(replica_sets([report(1, {1: 5}), report(0, {1: 5}, ro=True)]), ())
    assert "1 of 1 members answered" in line
    assert line.count("{1: 5}") == 2


def test_members_without_a_known_address_are_listed() -> None:
    (line,) = looked_at(replica_sets([report(1, {1: 5}, {2: {"downstream": downstream({1: 5})}})]), ())
    assert "1 of 2 members answered" in line
    assert line.endswith("; not queried (address unknown): replica 2")


def test_lake_with_misfits_is_explained_beside_servers(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = Lake.open(str(tmp_path / "lake"), engine="deltalake")
    lake.quarantine = Quarantine(lake.path, {})
    lake.create(ORDERS, UUID, at(5)).merge(folded({1: packed(1, 5)}), ORDERS, at(6), UUID)
    lake.save(LakeProgress(UUID, at(6)))
    assert run(["explain", server.uri, lake.path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("! 1 value of orders.name does not fit the column in ")
    assert lines[-1] == f"checked lake {lake.path}"
    assert run(["explain", "--json", lake.path]) == 1
    told = json.loads(capsys.readouterr().out)
    assert ([each["kind"] for each in told["findings"]], told["lakes"]) == (["misfits"], [lake.path])
