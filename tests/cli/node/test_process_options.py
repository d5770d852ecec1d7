"""HTTP options of a process: names, conflicts, and secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.cli.console import UsageError
from flowstone.cli.node.process_options import PROCESS_OPTIONS, ProcessOptions
from flowstone.cli.node.settings import read_settings
from flowstone.iproto.errors import TarantoolError
from flowstone.node.configuration import OPTIONS
from tests.places import ROOT

TOKEN = "a token of sixteen and more"


def test_dashboard_is_off_without_options() -> None:
    made = ProcessOptions.of({})
    assert (made.http_listen, made.http_token, made.http_hosts, made.dashboard) == (None, None, (), False)


def test_process_options_come_from_the_command_line_the_environment_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('dashboard = true\nhttp_listen = 8081\nhttp_hosts = "board.example, other"\n')
    settings = read_settings({"config": str(file)}, {"FLOWSTONE_HTTP_TOKEN": TOKEN}, {})
    assert settings.process == ProcessOptions("8081", TOKEN, ("board.example", "other"), dashboard=True)
    assert not settings.options.keys() & PROCESS_OPTIONS.keys(), "a node does not know these options"
    assert not settings.strangers
    assert TOKEN not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("http_listen", "nowhere", "expected HOST:PORT"),
        ("http_listen", "unix/:/tmp/x", "expected HOST:PORT"),
        ("http_token", "short", "expected at least 16 printable ASCII characters"),
    ],
)
def test_invalid_value_is_a_usage_error(name: str, value: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as refused:
        read_settings({name: value}, {}, {})
    assert name != "http_token" or value not in str(refused.value).replace("shorter", "")


@pytest.mark.parametrize("alone", [{"http_token": TOKEN}, {"http_hosts": "a"}, {"dashboard": True}])
def test_each_http_option_requires_an_address(alone: dict[str, object]) -> None:
    with pytest.raises(TarantoolError, match=f"http_listen.*needed with {next(iter(alone))}"):
        ProcessOptions.of(alone)


def test_changed_options_are_listed() -> None:
    one, other = ProcessOptions.of({"http_listen": "1"}), ProcessOptions.of({"http_listen": "2", "dashboard": True})
    assert one.differences(other) == ["http_listen", "dashboard"]
    assert one.differences(one) == []


def documented() -> str:
    """Return the table of `docs/reference/configuration.md`."""
    lines = ["| option | type | default | |", "|---|---|---|---|"]
    for option in PROCESS_OPTIONS.values():
        default = f"`{str(option.default).lower()}`" if option.default is not None else ""
        lines.append(f"| `{option.name}` | {', '.join(option.types)} | {default} | {option.help} |")
    return "\n".join(lines)


def test_documentation_lists_every_option_with_its_default() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert documented() in text


def test_process_options_and_node_options_are_disjoint() -> None:
    assert not PROCESS_OPTIONS.keys() & OPTIONS.keys()
