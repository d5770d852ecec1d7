"""The tracer of `scripts/walks.py` counts what its docstring says, and finds a REPLACE in a running node."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from scripts import walks
from scripts.walks import Counts, Step, Tracer, Walk

SCRIPT = Path(walks.__file__)

TRACED = """
import asyncio

class Thing:
    @property
    def size(self):
        return 1

    def add(self):
        return sum([each for each in range(self.size)]) + (lambda: 1)()

def numbers():
    yield 1
    yield 2

async def awaiting(future):
    return await waiting(future)

async def waiting(future):
    await future
    return done()

def done():
    return 1
"""


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Create a module that the tracer counts as part of Flowstone."""
    path = tmp_path / "room" / "module.py"
    path.parent.mkdir()
    path.write_text(TRACED)
    monkeypatch.setattr(walks, "ROOT", f"{tmp_path}/")
    spec = importlib.util.spec_from_file_location("room_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def labels(operation: Callable[[], object], is_over: Callable[[], bool] = lambda: False) -> list[str]:
    tracer = Tracer()
    tracer.record(is_over)
    tracer.install()
    try:
        operation()
    finally:
        tracer.uninstall()
    return [step.label for step in tracer.stop()]


def test_properties_lambdas_and_comprehensions_are_not_calls(traced: ModuleType) -> None:
    assert labels(traced.Thing().add) == ["room/module.py:Thing.add"]


def test_generator_is_counted_once(traced: ModuleType) -> None:
    assert labels(lambda: list(traced.numbers())) == ["room/module.py:numbers"]


def test_suspended_coroutine_is_counted_when_it_continues_and_its_awaiter_is_not(traced: ModuleType) -> None:
    async def operation() -> list[str]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(traced.awaiting(future))
        await asyncio.sleep(0)
        tracer.record()
        future.set_result(None)
        await task
        return [step.label for step in tracer.stop()]

    tracer = Tracer()
    tracer.install()
    try:
        found = asyncio.run(operation())
    finally:
        tracer.uninstall()
    assert found == ["room/module.py:waiting", "room/module.py:done"]


def test_calls_after_the_end_of_the_operation_are_ignored(traced: ModuleType) -> None:
    ended: list[bool] = []

    def operation() -> None:
        traced.done()
        ended.append(True)
        traced.Thing().add()

    assert labels(operation, lambda: bool(ended)) == ["room/module.py:done"]


def test_switches_are_between_packages_and_alternations_between_modules() -> None:
    counts = Counts.of(["a/x.py:f", "a/x.py:g", "a/y.py:f", "a/x.py:f", "a/y.py:f", "a/x.py:f", "b/z.py:f"])
    assert (counts.calls, counts.switches) == (7, 1)
    assert counts.alternations == {("a/x.py", "a/y.py"): 3}


def test_main_line_has_the_functions_that_lead_into_another_package_once() -> None:
    path = (
        Step("node/server.py:received"),
        Step("node/server.py:check", 0),
        Step("node/turn.py:run", 0),
        Step("box/index.py:set", 2),
        Step("node/turn.py:run", 0),
        Step("xlog/writer.py:write", 4),
        Step("outside/disk.py:append", 5),
    )
    walk = Walk("example", path)
    assert walk.main_line == ["node/server.py:received", "node/turn.py:run", "xlog/writer.py:write"]
    assert walk.uses == {"node/turn.py:run": ["box/index.py"], "xlog/writer.py:write": ["outside/disk.py"]}


def test_replace_is_traced_from_the_socket_through_box_and_log_to_the_reply() -> None:
    printed = subprocess.run(
        [sys.executable, SCRIPT, "--only", "1", "--json"], check=True, capture_output=True, text=True
    ).stdout
    walk = json.loads(printed)["1"]
    path = walk["all"]["path"]
    packages = [label.partition("/")[0] for label in path]
    assert set(packages) >= {"outside", "node", "box", "iproto", "xlog"}
    assert packages[0] == packages[-1] == "outside"
    assert packages.index("box") < packages.index("xlog") < len(packages) - 1, "executed, logged, answered"
    assert walk["all"]["calls"] == len(path)
    assert 0 < walk["main_line"]["calls"] < walk["all"]["calls"]
    assert 0 < walk["main_line"]["switches"] <= walk["all"]["switches"]
    assert "node" in {label.partition("/")[0] for label in walk["main_line"]["path"]}


def test_typical_walk_is_the_shortest_repeated_walk_with_the_usual_main_line() -> None:
    def path(*helpers: str) -> tuple[Step, ...]:
        return (Step("node/turn.py:run"), Step("box/index.py:set", 0), *(Step(f"node/turn.py:{h}", 0) for h in helpers))

    usual, slow, once = path("a"), path("a", "observe"), path()
    other = (*path(), Step("box/index.py:find", 0), Step("iproto/row.py:encode", 2))
    walk = walks.typical("example", [usual, usual, slow, slow, slow, once, other, other])
    assert walk.path == usual
    assert walk.share == 6 / 8
