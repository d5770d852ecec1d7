"""`flowstone config`: options of a node and of real servers, shown without passwords, checked, confirmed and set."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone.cli.replica_set.config import OUTCOME_UNKNOWN, UNTIL_RESTART
from tests import real_tarantool, served_node
from tests.cli.conftest import Command, Terminal
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.member import eventually
from tests.interop.versions import Binary, fits
from tests.real_tarantool import Server, free_port
from tests.served_node import PASSWORD, USER, ServedNode

KEEP = f"flowstone: {UNTIL_RESTART}"

SETUP = """
box.schema.user.create('watcher', {password = 'secret'})
box.schema.func.create('box.info')
box.schema.user.grant('watcher', 'execute', 'function', 'box.info')
box.schema.user.create('setter', {password = 'secret'})
box.schema.func.create('box.cfg')
box.schema.user.grant('setter', 'execute', 'function', 'box.info')
box.schema.user.grant('setter', 'execute', 'function', 'box.cfg')
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with served_node.serve(tmp_path_factory.mktemp("node"), dialect="2.11") as served:
        yield served


@pytest.fixture
def address(node: ServedNode, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the node; its first user is logged in by the environment."""
    monkeypatch.setenv("TT_CLI_USERNAME", USER)
    monkeypatch.setenv("TT_CLI_PASSWORD", PASSWORD)
    return f"127.0.0.1:{node.port}"


@pytest.fixture(scope="module")
def server(tarantool: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with real_tarantool.serve(tmp_path_factory.mktemp("real"), setup=SETUP) as served:
        yield served


def test_options_of_a_node_are_a_table_and_json(address: str, flowstone: Command) -> None:
    found = flowstone("config", address)
    assert (found.code, found.errors) == (0, [])
    lines = found.text.splitlines()
    assert lines[0].split() == ["option", "value"]
    assert ["read_only", "false"] in [line.split() for line in lines]
    told = json.loads(flowstone("config", "--json", address).text)
    assert told["address"] == address
    assert told["options"]["wal_mode"] == "write"
    one = flowstone("config", address, "wal_mode", "replication")
    assert [line.split() for line in one.text.splitlines()[1:]] == [["wal_mode", "write"], ["replication", "default"]]


def test_option_of_a_node_is_set_and_the_log_shows_it(address: str, node: ServedNode, flowstone: Command) -> None:
    found = flowstone("config", "--yes", address, "checkpoint_count=4", "too_long_threshold=1.5")
    assert (found.code, found.text) == (0, "checkpoint_count = 4\ntoo_long_threshold = 1.5\n")
    assert found.errors == [
        f"flowstone: checkpoint_count of {address}: 2 → 4",
        f"flowstone: too_long_threshold of {address}: 0.5 → 1.5",
        KEEP,
    ]
    assert "set 'checkpoint_count' configuration option to 4" in node.log()

    again = flowstone("config", address, "checkpoint_count=4")
    assert (again.code, again.errors, again.text) == (0, [], "checkpoint_count = 4; unchanged\n")

    told = json.loads(flowstone("config", "--yes", "--json", address, "checkpoint_count=").text)
    change = {"checkpoint_count": {"before": 4, "after": 2}}
    assert told == {"address": address, "is_changed": True, "options": change}


def test_change_is_confirmed_at_the_terminal(address: str, flowstone: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    unasked = flowstone("config", address, "net_msg_max=100")
    assert (unasked.code, unasked.text) == (2, "")
    assert unasked.errors[-1] == "flowstone: stdin is not a terminal; use --yes to skip the confirmation"
    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    refused = flowstone("config", address, "net_msg_max=100")
    assert (refused.code, refused.text) == (130, "")
    assert refused.errors[-1] == "set net_msg_max? (y/N) flowstone: nothing was changed"
    assert json.loads(flowstone("config", "--json", address, "net_msg_max").text)["options"] == {"net_msg_max": 768}


@pytest.mark.parametrize(
    ("settings", "complaints"),
    [
        (
            ["wal_mode=fsync"],
            ["option wal_mode cannot be changed at run time; change it where the member is configured, and restart"],
        ),
        (
            ["raed_only=true", "checkpoint_count=0"],
            [
                "unknown option raed_only; did you mean read_only?",
                "Incorrect value for option 'checkpoint_count': the value must not be less than one",
            ],
        ),
        (
            ["replication_anon=true"],
            ["Incorrect value for option 'replication_anon': the value may be set to true only when the instance is"],
        ),
        (["read_only=true", "wal_mode"], ["option wal_mode has no value, but others have; write OPTION=VALUE, or"]),
        (["read_only=true", "read_only=false"], ["option read_only is given twice; give it once"]),
        (["unknown"], ["unknown option unknown"]),
        (["--reconnect", "read_only=true"], ["both --reconnect and options are given; use one"]),
        (["replication=@missing"], ["missing: No such file or directory"]),
    ],
)
def test_wrong_option_is_a_usage_error_and_changes_nothing(
    address: str, flowstone: Command, settings: list[str], complaints: list[str]
) -> None:
    before = flowstone("config", address).text
    found = flowstone("config", "--yes", address, *settings)
    assert (found.code, found.text) == (2, "")
    for line, complaint in zip(found.errors, complaints, strict=True):
        assert line.startswith(f"flowstone: {complaint}")
    assert flowstone("config", address).text == before


def test_error_of_the_node_is_shown_with_its_code(address: str, flowstone: Command) -> None:
    taken = f"127.0.0.1:{free_port()}"
    found = flowstone("config", "--yes", address, "read_only=true", "replication_anon=true")
    assert found.code == 1
    assert "cannot be turned on after bootstrap has finished (ER_CFG, 59)" in found.errors[-1]
    assert json.loads(flowstone("config", "--json", address, "read_only").text)["options"] == {"read_only": False}
    nobody = flowstone("config", taken)
    assert (nobody.code, nobody.errors) == (1, [f"flowstone: cannot connect to {taken}: connection refused"])


@not_for_stand_ins
def test_replication_of_a_node_keeps_its_password_and_is_set_again(
    nodes: Cluster, flowstone: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nodes.ours("first")
    second = nodes.ours("second", replication=[first.uri])
    file = tmp_path / "replication"
    file.write_text(f"{first.uri},{second.uri}\n")
    secret = first.uri.partition("@")[0].partition(":")[2]

    found = flowstone("config", "--yes", first.address, f"replication=@{file}")
    user = first.uri.partition(":")[0]
    shown = f"{user}@{first.address},{user}@{second.address}"
    assert (found.code, found.text) == (0, f"replication = {shown}\n")
    assert f":{secret}" not in "".join(found.errors)
    first.wait_follow(second)

    # Without the password, which the node has.
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{user}@{second.address}\n"))
    assert flowstone("config", "--yes", first.address, "replication=@-").code == 0
    first.wait_follow(second)

    again = flowstone("config", "--yes", "--reconnect", first.address)
    assert (again.code, again.text) == (0, f"{first.address} replicates again from {user}@{second.address}\n")
    told = json.loads(flowstone("config", "--yes", "--json", "--reconnect", second.address).text)
    assert told["options"]["replication"]["after"] == [f"{user}@{first.address}"]
    first.wait_follow(second)
    second.wait_follow(first)

    alone = nodes.ours("alone")
    none = flowstone("config", "--yes", "--reconnect", alone.address)
    assert (none.code, none.errors) == (1, [f"flowstone: {alone.address} has no upstreams: its replication is empty"])


def test_options_of_a_real_server_are_shown_and_set(server: Server, flowstone: Command) -> None:
    found = flowstone("config", server.uri)
    assert (found.code, found.errors) == (0, [])
    assert ["memtx_memory", "268435456"] in [line.split() for line in found.text.splitlines()]

    found = flowstone("config", "--yes", server.uri, "read_only=true", "readahead=32640")
    assert (found.code, found.text) == (0, "read_only = true\nreadahead = 32640\n")
    assert found.errors[0] == f"flowstone: read_only of {server.uri}: false → true"
    back = flowstone("config", "--yes", server.uri, "read_only=", "readahead=")
    assert (back.code, back.text) == (0, "read_only = false\nreadahead = 16320\n")


@pytest.mark.parametrize(
    ("setting", "code", "complaint"),
    [
        ("wal_mode=fsync", 2, "option wal_mode cannot be changed at run time; change it where"),
        ("vinyl_dir=other", 1, "Can't set option 'vinyl_dir' dynamically (ER_RELOAD_CFG, 58); change it where the"),
        ("readahed=1", 1, "unexpected option (ER_CFG, 59); did you mean readahead?"),
        ("readahead=high", 1, "Incorrect value for option 'readahead': should be of type number (ER_CFG, 59)"),
        ("checkpoint_count=0", 2, "'checkpoint_count': the value must not be less than one"),
    ],
)
def test_wrong_option_of_a_real_server_is_one_error(
    server: Server, flowstone: Command, setting: str, code: int, complaint: str
) -> None:
    found = flowstone("config", "--yes", server.uri, setting)
    assert (found.code, found.text) == (code, "")
    assert complaint in found.errors[-1]


def test_rights_of_the_user_decide_what_is_possible(server: Server, flowstone: Command) -> None:
    watcher, setter = (f"{name}:secret@{server.uri}" for name in ("watcher", "setter"))
    unread = flowstone("config", watcher)
    assert (unread.code, unread.text) == (1, "")
    assert f"the user may not read the options of {server.uri}; on its master: " in unread.errors[0]
    unset = flowstone("config", "--yes", watcher, "too_long_threshold=1")
    assert unset.code == 1
    assert "box.schema.user.grant('watcher', 'execute', 'function', 'box.cfg')" in unset.errors[-1]
    # The right to call box.cfg is enough to set options.
    found = flowstone("config", "--yes", setter, "too_long_threshold=1")
    assert (found.code, found.text) == (0, "too_long_threshold = 1\n")
    guest = flowstone("config", f"nobody:hidden@{server.uri}")
    assert guest.code == 1
    assert "hidden" not in guest.errors[0]


def test_timeout_says_that_the_outcome_is_unknown(server: Server, flowstone: Command, tmp_path: Path) -> None:
    nobody = f"u:hidden@127.0.0.1:{free_port()}"
    found = flowstone("config", "--yes", "--timeout", "0.3", server.uri, f"replication={nobody}")
    assert found.code == 1
    assert found.errors[-1] == f"flowstone: {server.uri} did not answer within 0.3 s; {OUTCOME_UNKNOWN}"
    assert "hidden" not in "".join(found.errors)


@fits(">=2.6")
def test_real_server_replicates_again_after_reconnect(binary: Binary, cluster: Cluster, flowstone: Command) -> None:
    master = cluster.real("master")
    follower = cluster.real("follower", replication=[master.uri])
    found = flowstone("config", "--yes", "--reconnect", follower.address)
    user = master.uri.partition(":")[0]
    assert (found.code, found.text) == (0, f"{follower.address} replicates again from {user}@{master.address}\n")
    eventually("the follower follows", lambda: follower.upstream(master)["status"] == "follow")
    listed = json.loads(flowstone("config", "--json", follower.address, "replication").text)["options"]["replication"]
    assert listed == [f"{user}@{master.address}"]


@fits(">=2.11")
def test_newer_server_is_configured(binary: Binary, tmp_path: Path, flowstone: Command) -> None:
    with real_tarantool.serve(tmp_path, binary=binary.path) as server:
        found = flowstone("config", "--yes", server.uri, "election_mode=manual", "replication_synchro_quorum=N / 2 + 1")
        assert found.code == 0
        assert found.text == "election_mode = manual\nreplication_synchro_quorum = N / 2 + 1; unchanged\n"
        assert flowstone("config", "--yes", server.uri, "wal_mode=none").code == 2
