"""Options: Tarantool's defaults, checks and texts, and which options are dynamic."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.node import configuration
from flowstone.node.configuration import OPTIONS, Configuration, configure, listen_uri
from flowstone.node.option_checks import LOG_LEVELS
from flowstone.replication.raft.election import Config, ElectionMode, Fencing
from tests.places import ROOT

UUID = "5313b8d5-82a0-4fb4-a280-9e8bf79e1cac"

REFUSED: tuple[dict[str, Any], ...] = (
    {"checkpoint_count": 0},
    {"wal_mode": "sometimes"},
    {"listen": "a b"},
    {"listen": "localhost"},
    {"listen": True},
    {"no_such_option": 1},
    {"read_only": 1},
    {"wal_mode": 1},
    {"wal_max_size": 1},
    {"wal_max_size": "many"},
    {"instance_uuid": "zz"},
    {"replicaset_uuid": "00000000-0000-0000-0000-000000000000"},
    {"replication_synchro_quorum": 0},
    {"replication_synchro_quorum": 32},
    {"replication_synchro_timeout": 0},
    {"replication_synchro_timeout": "long"},
)

NOT_DYNAMIC: tuple[dict[str, Any], ...] = (
    {"wal_mode": "fsync"},
    {"wal_max_size": 5000},
    {"wal_dir": "elsewhere"},
    {"instance_uuid": UUID},
)

ASK = """
local json, msgs = require('json'), {}
local function ask(options)
    local ok, err = pcall(box.cfg, options)
    table.insert(msgs, ok and box.NULL or {err.code, err.message})
end
for _, options in ipairs(json.decode([=[%s]=])) do ask(options) end
box.cfg{log='server.log'}
for _, options in ipairs(json.decode([=[%s]=])) do ask(options) end
local defaults = {}
for _, name in ipairs(json.decode([=[%s]=])) do
    defaults[name] = box.cfg[name]
end
print(json.encode({msgs, defaults}))
os.exit(0)
"""


@pytest.fixture(scope="module")
def real(tarantool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the real server's answers to REFUSED and NOT_DYNAMIC, and its defaults."""
    script = ASK % (json.dumps(REFUSED), json.dumps(NOT_DYNAMIC), json.dumps(list(OPTIONS)))
    return json.loads(tarantool.run(script, tmp_path_factory.mktemp("options")))


def refusal(call: Any) -> list[Any]:
    with pytest.raises(errors.TarantoolError) as refused:
        call()
    return [refused.value.code, refused.value.message]


@pytest.mark.real
def test_invalid_options_are_rejected_with_the_code_and_text_of_a_real_server(real: Any) -> None:
    ours = [refusal(lambda: configure(options)) for options in REFUSED]  # noqa: B023
    assert ours == real[0][: len(REFUSED)]


@pytest.mark.real
def test_options_fixed_at_startup_equal_those_of_a_real_server(real: Any) -> None:
    ours = [refusal(lambda: configure({}).changed(options)) for options in NOT_DYNAMIC]  # noqa: B023
    assert ours == real[0][len(REFUSED) :]


@pytest.mark.real
def test_has_the_defaults_of_a_real_server(real: Any) -> None:
    theirs = real[1]
    # A level has a number and a name; the real server shows the number.
    assert theirs.pop("log_level") == 5
    assert theirs.pop("replication_synchro_quorum") == configure({}).synchro_quorum(Dialect.V2_6, 3)
    ours = {name: OPTIONS[name].default for name in theirs}
    assert ours == theirs


REFUSED_2_11: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"election_mode": "king"},
        "the value must be one of the following strings: 'off', 'voter', 'candidate', 'manual'",
    ),
    ({"election_mode": True}, "should be of type string"),
    ({"election_timeout": 0}, "the value must be a positive number"),
    ({"election_transfer_timeout": -1}, "the value must be >= 0"),
    ({"election_fencing_mode": "hard"}, "the value must be one of the following strings: 'off', 'soft', 'strict'"),
    (
        {"election_mode": "voter", "replication_anon": True, "read_only": True},
        "the value may only be set to 'off' when 'replication_anon' is set to true",
    ),
    (
        {"replication_synchro_quorum": "N - 1"},
        "the formula is evaluated to the quorum 0 for replica number 1, which is out of range [1;31]",
    ),
    ({"replication_synchro_quorum": True}, "should be one of types string, number"),
    (
        {"replication_synchro_quorum": "32"},
        "the value must be greater than zero and less than maximal number of replicas",
    ),
)
"""Options that 2.6 lacks or defines differently, with the messages of 2.11.9."""


@pytest.mark.parametrize(("options", "problem"), REFUSED_2_11)
def test_quorum_and_election_options_are_rejected_as_by_2_11(options: dict[str, Any], problem: str) -> None:
    name = next(iter(options))
    assert refusal(lambda: configure(options)) == [59, f"Incorrect value for option '{name}': {problem}"]


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("wal_mode", configuration.WAL_MODES),
        ("log_format", configuration.LOG_FORMATS),
        ("bootstrap_strategy", configuration.STRATEGIES),
        ("election_mode", configuration.ELECTION_MODES),
        ("election_fencing_mode", configuration.FENCING_MODES),
        ("dialect", configuration.DIALECTS),
        ("log_level", LOG_LEVELS),
        ("read_only", ("true", "false")),
        ("instance_uuid", ("a UUID such as",)),
        ("replicaset_uuid", ("a UUID such as",)),
    ],
)
def test_option_error_lists_the_allowed_values(name: str, allowed: tuple[str, ...]) -> None:
    with pytest.raises(errors.Cfg) as refused:
        configure({name: "sometimes"})
    assert refused.value.message.startswith(f"Incorrect value for option '{name}': ")
    assert all(one in str(refused.value) for one in allowed)
    assert (refused.value.hint is None) is all(one in refused.value.message for one in allowed)


def test_size_of_the_synchronous_queue_must_not_be_negative() -> None:
    with pytest.raises(errors.TarantoolError, match="replication_synchro_queue_max_size must be >= 0"):
        configure({"replication_synchro_queue_max_size": -1})


@pytest.mark.parametrize(
    ("given", "quorums"),
    [
        (None, (1, 1, 2, 2, 3, 3)),
        (2, (2, 2, 2, 2, 2, 2)),
        ("3", (3, 3, 3, 3, 3, 3)),
        ("N / 2 + 1", (1, 1, 2, 2, 3, 3)),
        ("math.min(2, N)", (1, 1, 2, 2, 2, 2)),
    ],
)
def test_synchronous_quorum_is_a_number_or_a_formula(given: object, quorums: tuple[int, ...]) -> None:
    made = configure({"replication_synchro_quorum": given})
    assert tuple(made.synchro_quorum(Dialect.V2_11, members) for members in range(6)) == quorums


def test_2_6_requires_a_numeric_quorum_and_has_no_elections() -> None:
    assert configure({}).synchro_quorum(Dialect.V2_6, 5) == 1
    assert configure({"dialect": "2.6", "replication_synchro_quorum": 3}).synchro_quorum(Dialect.V2_6, 5) == 3
    assert configure({}).election(Dialect.V2_6) == Config()
    number = "Incorrect value for option 'replication_synchro_quorum': should be of type number"
    assert refusal(lambda: configure({"dialect": "2.6", "replication_synchro_quorum": "N / 2 + 1"})) == [59, number]
    mode = "Incorrect value for option 'election_mode': unexpected option"
    assert refusal(lambda: configure({"dialect": "2.6", "election_mode": "candidate"})) == [59, mode]
    # The dialect may be known from the data only.
    formula = configure({"replication_synchro_quorum": "N / 2 + 1"})
    assert refusal(lambda: formula.synchro_quorum(Dialect.V2_6, 5)) == [59, number]
    assert refusal(lambda: configure({"election_mode": "voter"}).election(Dialect.V2_6)) == [59, mode]


def test_election_mode_and_timeouts_are_applied() -> None:
    options = {"election_mode": "candidate", "election_timeout": 2, "election_fencing_mode": "strict"}
    made = configure({**options, "replication_timeout": 0.5}).election(Dialect.V2_11)
    assert made == Config(ElectionMode.CANDIDATE, election_timeout=2, death_timeout=2.0, fencing=Fencing.STRICT)
    assert configure({}).election(Dialect.V2_11) == Config(ElectionMode.OFF, 5.0, 4.0, Fencing.SOFT)


def test_none_and_the_empty_string_select_the_default() -> None:
    assert configure({"wal_mode": None, "checkpoint_count": ""}) == Configuration()


def test_a_port_may_be_a_number() -> None:
    assert configure({"listen": 3301}).listen == "3301"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:3301", "127.0.0.1", 3301),
        ("localhost:0", "localhost", 0),
        ("3301", "127.0.0.1", 3301),
        ("*:3301", "0.0.0.0", 3301),
        ("[::1]:3301", "::1", 3301),
        ("unix/:/tmp/node.sock", "/tmp/node.sock", None),
        ("/tmp/node.sock", "/tmp/node.sock", None),
    ],
)
def test_bare_port_listens_on_loopback(text: str, host: str, port: int | None) -> None:
    uri = listen_uri(text)
    assert (uri.host, uri.port) == (host, port)


def test_integer_options_accept_integral_floats_only() -> None:
    assert configure({"checkpoint_wal_threshold": 1e18}).checkpoint_wal_threshold == 10**18
    with pytest.raises(errors.TarantoolError, match="'checkpoint_count': should be a whole number"):
        configure({"checkpoint_count": 1.5})


def test_certificate_requires_its_key() -> None:
    with pytest.raises(errors.TarantoolError, match="'ssl_key_file': needed with ssl_cert_file"):
        configure({"ssl_cert_file": "node.crt"})
    with pytest.raises(errors.TarantoolError, match="'ssl_cert_file': needed with ssl_ca_file"):
        configure({"ssl_ca_file": "ca.crt"})
    with pytest.raises(errors.TarantoolError, match="'ssl_cert_file': needed with ssl_password"):
        configure({"ssl_password": "hush"})


def test_changed_configuration_lists_the_differences() -> None:
    before = configure({})
    after = before.changed({"read_only": True, "checkpoint_count": 2, "wal_mode": "write"})
    assert before.differences(after) == ["read_only"]


def test_peers_are_shown_without_secrets_and_can_be_set_as_shown() -> None:
    uris = ["app:secret@db1:3301?transport=ssl&ssl_ca_file=ca.pem&ssl_password=hidden", "db2:3301"]
    configuration = configure({"replication": uris})
    shown = OPTIONS["replication"].shown(configuration.replication)
    assert shown == ["app@db1:3301?transport=ssl&ssl_ca_file=ca.pem", "db2:3301"]
    assert configuration.changed({"replication": shown}).replication == tuple(uris)
    assert configuration.changed({"replication": "app@db3:3301"}).replication == ("app@db3:3301",)
    assert "secret" not in repr(configuration)


def test_shown_quorum_is_the_default_of_the_dialect() -> None:
    shown = configure({}).shown(Dialect.V2_11)
    assert shown["replication_synchro_quorum"] == "N / 2 + 1"
    assert configure({}).shown(Dialect.V2_6)["replication_synchro_quorum"] == 1
    assert configure({"replication_synchro_quorum": 2}).shown(Dialect.V2_11)["replication_synchro_quorum"] == 2
    assert "replication" not in shown
    assert "ssl_password" not in shown


def documented() -> str:
    """Return the table of docs/reference/configuration.md in the form of the options."""
    lines = ["| option | type | default | at run time | what |", "|---|---|---|---|---|"]
    for option in OPTIONS.values():
        default = "" if option.default in (None, ()) else f"`{json.dumps(option.default)}`"
        when = "yes" if option.is_dynamic else ""
        lines.append(f"| `{option.name}` | {', '.join(option.types)} | {default} | {when} | {option.help} |")
    return "\n".join(lines)


def test_documentation_lists_every_option_with_its_default() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert documented() in text


def test_password_of_the_bootstrap_leader_is_hidden() -> None:
    made = configure({"bootstrap_strategy": "config", "bootstrap_leader": "user:secret@db1:3301"})
    assert "secret" not in repr(made)
    assert OPTIONS["bootstrap_leader"].shown(made.bootstrap_leader) == "user@db1:3301"
    assert OPTIONS["bootstrap_leader"].shown(None) is None
