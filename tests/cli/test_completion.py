"""Completion in real shells: the test presses Tab, and inspects the resulting arguments of the command."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from flowstone.cli import app, run
from flowstone.cli.node import serve
from flowstone.node.configuration import OPTIONS
from tests.cli.conftest import Command

PROMPT = "ready> "
DEADLINE_SECONDS = 30.0
SHOWN = 'flowstone() { printf "<%s>" "$@"; echo; }\n'
"""Replaces the command: records its arguments."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        printed = directory / f"flowstone.{shell}"
        with printed.open("w") as out, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", out)
            assert run(["completion", shell]) == 0
    return directory


def needed(shell: str) -> str:
    """Return the path of a shell. If it is missing, fail with CI=true, and skip otherwise."""
    path = shutil.which(shell)
    if path is not None:
        return path
    message = f"{shell} is not installed (Debian package `{shell}`)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


class Terminal:
    """A shell on a pseudo-terminal, with typed input."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def read_until(self, text: str) -> str:
        """Return the output up to `text`, which must appear."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while text not in self._seen:
            ready, _, _ = select.select([self._descriptor], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} did not come, but {self._seen!r}"
            self._seen += os.read(self._descriptor, 65536).decode(errors="replace")
        shown, _, self._seen = self._seen.partition(text)
        return shown


@contextmanager
def terminal(command: list[str], home: Path) -> Iterator[Terminal]:
    ours, theirs = os.openpty()
    environment = {"HOME": str(home), "ZDOTDIR": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "LC_ALL": "C"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=home, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours)
        finally:
            process.kill()
            os.close(ours)


def given(typed: Terminal, line: str) -> list[str]:
    """Return the arguments of the command after `line`, which contains tabs, is entered."""
    typed.read_until(PROMPT)
    typed.type(f"{line}\n")
    typed.read_until("\n<")
    return typed.read_until(">\r\n").split("><")


LINES = [
    ("flowstone arch\t", ["archive"]),
    ("flowstone serve --election-f\tsoft", ["serve", "--election-fencing-mode", "soft"]),
    ("flowstone serve --replication-synchro-que\t1", ["serve", "--replication-synchro-queue-max-size", "1"]),
    ("flowstone cat --format par\t", ["cat", "--format", "parquet"]),
    ("flowstone cat --format=par\t", ["cat", "--format=parquet"]),
    ("flowstone cat --output=or\t", ["cat", "--output=orders of tea.xlog"]),
    ("flowstone cat --force or\t", ["cat", "--force", "orders of tea.xlog"]),
    ("flowstone limestone insp\t", ["limestone", "inspect"]),
    ("flowstone limestone cat --he\t", ["limestone", "cat", "--help"]),
    ("flowstone --ver\t", ["--version"]),
    ("flowstone serve --wal-mode fs\t", ["serve", "--wal-mode", "fsync"]),
    ("flowstone serve --election-mode cand\t", ["serve", "--election-mode", "candidate"]),
    ("flowstone serve --election-fencing-mode st\t", ["serve", "--election-fencing-mode", "strict"]),
    ("flowstone serve --log-format js\t", ["serve", "--log-format", "json"]),
    ("flowstone serve --log-level verb\t", ["serve", "--log-level", "verbose"]),
    ("flowstone serve --dialect 2.1\t", ["serve", "--dialect", "2.11"]),
    ("flowstone serve --bootstrap-strategy sup\t", ["serve", "--bootstrap-strategy", "supervised"]),
    ("flowstone completion fi\t", ["completion", "fish"]),
]


def zshrc(*lines: str) -> str:
    return "\n".join(("autoload -U compinit", *lines, f"PS1='{PROMPT}'", SHOWN))


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_commands_options_values_and_files(scripts: Path, tmp_path: Path, shell: str) -> None:
    (tmp_path / "orders of tea.xlog").touch()
    load = f"source {scripts}/flowstone.{shell}"
    (tmp_path / "bashrc").write_text(f"PS1='{PROMPT}'\n{SHOWN}{load}\n")
    (tmp_path / ".zshrc").write_text(zshrc("compinit -u -D", load))
    options = ["--noprofile", "--rcfile", str(tmp_path / "bashrc"), "-i"] if shell == "bash" else ["-d", "-i"]
    with terminal([needed(shell), *options], tmp_path) as typed:
        for line, arguments in LINES:
            assert given(typed, line) == arguments, line


def test_zsh_completion_can_be_autoloaded(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "_flowstone").write_bytes((scripts / "flowstone.zsh").read_bytes())
    (tmp_path / ".zshrc").write_text(zshrc(f"fpath=({tmp_path} $fpath)", "compinit -u -D"))
    with terminal([needed("zsh"), "-d", "-i"], tmp_path) as typed:
        for _ in range(2):  # the first Tab loads the completion
            assert given(typed, "flowstone limestone insp\t") == ["limestone", "inspect"]


def test_fish_offers_the_same_completions(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "orders of tea.xlog").touch()
    for line, arguments in LINES:
        begun, _, behind = line.partition("\t")
        asked = f"source {scripts}/flowstone.fish; complete --do-complete '{begun}'"
        command = [needed("fish"), "--no-config", "-c", asked]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        offered = [each.partition("\t")[0] for each in done.stdout.splitlines()]
        assert offered == [arguments[-2 if behind else -1]], line


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Return each command by its words, and the options in its help."""
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    yield path, {"--help", *(name for each in options for name in (*each.opts, *each.secondary_opts))}
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, *path, name)


def test_bash_offers_every_option_of_every_command_quickly(scripts: Path) -> None:
    serve.declare_options(every=True)
    places = list(commands(typer.main.get_command(app)))
    lines = [f"source {scripts}/flowstone.bash"]
    for path, _ in places:
        words = ("flowstone", *path, "-")
        lines.append(f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}; _flowstone; echo ${{COMPREPLY[@]}}")
    begun = time.monotonic()
    done = subprocess.run([needed("bash"), "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - begun
    offered = [set(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip((path for path, _ in places), offered, strict=True)) == dict(places)
    assert {option.dashed for option in OPTIONS.values()} <= dict(places)["serve",]
    assert seconds / len(places) < 0.2, "a user waits for it"


def test_completed_option_values_are_accepted() -> None:
    serve.declare_options(every=True)
    root: Any = typer.main.get_command(app)
    command = root.commands["serve"]
    offered = {
        each.name: [item.value for item in each.shell_complete(typer.Context(command), "") if item.type == "plain"]
        for each in command.params
        if not each.is_flag and each.name in OPTIONS
    }
    assert offered["wal_mode"] == ["none", "write", "fsync"]
    for name, values in offered.items():
        assert [OPTIONS[name].accept(value) for value in values] == values


def test_unknown_shell_is_rejected(flowstone: Command) -> None:
    refused = flowstone("completion", "csh")
    assert refused.code == 2
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in refused.errors[0]
