"""Sources of options: their precedence, and the errors for mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstone.cli.console import UsageError, UsageErrors
from flowstone.cli.node.settings import NodeSettings, read_settings


def read(
    arguments: dict[str, Any] | None = None, environment: dict[str, str] | None = None, **defaults: Any
) -> NodeSettings:
    return read_settings(arguments or {}, environment or {}, defaults)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text('wal_mode = "fsync"\ncheckpoint_count = 5\nread_only = true\nuser = "app:file"\n')
    return path


def test_command_line_overrides_environment_and_environment_overrides_file(file: Path) -> None:
    environment = {"FLOWSTONE_WAL_MODE": "write", "FLOWSTONE_CHECKPOINT_COUNT": "4"}
    settings = read({"config": str(file), "wal_mode": "none"}, environment, work_dir="data")
    expected = {"wal_mode": "none", "checkpoint_count": 4, "read_only": True, "work_dir": "data"}
    assert settings.options == expected


def test_command_line_switch_turns_off_an_option_of_the_file(file: Path) -> None:
    assert read({"config": str(file), "read_only": False}).options["read_only"] is False


def test_an_empty_variable_means_the_default() -> None:
    assert read({}, {"FLOWSTONE_CHECKPOINT_COUNT": ""}).options == {"checkpoint_count": 2}


def test_environment_may_name_the_file(file: Path) -> None:
    assert read({}, {"FLOWSTONE_CONFIG": str(file)}).options["wal_mode"] == "fsync"


def test_first_user_comes_from_any_source_and_may_have_a_colon_in_the_password(file: Path) -> None:
    assert read({"user": "a:b:c"}).user == ("a", "b:c")
    assert read({}, {"FLOWSTONE_USER": "a:env"}).user == ("a", "env")
    assert read({"config": str(file)}).user == ("app", "file")
    assert read().user is None


@pytest.mark.parametrize("text", ["secret", ":secret", "app:"])
def test_invalid_user_is_rejected_without_showing_the_password(text: str) -> None:
    with pytest.raises(UsageError, match=r"invalid user \(given as --user\); use NAME:PASSWORD") as refused:
        read({"user": text})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "environment", "place"),
    [
        ({"wal_mode": "often"}, {}, "--wal-mode"),
        ({}, {"FLOWSTONE_WAL_MODE": "often"}, "FLOWSTONE_WAL_MODE"),
    ],
)
def test_error_names_the_source_of_an_invalid_value(
    arguments: dict[str, Any], environment: dict[str, str], place: str
) -> None:
    with pytest.raises(UsageError) as refused:
        read(arguments, environment)
    told = f"Incorrect value for option 'wal_mode': often (given as {place}); one of none, write, fsync"
    assert str(refused.value) == told


def test_error_for_a_wrong_value_in_the_file_names_key_and_path(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("read_only = 1\n")
    with pytest.raises(UsageError, match=r"should be of type boolean \(given as read_only in .*node\.toml\)"):
        read({"config": str(path)})


def test_every_wrong_option_is_listed_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('listen = "nowhere"\nwal-mod = "fsync"\nread_only = 1\nuser = "app"\nbogus = 1\n')
    with pytest.raises(UsageErrors) as refused:
        read({"config": str(path), "checkpoint_count": "0"}, {"FLOWSTONE_WAL_MODE": "often"})
    told = [str(problem) for problem in refused.value.problems]
    places = ["wal-mod", "bogus", f"listen in {path}", "FLOWSTONE_WAL_MODE", "--checkpoint-count"]
    places += [f"read_only in {path}", f"user in {path}"]
    assert len(told) == len(places)
    assert all(place in line for place, line in zip(places, told, strict=True)), told


def test_unknown_key_of_the_file_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('wal-mod = "fsync"\n')
    with pytest.raises(UsageError, match=r"unknown option wal-mod; did you mean wal_mode\?"):
        read({"config": str(path)})


def test_invalid_toml_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("box.cfg{listen = 3301}")
    with pytest.raises(UsageError, match=r"node\.toml: .*; use TOML"):
        read({"config": str(path)})


def test_unknown_variables_are_reported_without_an_error() -> None:
    """A cluster may set variables of this name in every process, as Kubernetes does for a service."""
    settings = read({}, {"FLOWSTONE_SERVICE_HOST": "10.0.0.1", "FLOWSTONE_INTERPRETED": "0", "HOME": "/tmp"})
    assert (settings.options, settings.strangers) == ({}, ("FLOWSTONE_SERVICE_HOST",))


def test_conflicting_options_are_rejected() -> None:
    with pytest.raises(UsageError, match="'ssl_key_file': needed with ssl_cert_file"):
        read({"ssl_cert_file": "node.crt"})


def test_conflicting_options_are_listed_with_their_sources() -> None:
    with pytest.raises(UsageError, match=r"'election_mode': .* \(given as FLOWSTONE_ELECTION_MODE\)"):
        read({"dialect": "2.6"}, {"FLOWSTONE_ELECTION_MODE": "candidate"})
