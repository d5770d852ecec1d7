"""`flowstone call`: arguments, results and errors of nodes and of a real Tarantool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowstone.cli.replica_set.call import OUTCOME_UNKNOWN, json_or_text
from tests import real_tarantool, served_node
from tests.cli.conftest import Command
from tests.interop.versions import Binary, fits
from tests.node.fake_server import answering, peer
from tests.real_tarantool import Server, free_port
from tests.served_node import PASSWORD, USER, ServedNode

SETUP = """
function echo(...) return ... end
function kinds(...)
    local found = {}
    for _, value in ipairs({...}) do table.insert(found, type(value)) end
    return found
end
function nothing() end
function fails() box.error{code = 3000, reason = 'out of\\27[31m paper'} end
function sleeps() require('fiber').sleep(60) end
function values() return {[50] = {'x'}}, require('uuid').fromstr('5313b8d5-82a0-4fb4-a280-9e8bf79e1cac'),
    require('decimal').new('1.50') end
box.schema.user.create('clerk', {password = 'secret'})
box.schema.func.create('nothing')
box.schema.user.grant('clerk', 'execute', 'function', 'nothing')
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with served_node.serve(tmp_path_factory.mktemp("node"), dialect="2.11") as served:
        yield served


@pytest.fixture
def as_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log in as the first user of the node, by the environment."""
    monkeypatch.setenv("TT_CLI_USERNAME", USER)
    monkeypatch.setenv("TT_CLI_PASSWORD", PASSWORD)


@pytest.fixture(scope="module")
def server(tarantool: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with real_tarantool.serve(tmp_path_factory.mktemp("real"), setup=SETUP) as served:
        yield served


@pytest.mark.usefixtures("as_first")
def test_node_is_called_and_its_results_are_yaml_and_json(node: ServedNode, flowstone: Command) -> None:
    address = f"127.0.0.1:{node.port}"
    for name, *arguments in (
        ("box.schema.space.create", "orders", '{"if_not_exists": true}'),
        ("box.space.orders:create_index", "primary"),
        ("box.space.orders:insert", '[-1.5, "a", null]'),
    ):
        found = flowstone("call", address, name, *arguments)
        assert found.code == (1 if "insert" in name else 0)
    assert "Tuple field 1 type does not match" in found.errors[0]  # the key is unsigned
    assert found.errors[0].startswith("flowstone: ")
    assert "ER_FIELD_TYPE, 23" in found.errors[0]

    found = flowstone("call", address, "box.space.orders:insert", '[1, "Ada", {"total": 30}]')
    assert (found.code, found.errors, found.text) == (0, [], '- [1, "Ada", {total: 30}]\n')
    found = flowstone("call", "--json", address, "box.space.orders:get", "1")
    assert json.loads(found.text) == {
        "address": address,
        "function": "box.space.orders:get",
        "results": [[1, "Ada", {"total": 30}]],
    }
    (info,) = yaml.safe_load(flowstone("call", address, "box.info").text)
    assert info["status"] == "running"
    assert flowstone("call", address, "box.space.orders:get", "2").text == "[]\n"


def test_node_reports_an_unknown_function_with_code_and_name(
    node: ServedNode, flowstone: Command, as_first: None
) -> None:
    found = flowstone("call", f"127.0.0.1:{node.port}", "revenue")
    assert (found.code, found.text) == (1, "")
    assert found.errors == ["flowstone: Procedure 'revenue' is not defined (ER_NO_SUCH_PROC, 33)"]


def test_missing_user_is_named_as_the_reason_of_a_denied_call(node: ServedNode, flowstone: Command) -> None:
    found = flowstone("call", f"127.0.0.1:{node.port}", "box.info")
    assert (found.code, found.text) == (1, "")
    assert "ER_ACCESS_DENIED, 42" in found.errors[0]
    assert "set TT_CLI_USERNAME and TT_CLI_PASSWORD" in found.errors[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("-1.5e3", -1500.0),
        ("18446744073709551615", 2**64 - 1),
        ("null", None),
        ("true", True),
        ('"5"', "5"),
        ('{"a": [1]}', {"a": [1]}),
        ("Ada", "Ada"),
        ("", ""),
        ("box.info", "box.info"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("01", "01"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_argument_is_json_or_a_string(text: str, value: Any) -> None:
    assert json_or_text(text) == value
    assert type(json_or_text(text)) is type(value)


def test_arguments_reach_a_real_server_as_values(server: Server, flowstone: Command) -> None:
    given = ["5", "-5", "true", "Ada", '"6"', "[1, [2]]", '{"a": null}']
    found = flowstone("call", "--json", server.uri, "echo", *given)
    assert json.loads(found.text)["results"] == [5, -5, True, "Ada", "6", [1, [2]], {"a": None}]
    assert flowstone("call", server.uri, "kinds", *given).text == (
        '- ["number", "number", "boolean", "string", "string", "table", "table"]\n'
    )
    assert flowstone("call", "--strings", server.uri, "echo", "5", "-5", '"6"', "null").text == (
        '- "5"\n- "-5"\n- "\\"6\\""\n- "null"\n'
    )


def test_values_without_a_json_type_have_the_form_of_cat(server: Server, flowstone: Command) -> None:
    assert json.loads(flowstone("call", "--json", server.uri, "values").text)["results"] == [
        {"50": ["x"]},
        "5313b8d5-82a0-4fb4-a280-9e8bf79e1cac",
        "1.50",
    ]
    assert flowstone("call", server.uri, "values").text == (
        '- 50: ["x"]\n- 5313b8d5-82a0-4fb4-a280-9e8bf79e1cac\n- 1.50\n'
    )
    assert flowstone("call", server.uri, "nothing").text == "[]\n"


def test_error_of_a_function_is_shown_with_its_code(server: Server, flowstone: Command) -> None:
    found = flowstone("call", server.uri, "fails")
    assert (found.code, found.text) == (1, "")
    assert found.errors == ["flowstone: out of�[31m paper (ER_3000, 3000)"]
    missing = flowstone("call", server.uri, "missing")
    assert missing.code == 1
    assert "(ER_NO_SUCH_PROC, 33)" in missing.errors[0]


def test_missing_right_comes_with_the_grant(server: Server, flowstone: Command) -> None:
    assert flowstone("call", f"clerk:secret@{server.uri}", "nothing").text == "[]\n"
    found = flowstone("call", f"clerk:secret@{server.uri}", "echo")
    assert found.code == 1
    assert "box.schema.user.grant('clerk', 'execute', 'function', 'echo')" in found.errors[0]
    wrong = flowstone("call", f"clerk:hidden@{server.uri}", "nothing")
    assert wrong.code == 1
    assert "ER_CREDS_MISMATCH, 47" in wrong.errors[0]
    assert "hidden" not in wrong.errors[0]


def test_timeout_says_that_the_outcome_is_unknown(server: Server, flowstone: Command) -> None:
    found = flowstone("call", "--timeout", "0.3", server.uri, "sleeps")
    assert (found.code, found.text) == (1, "")
    assert found.errors == [f"flowstone: {server.uri} did not answer within 0.3 s; {OUTCOME_UNKNOWN}"]


def test_unreachable_server_is_named(flowstone: Command) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    found = flowstone("call", nobody, "box.info")
    assert (found.code, found.errors) == (1, [f"flowstone: cannot connect to {nobody}: connection refused"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--jsno"], "unknown option --jsno; to pass it as a string, write '\"--jsno\"', without --strings"),
        ([str(2**64)], "arguments cannot be sent: "),
        (["--username", "a", "--username", "b"], "option --username/-u is given 2 times"),
    ],
)
def test_wrong_command_line_is_a_usage_error(flowstone: Command, arguments: list[str], complaint: str) -> None:
    found = flowstone("call", f"127.0.0.1:{free_port()}", "echo", *arguments)
    assert (found.code, found.text) == (2, "")
    assert complaint in found.errors[0]


async def test_invalid_response_is_an_error(flowstone: Command) -> None:
    async with peer(answering(lambda request: (0, b"\x81\x30\xc1"), (2, 6, 0))) as address:
        found = await asyncio.to_thread(flowstone, "call", address, "echo")
    assert (found.code, found.text) == (1, "")
    assert found.errors[0].startswith(f"flowstone: {address} sent an invalid response: ")


@fits(">=2.11")
def test_newer_server_is_called(binary: Binary, tmp_path: Path, flowstone: Command) -> None:
    setup = "function now() return require('datetime').new{year = 2026} end"
    with real_tarantool.serve(tmp_path, setup=setup, binary=binary.path) as server:
        found = flowstone("call", "--json", server.uri, "now")
        assert json.loads(found.text)["results"] == ["2026-01-01T00:00:00Z"]
