"""Options of running servers: checks before anything is sent, and no password in what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstone.iproto.uri import parse_uri
from flowstone.node.configuration import OPTIONS
from flowstone.node.node import Node
from flowstone.observation.live_options import (
    HIDDEN,
    LiveOptions,
    OptionRefused,
    may_not_read,
    read_options,
    replicate_again,
    without_password,
)
from flowstone.observation.query import Asking
from flowstone.outside import production
from tests import real_tarantool
from tests.interop.versions import Binary, fits
from tests.real_tarantool import free_port

NODE = LiveOptions(True, {"read_only": False, "wal_mode": "write", "log_level": "info", "checkpoint_count": 2})
REAL = LiveOptions(False, {"read_only": False, "wal_mode": "write", "log_level": 5, "memtx_memory": 2**28})


@pytest.mark.parametrize(
    ("options", "name", "text", "value", "before", "after"),
    [
        (NODE, "read_only", "true", True, False, True),
        (NODE, "read_only", "", None, False, False),
        (NODE, "checkpoint_count", "4", 4, 2, 4),
        (NODE, "log_level", "5", 5, "info", "5"),
        (NODE, "wal_mode", "write", "write", "write", "write"),
        (NODE, "replication_synchro_quorum", "N / 2 + 1", "N / 2 + 1", None, "N / 2 + 1"),
        (NODE, "replication", "u:hidden@a:1, b:2", ["u:hidden@a:1", "b:2"], None, ["u@a:1", "b:2"]),
        (REAL, "read_only", "true", True, False, True),
        (REAL, "log_level", "5", 5, 5, 5),
        (REAL, "memtx_memory", "1e9", 1e9, 2**28, 1e9),
        (REAL, "readahead", "-1", -1, None, -1),
        (REAL, "custom_proc_title", "shop 1", "shop 1", None, "shop 1"),
        (REAL, "feedback_enabled", "false", False, None, False),
        (REAL, "custom_proc_title", "", None, None, None),
        (REAL, "replication", "u:hidden@a:1", ["u:hidden@a:1"], None, ["u@a:1"]),
        (REAL, "feedback_host", "u:hidden@x", "u:hidden@x", None, HIDDEN),
    ],
)
def test_change_has_the_value_to_send_and_the_values_to_show(
    options: LiveOptions, name: str, text: str, value: Any, before: Any, after: Any
) -> None:
    change = options.change(name, text)
    assert (change.value, change.before, change.after) == (value, before, after)
    assert change.is_new is (before != after)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if not option.is_dynamic])
@pytest.mark.parametrize("options", [NODE, REAL])
def test_option_that_needs_a_restart_is_refused(options: LiveOptions, name: str) -> None:
    text = {"wal_mode": "fsync", "dialect": "2.6", "wal_max_size": "1000000"}.get(name, "x")
    if name.endswith("_uuid"):
        text = "5313b8d5-82a0-4fb4-a280-9e8bf79e1cac"
    with pytest.raises(OptionRefused, match=f"option {name} cannot be changed at run time; .* restart the member"):
        options.change(name, text)


@pytest.mark.parametrize(
    ("options", "name", "text", "complaint"),
    [
        (NODE, "raed_only", "true", r"unknown option raed_only; did you mean read_only\?"),
        (NODE, "memtx_memory", "1", "unknown option memtx_memory"),
        (NODE, "read_only", "yes", "'read_only': should be of type boolean; true or false"),
        (NODE, "checkpoint_count", "0", "'checkpoint_count': the value must not be less than one"),
        (REAL, "checkpoint_count", "0", "'checkpoint_count': the value must not be less than one"),
        (REAL, "election_mode", "leader", "'election_mode': the value must be one of"),
        (REAL, "replication", "u:hidden@a", "'replication': expected host:service or /unix.socket"),
    ],
)
def test_wrong_value_is_refused_as_in_a_file(options: LiveOptions, name: str, text: str, complaint: str) -> None:
    with pytest.raises(OptionRefused, match=complaint) as caught:
        options.change(name, text)
    assert "hidden" not in str(caught.value)


def test_changes_of_a_node_are_checked_together() -> None:
    changes = [NODE.change("replication_anon", "true"), NODE.change("election_mode", "off")]
    with pytest.raises(OptionRefused, match="only when the instance is read-only"):
        NODE.check(changes)
    NODE.check([*changes, NODE.change("read_only", "true")])
    LiveOptions(False, {}).check(changes)  # a real server checks them


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("u:hidden@a:1,u:hidden@b:2", "u@a:1,u@b:2"),
        (["u:hidden@a:1", 3301], ["u@a:1", 3301]),
        ({"uri": "u:hidden@a:1", "password": "hidden", "n": 1}, {"uri": "u@a:1", "n": 1}),
        ("a:1?transport=ssl&ssl_password=hidden", "a:1?transport=ssl"),
        ("not a uri with hidden@", HIDDEN),
        ("plain", "plain"),
        (None, None),
    ],
)
def test_passwords_are_not_shown(value: Any, shown: Any) -> None:
    assert without_password(value) == shown


def test_known_options_are_shown_by_name() -> None:
    assert NODE.shown([]) == {"checkpoint_count": 2, "log_level": "info", "read_only": False, "wal_mode": "write"}
    assert NODE.shown(["wal_mode", "listen"]) == {"wal_mode": "write", "listen": None}
    assert REAL.shown(["memtx_memory"]) == {"memtx_memory": 2**28}
    with pytest.raises(OptionRefused, match=r"unknown option memtx_memry; did you mean memtx_memory\?"):
        REAL.shown(["memtx_memry"])


def test_no_secret_option_can_change_at_run_time() -> None:
    """The command would show its value."""
    assert not [name for name, option in OPTIONS.items() if option.is_secret and option.is_dynamic]


async def test_options_of_a_node_are_valid_for_its_own_table(tmp_path: Path) -> None:
    async with Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret")) as node:
        asking = Asking(production(), parse_uri(f"app:secret@{node.address}"))
        options = await read_options(asking)
        await asking.close()
    assert options.is_flowstone
    assert options.values is not None
    assert set(options.values) <= set(OPTIONS)
    options.check([options.change("read_only", "true")])


SETUP = """
box.schema.user.create('watcher', {password = 'secret'})
box.schema.func.create('box.info')
box.schema.user.grant('watcher', 'execute', 'function', 'box.info')
"""


async def _options_of(uri: str) -> LiveOptions:
    asking = Asking(production(), parse_uri(uri))
    try:
        return await read_options(asking)
    finally:
        await asking.close()


@fits(">=2.6")
async def test_real_server_sends_its_options_without_passwords(binary: Binary, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    cfg = f"replication = {{'u:hidden@{nobody}'}}, replication_connect_timeout = 0.1, replication_connect_quorum = 0"
    if binary.version >= (2, 11):
        cfg += ", bootstrap_strategy = 'legacy'"
    with real_tarantool.serve(tmp_path, cfg=cfg, setup=SETUP, binary=binary.path) as server:
        options = await _options_of(server.uri)
        assert not options.is_flowstone
        assert options.values is not None
        assert options.values["replication"] == [f"u@{nobody}"]
        assert options.values["memtx_memory"] == 2**28
        assert "hidden" not in str(options.values)

        denied = await _options_of(f"watcher:secret@{server.uri}")
        assert denied.values is None
        assert "box.schema.user.grant('watcher', 'execute', 'universe')" in str(
            may_not_read(Asking(production(), parse_uri(f"watcher:secret@{server.uri}")))
        )

        asking = Asking(production(), parse_uri(server.uri))
        await replicate_again(asking, options, timeout=30)
        kept = await asking.evaluate("return box.cfg.replication[1], box.cfg.replication_connect_quorum")
        assert kept == f"u:hidden@{nobody}"
        assert await asking.evaluate("return box.cfg.replication_connect_quorum") == 0
        await asking.close()


@fits(">=2.6")
@pytest.mark.parametrize("form", ["'u:hidden@{}'", "{{'u:hidden@{}'}}", "'{}'"])
async def test_replication_of_a_real_server_survives_a_reconnect_without_peers(
    binary: Binary, tmp_path: Path, form: str
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with real_tarantool.serve(tmp_path, cfg="replication_connect_timeout = 0.1", binary=binary.path) as server:
        asking = Asking(production(), parse_uri(server.uri))
        quorum = "replication_connect_quorum = {}"
        if binary.version < (2, 11):
            await asking.evaluate(f"box.cfg{{{quorum.format(0)}}}")
        await asking.evaluate(f"box.cfg{{replication = {form.format(nobody)}}}")
        if binary.version < (2, 11):
            await asking.evaluate(f"box.cfg{{{quorum.format('box.NULL')}}}")  # now all must answer, as by default
        before = await asking.evaluate("return require('json').encode(box.cfg.replication)")
        await replicate_again(asking, LiveOptions(False, {}), timeout=30)
        assert await asking.evaluate("return require('json').encode(box.cfg.replication)") == before
        assert await asking.evaluate("return box.cfg.replication_connect_quorum") is None
        assert await asking.evaluate("return box.info.replication[1] ~= nil")
        await asking.close()


@fits(">=2.6")
async def test_secrets_in_uris_of_real_servers_stay_there(binary: Binary, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    forms = [f"'u:hidden@{nobody}'", f"{{'u:hidden@{nobody}', 'v:hidden@{nobody}'}}"]
    if binary.version >= (2, 11):
        forms += [
            f"{{{{uri = 'u@{nobody}', password = 'hidden'}}}}",
            f"'u:hidden@{nobody},v:hidden@{nobody}'",
            f"{{'u:hidden@{nobody}?ssl_password=hidden'}}",
        ]
    with real_tarantool.serve(tmp_path, cfg="replication_connect_timeout = 0.1", binary=binary.path) as server:
        asking = Asking(production(), parse_uri(server.uri))
        for form in forms:
            # Newer servers keep the values of box.cfg in a table behind it.
            table = "getmetatable(box.cfg).__index" if binary.version >= (2, 11) else "box.cfg"
            await asking.evaluate(f"rawset({table}, 'custom', {form})")
            options = await read_options(asking)
            assert "hidden" not in str(options.values).replace(HIDDEN, ""), form
            assert options.values is not None
            assert nobody in str(options.values["custom"])
        await asking.close()
