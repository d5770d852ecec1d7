"""The commands' event loop."""

from __future__ import annotations

import asyncio
import sys

import pytest

from flowstone.cli.event_loop import run


async def loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_commands_run_on_uvloop() -> None:
    assert run(loop_module()).startswith("uvloop")


def test_commands_run_on_asyncio_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(loop_module()).startswith("asyncio")
