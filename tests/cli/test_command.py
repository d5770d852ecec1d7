"""Repeated options: every command accepts them as a list, or rejects them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import typer

from flowstone.cli import app, run
from flowstone.cli.command import App, is_given_once
from flowstone.cli.node import serve


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return all commands below `group`, with the words that call them."""
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, *path, name)
        else:
            yield (*path, name), each


def options() -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Return all options except those that exit at once, each with its command and the words that call it."""
    serve.declare_options(every=True)
    for path, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.is_eager:
                yield path, command, parameter


def refusal(command: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a command for an invalid command line."""
    try:
        command.make_context("command", words)
    except typer.Exit:  # Limestone commands report the error themselves
        return capsys.readouterr().err
    except Exception as error:
        return str(getattr(error, "message", error))
    return ""


def test_repeated_option_is_a_list_or_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    tried = 0
    for path, command, option in options():
        if not is_given_once(option):
            assert option.multiple, f"{path} {option.opts}"
            continue
        spellings = [*option.opts, *option.secondary_opts]
        for second in spellings:
            words = [part for each in (spellings[0], second) for part in ([each] if option.is_flag else [each, "1"])]
            said = refusal(command, words, capsys)
            assert f"option {'/'.join(spellings)} is given 2 times; give it once" in said, (
                f"{path} {words} said {said!r}"
            )
            tried += 1
    assert tried > 200


def test_repeated_option_ends_the_command_with_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cat", "--from", "1", "--from", "2", "logs"]) == 2
    assert "flowstone cat: option --from is given 2 times; give it once" in capsys.readouterr().err
    assert run(["limestone", "inspect", "--json", "--json", "data"]) == 64
    assert "option --json is given 2 times; give it once" in capsys.readouterr().err


def test_replication_of_serve_accumulates() -> None:
    (found,) = [each for path, _, each in options() if path == ("serve",) and "--replication" in each.opts]
    assert found.multiple
    given: dict[str, Any] = {}
    parameters = {parameter.name: None for path, _, parameter in options() if path == ("serve",)}

    def check(chosen: dict[str, Any], *_: Any) -> int:
        given.update(chosen)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowstone.cli.node.serve_check.check", check)
        assert serve.serve(**{**parameters, "check": True, "replication": ["a:3301", "b:3301,c:3301"]}) == 0
    assert given == {"replication": "a:3301,b:3301,c:3301"}


def test_serve_rejects_contradictory_switches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--check", "--read-only", "--no-read-only"]) == 2
    assert "both --read-only and --no-read-only are given; use only one of them" in capsys.readouterr().err


def test_lists_and_options_of_another_command_do_not_count_as_repeated() -> None:
    made = App()
    heard: list[Any] = []

    @made.command("one")
    def one(
        name: Annotated[list[str], typer.Option("--name")], force: Annotated[bool, typer.Option("--force")] = False
    ) -> None:
        heard.append((name, force))

    made.command("two")(lambda: None)
    made(["one", "--name", "a", "--name", "b", "--force"], standalone_mode=False)
    assert heard == [(["a", "b"], True)]
