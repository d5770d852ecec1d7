"""Runs one page: its blocks in order, in one directory, with one shell and one Python.

| block | meaning |
|---|---|
| `sh` | runs in the page's bash, with its variables and background jobs; a failing command fails the page |
| `console` | each line after `$ ` runs there; its output must equal the text below it (`comparison.py`) |
| `python` | runs in the page's interpreter; names are kept |
| `lua` | runs in the real Tarantool 2.6, as a script |
| `sql` | runs in Spark, and its rows are shown |
| `text` | is the output of the previous block |
| `json` | is contained in the output of the previous block |
| `toml` | is a file that `flowstone serve --check` accepts |
| `yaml` | is a file that can be parsed |

Ports and paths are replaced (`substitution.py`). All processes still running at the end are terminated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.docs import comparison
from tests.docs.blocks import Block, Page
from tests.docs.flowstone_command import LISTEN, SPARK, STARTER, ask
from tests.docs.substitution import Substitution
from tests.places import ROOT, SOURCES
from tests.short_java import VARIABLE as SUBMIT_OPTIONS
from tests.warm_process import WarmProcess, starter_address

BLOCK_SECONDS: Final = 180
END_SECONDS: Final = 15
SETUPS: Final = Path(__file__).parent / "setups.sh"
"""Functions for hidden blocks."""
KEPT: Final = ("JAVA_HOME", "TMPDIR", SUBMIT_OPTIONS)
"""Environment variables for commands of a page: local paths, and the start options of JVMs in tests."""


class BlockFailed(Exception):
    """A block whose result differs from its page."""


class PageRun:
    """A running page: the output of its last block, and its running processes."""

    def __init__(self, page: Page, directory: Path, interpreter: Path) -> None:
        self._page = page
        self._directory = directory
        self._hidden = directory / ".run"
        self._hidden.mkdir()
        self._interpreter = interpreter
        self._substitution = Substitution(directory)
        self._environment = environment(directory) | {LISTEN: self._substitution.real("127.0.0.1:3301")}
        self._environment[STARTER] = starter_address()
        if "spark" in page.needs:
            self._environment[SPARK] = str(interpreter)
        self._printed: str | None = None
        self._steps = 0
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail"],
            cwd=directory,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._sh(f"source {SETUPS}\n")

    def run(self) -> None:
        for block in self._page.blocks:
            if block.reason_not_to_run is None:
                try:
                    self._run(block)
                except BlockFailed as failed:
                    raise BlockFailed(f"{self._page.path}:{block.line}: {failed}") from None

    def end(self) -> None:
        """Terminate the shell and all processes started by it."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._shell.pid, number)
            deadline = time.monotonic() + END_SECONDS
            while _group_lives(self._shell) and time.monotonic() < deadline:
                time.sleep(0.01)
        self._shell.wait()

    # --- by language -------------------------------------------------------------------------------

    def _run(self, block: Block) -> None:
        if block.file is not None:
            path = self._directory / self._substitution.real(block.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._substitution.real(block.text))
            if block.language == "yaml":
                self._sh(f"python -c 'import sys, yaml; yaml.safe_load(open(sys.argv[1]))' {path}\n")
        elif block.language == "console":
            self._console(block)
        elif block.language in {"text", "json"}:
            self._shown(block)
        elif block.language == "toml":
            self._toml(block)
        elif block.language == "yaml" or block.language == "ini":
            raise BlockFailed(f"a block of {block.language} needs a <!-- file: NAME --> to be written to, or a reason")
        else:
            self._printed = self._execute(block)

    def _execute(self, block: Block) -> str:
        text = self._substitution.real(block.text)
        if block.language == "sh":
            return self._sh(text, keeps_running=block.keeps_running)
        if block.language == "lua":
            if block.server is not None:
                uri = self._substitution.real(f"admin:secret@{block.server}")
                text = f"require('net.box').connect('{uri}'):eval([==[{text}]==])"
            return self._sh(f"tarantool - <<'END_OF_LUA'\n{text}\nos.exit(0)\nEND_OF_LUA\n")
        if block.language == "sql":
            statements = [part.strip() for part in text.split(";") if part.strip()]
            text = "\n".join(f"spark.sql({statement!r}).show(truncate=False)" for statement in statements)
        return self._python(text)

    def _console(self, block: Block) -> None:
        commands: list[tuple[str, str]] = []
        for line in block.text.splitlines(keepends=True):
            if line.startswith("$ "):
                commands.append((line[2:], ""))
            elif not commands:
                raise BlockFailed("a console begins with a command, behind `$ `")
            elif line.startswith("> "):
                commands[-1] = (commands[-1][0] + line[2:], "")
            else:
                commands[-1] = (commands[-1][0], commands[-1][1] + line)
        for command, shown in commands:
            last = block.keeps_running and command == commands[-1][0]
            code = self._substitution.real(command)
            self._printed = self._sh(code, shown=shown, keeps_running=last, may_fail=True, merged=True)
            if reason := comparison.differs(shown, self._printed):
                raise BlockFailed(f"`{command.strip()}`: {reason}")
            # A page may show an error on purpose.
            if not comparison.says_something(shown) and self._last_step.with_suffix(".failed").exists():
                raise BlockFailed(f"`{command.strip()}` failed:\n{self._printed}")

    def _shown(self, block: Block) -> None:
        if self._printed is None:
            raise BlockFailed("nothing was run before it that could have printed this")
        compare = comparison.lacks if block.language == "json" else comparison.differs
        if reason := compare(block.text, self._printed):
            raise BlockFailed(reason)

    def _toml(self, block: Block) -> None:
        path = self._hidden / "node.toml"
        path.write_text(self._substitution.real(block.text))
        self._sh(f"flowstone serve --check --config {path}\n")

    # --- shell and interpreter -----------------------------------------------------------------

    def _sh(
        self, code: str, *, shown: str = "", keeps_running: bool = False, may_fail: bool = False, merged: bool = False
    ) -> str:
        step = self._next_step()
        step.with_suffix(".sh").write_text(code)
        run = f"source {step}.sh >{step}.out 2>{'&1' if merged else f'{step}.err'}"
        if keeps_running:
            run = f"{{ {run} || :; touch {step}.ended; }} & :"
        elif may_fail:
            run = f"{run} || echo $? >{step}.failed"
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{run}\ntouch {step}.done\n".encode())
        self._shell.stdin.flush()
        self._await(step, shown if keeps_running else None)
        return self._output(step)

    def _python(self, code: str) -> str:
        step = self._next_step()
        request: dict[str, object] = {"code": code, "page": self._page.path, "directory": str(self._directory)}
        request["environment"] = self._environment
        with step.with_suffix(".out").open("wb") as out, step.with_suffix(".err").open("wb") as err:
            if ask(str(self._interpreter), request, out.fileno(), err.fileno()):
                raise BlockFailed(f"it failed:\n{self._everything(step)}")
        return self._output(step)

    def _await(self, step: Path, shown: str | None) -> None:
        """Wait until the shell has finished or, for a background process, until it has printed `shown`."""
        deadline = time.monotonic() + BLOCK_SECONDS
        while not step.with_suffix(".done").exists() or (shown and comparison.differs(shown, self._output(step))):
            if self._shell.poll() is not None or step.with_suffix(".ended").exists():
                raise BlockFailed(f"a command failed:\n{self._everything(step)}")
            if time.monotonic() > deadline:
                raise BlockFailed(f"not done within {BLOCK_SECONDS} s:\n{self._everything(step)}")
            time.sleep(0.01)

    def _next_step(self) -> Path:
        self._steps += 1
        return self._last_step

    @property
    def _last_step(self) -> Path:
        return self._hidden / str(self._steps)

    def _output(self, step: Path) -> str:
        path = step.with_suffix(".out")
        return self._substitution.shown(path.read_text(errors="replace")) if path.exists() else ""

    def _everything(self, step: Path) -> str:
        errors = step.with_suffix(".err")
        return self._output(step) + (errors.read_text(errors="replace") if errors.exists() else "")


def run_page(page: Page, directory: Path, interpreter: Path) -> None:
    running = PageRun(page, directory, interpreter)
    try:
        running.run()
    finally:
        running.end()


@contextmanager
def interpreter(directory: Path, *, spark: bool = False) -> Iterator[Path]:
    """Yield the socket of an interpreter, in a process that ends with the block."""
    path, log = directory / "interpreter", directory / "interpreter.log"
    command = ["tests.docs.interpreter", str(path), *(["--spark"] if spark else [])]
    with log.open("wb") as output:
        process = WarmProcess(command, cwd=ROOT, stdout=output)
    try:
        deadline = time.monotonic() + BLOCK_SECONDS
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the interpreter did not start:\n{log.read_text()}")
            time.sleep(0.01)
        yield path
    finally:
        process.terminate()
        process.wait()


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a page's commands: a plain terminal, this `flowstone`, the page's directory as
    their home.
    """
    commands = directory / ".run" / "bin"
    commands.mkdir(parents=True)
    command = commands / "flowstone"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.docs.flowstone_command "$@"\n')
    command.chmod(0o755)
    path = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    own = {"PATH": os.pathsep.join(path), "HOME": str(directory), "DOCS_CLONE": str(ROOT)}
    own |= {"TERM": "dumb", "COLUMNS": "120", "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1", "PYTHONPATH": SOURCES}
    return kept | own


def _group_lives(leader: subprocess.Popen[bytes]) -> bool:
    """Return True if a process of the group is running; ended ones may stay in the table for long."""
    leader.poll()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            if int(group) == leader.pid and state != "Z":
                return True
    return False
