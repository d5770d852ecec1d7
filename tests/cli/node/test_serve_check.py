"""`flowstone serve --check`: its output, its problems, and that it changes nothing."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from flowstone import Node
from flowstone.iproto import errors
from tests.cli.conftest import Command
from tests.node.expelled_files import leave_expelled
from tests.places import ROOT


def state(directory: Path) -> list[tuple[str, int, float]]:
    """Return everything below a directory, with size and time."""
    found = [(str(path), path.stat()) for path in sorted(directory.rglob("*"))]
    return [(path, seen.st_size, seen.st_mtime_ns) for path, seen in found]


def make_data(directory: Path, **options: Any) -> None:
    async def make() -> None:
        async with Node(directory, **options):
            pass

    asyncio.run(make())


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FLOWSTONE_")]:
        monkeypatch.delenv(name)


def test_check_prints_the_options_in_toml_and_writes_nothing(flowstone: Command, tmp_path: Path) -> None:
    import tomllib

    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", "--wal-mode=fsync", "--http-listen=127.0.0.1:0")
    assert (answer.code, answer.errors) == (0, [])
    shown = tomllib.loads(answer.text)
    assert shown == {"listen": "127.0.0.1:0", "work_dir": "data", "wal_mode": "fsync", "http_listen": "127.0.0.1:0"}
    assert "# data does not exist and would be created" in answer.text
    assert state(tmp_path) == []


def test_the_example_configuration_is_accepted(flowstone: Command) -> None:
    answer = flowstone("serve", "--check", f"--config={ROOT / 'packaging' / 'node.toml'}", "--listen=127.0.0.1:0")
    assert (answer.code, answer.errors) == (0, [])


def test_secrets_are_not_shown(flowstone: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"FLOWSTONE_USER": "app:hunter2hunter2", "FLOWSTONE_HTTP_TOKEN": "hunter2hunter2hunter2"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    replication = "--replication=app:hunter2@127.0.0.1:1"
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", replication)
    assert answer.code == 0
    assert "hunter2" not in answer.text + "".join(answer.errors)
    assert 'replication = ["app@127.0.0.1:1"]' in answer.text
    assert "# http_token is set (not shown)" in answer.text


def test_check_reads_data_without_changes(flowstone: Command, tmp_path: Path) -> None:
    make_data(tmp_path / "data")
    before = state(tmp_path)
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", "--user=app:secret")
    assert (answer.code, answer.errors) == (0, [])
    assert re.search(r"^# data in data belongs to instance \S+ \(snapshots: 1, logs: 0\)$", answer.text, re.MULTILINE)
    assert "# user not created: the data directory is already initialized" in answer.text
    assert state(tmp_path) == before


def test_running_node_and_its_addresses_are_not_a_problem(flowstone: Command, tmp_path: Path) -> None:
    """This is the state before a reload."""

    async def with_node() -> tuple[int, str, list[str]]:
        async with Node(tmp_path / "data", listen="127.0.0.1:0") as node:
            answer = await asyncio.to_thread(flowstone, "serve", "--check", f"--listen={node.address}")
            return answer.code, answer.text, answer.errors

    code, text, complaints = asyncio.run(with_node())
    assert (code, complaints) == (0, [])
    assert "# a node is running in data: these options apply at its next start or on SIGHUP" in text
    assert "# SIGHUP applies all changes or none; restart the node to change any of work_dir, " in text


def test_options_that_need_a_restart_are_listed_only_for_a_running_node(flowstone: Command, tmp_path: Path) -> None:
    """Every option that a reload rejects is named, even if the file no longer has it."""

    async def with_node() -> str:
        async with Node(tmp_path / "data") as node:
            refused: dict[str, Any] = {
                "wal_mode": "fsync",
                "wal_max_size": 1 << 20,
                "memtx_dir": "elsewhere",
                "dialect": "2.6",
            }
            for name, value in refused.items():
                with pytest.raises(errors.ReloadCfg, match=f"restart the node to change {name}$"):
                    await node.reconfigure(**{name: value})
            return (await asyncio.to_thread(flowstone, "serve", "--check", "--listen=127.0.0.1:0")).text

    [line] = [line for line in asyncio.run(with_node()).splitlines() if "restart" in line]
    assert {"wal_mode", "wal_max_size", "memtx_dir", "dialect"} < set(line.replace(",", "").split())
    assert not {"listen", "checkpoint_interval", "replication"} & set(line.replace(",", "").split())
    assert "restart" not in flowstone("serve", "--check", "--listen=127.0.0.1:0").text


def test_address_in_use_is_a_problem_without_a_running_node(
    flowstone: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWSTONE_LISTEN", "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for option in ("--listen", "--http-listen"):
            answer = flowstone("serve", "--check", f"{option}={address}")
            assert answer.code == 2
            [complaint] = answer.errors
            assert complaint.startswith(
                f"flowstone: cannot listen on {address}: Address already in use; find the process that uses it"
            )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--listen=no-such-host.invalid:3301",), "check that it is an address of this machine, or choose"),
        (("--listen=99999",), "(given as --listen); host:port, unix/:/path, or a port; the highest port is 65535"),
        (("--http-listen=99999",), "expected HOST:PORT (given as --http-listen); ports end at 65535"),
        (
            ("--dialect=2.6", "--election-mode=candidate"),
            "(given as --election-mode); dialect 2.6 does not support elections; omit the option, or create",
        ),
    ],
)
def test_problem_states_its_place_and_advice(
    flowstone: Command, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], told: str
) -> None:
    monkeypatch.setenv("FLOWSTONE_LISTEN", "127.0.0.1:0")
    answer = flowstone("serve", "--check", *options)
    assert answer.code == 2
    (complaint,) = answer.errors
    assert told in complaint
    assert "find the process that uses it" not in complaint


def test_every_problem_is_reported_on_a_line(flowstone: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "00000000000000000005.snap").write_bytes(b"JUNK")
    tls = ("--ssl-cert-file=nowhere.pem", "--ssl-key-file=nowhere.pem")
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", *tls)
    assert answer.code == 2
    assert len(answer.errors) == 2
    assert "not a log file" in answer.errors[0]
    assert answer.errors[1].startswith("flowstone: cannot read ssl_cert_file nowhere.pem")


def test_every_invalid_option_of_a_file_is_reported_on_a_line(flowstone: Command, tmp_path: Path) -> None:
    wrong = ('listen = "nowhere"', 'wal_mode = "often"', "checkpoint_count = 0", "walmode = 1")
    (tmp_path / "node.toml").write_text("\n".join(wrong))
    for arguments in (("--check",), ()):
        answer = flowstone("serve", *arguments, "--config=node.toml")
        assert (answer.code, answer.text, len(answer.errors)) == (2, "", len(wrong))
        for line in wrong:
            assert any(line.partition(" ")[0] in complaint for complaint in answer.errors)


def test_logs_without_their_snapshot_are_a_problem(flowstone: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "00000000000000000005.xlog").write_bytes(b"JUNK")
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0")
    assert answer.code == 2
    assert answer.errors == [
        "flowstone: no snapshot in data, but 1 logs; restore the .snap file that the logs start from"
    ]


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--dialect=2.6", "dialect is 2.6, but the data in data has dialect 2.11"),
        ("--instance-uuid=11111111-1111-4111-8111-111111111111", "but the data in data belongs to "),
    ],
)
def test_data_of_another_dialect_or_set_is_a_problem(
    flowstone: Command, tmp_path: Path, option: str, problem: str
) -> None:
    make_data(tmp_path / "data")
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", option)
    assert answer.code == 2
    assert problem in answer.errors[0]


def test_file_in_place_of_a_directory_is_a_problem(flowstone: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", "--work-dir=file/below")
    assert answer.code == 2
    assert "file is not a directory" in answer.errors[0]


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--user=guest:x", "flowstone: the first user cannot have the name 'guest'"),
        ("--read-only", "flowstone: read_only is set, but there is no data in data yet; unset read_only"),
    ],
)
def test_options_unusable_for_new_data_are_a_problem(flowstone: Command, option: str, problem: str) -> None:
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", option)
    assert answer.code == 2
    (complaint,) = answer.errors
    assert complaint.startswith(problem)


def test_options_missing_in_the_dialect_of_the_data_are_a_problem(flowstone: Command, tmp_path: Path) -> None:
    make_data(tmp_path / "data", dialect="2.6")
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", "--election-mode=candidate")
    assert answer.code == 2
    assert "'election_mode': unexpected option: the data in data has dialect 2.6" in answer.errors[0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "is not registered with replica set"),
        (("--replication-anon", "--read-only"), "Incorrect value for option 'replication_anon'"),
    ],
)
def test_directory_of_an_expelled_member_is_a_problem(
    flowstone: Command, tmp_path: Path, options: tuple[str, ...], problem: str
) -> None:
    asyncio.run(leave_expelled(tmp_path / "data", tmp_path / "other"))
    (tmp_path / "data" / "00000000000000000099.xlog.inprogress").touch()
    before = state(tmp_path)
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", *options)
    assert answer.code == 2
    (complaint,) = answer.errors
    assert problem in complaint
    assert "flowstone rebootstrap" in complaint
    assert state(tmp_path) == before
    others = flowstone("serve", "--check", "--listen=127.0.0.1:0", "--work-dir=other")
    assert (others.code, others.errors) == (0, [])


def test_invalid_value_is_a_problem(flowstone: Command) -> None:
    answer = flowstone("serve", "--check", "--wal-mode=sometimes")
    assert (answer.code, len(answer.errors)) == (2, 1)


def test_remote_dashboard_address_is_reported_with_advice_on_the_token(flowstone: Command) -> None:
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", "--http-listen=*:0")
    assert answer.code == 0
    assert "a start would generate and print a token" in answer.text
