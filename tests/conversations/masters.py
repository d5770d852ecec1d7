"""A Flowstone node in the place of a recorded master: started on copies of that master's files."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import flowstone
from tests.conversations import recording

DIALECTS = {"2.6": "2.6", "2.11": "2.11", "3.8": "2.11"}
"""The dialect that stands in for a recorded version."""

ALL_LOGS = "*.xlog"
FIRST_LOG = "00000000000000000000.xlog"
FIRST_SNAPSHOT = "00000000000000000000.snap"


def copy_files(
    version: str, scenario: str, node: str, target: Path, *logs: str, snapshot: str = FIRST_SNAPSHOT
) -> Path:
    """The files of a recorded node: one snapshot, and the logs named."""
    source = recording.scenario(version, scenario) / "files" / node
    target.mkdir(parents=True)
    for pattern in (snapshot, *logs):
        found = list(source.glob(pattern))
        assert found, f"{source} has no {pattern}"
        for file in found:
            shutil.copy(file, target)
    return target


@asynccontextmanager
async def serving(directory: Path, **options: Any) -> AsyncIterator[flowstone.Node]:
    """A node that listens on a port of its own."""
    async with flowstone.Node(directory, listen="127.0.0.1:0", **options) as node:
        yield node


def port_of(node: flowstone.Node) -> int:
    assert node.address is not None
    return int(node.address.rpartition(":")[2])
