"""net.box, the client of the real server, run in the real binary: a node must look like the real server.

`net_box.lua` prints a line for each action. Its output must be the same for the library on a real server and on a node.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import served_node
from tests.conformance.library import READER, READER_PASSWORD, Library, open_library
from tests.conformance.servers import REAL_SETUP

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).with_name("net_box.lua")
SCRIPT_SECONDS = 60


def visit(library: Library, directory: Path) -> list[str]:
    """Return the output of the script for a library."""
    major, minor, patch = library.version
    environment = {
        "LIBRARY": f"{library.user}:{library.password}@127.0.0.1:{library.port}",
        "READER": f"{READER}:{READER_PASSWORD}",
        "VERSION_ID": str(major << 16 | minor << 8 | patch),
    }
    done = subprocess.run(
        ["tarantool", str(SCRIPT)],
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def expected(tarantool: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the output of the script for the real server."""
    directory = tmp_path_factory.mktemp("server")
    with tarantool.serve(directory, setup=REAL_SETUP) as server:
        return visit(open_library(server.port, is_node=False), directory)


@pytest.fixture(scope="module", params=["2.6", "2.11"])
def seen(
    request: pytest.FixtureRequest, expected: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return the output of the script for a node."""
    directory = tmp_path_factory.mktemp("node")
    with served_node.serve(directory, dialect=request.param) as node:
        yield visit(open_library(node.port, is_node=True), directory)


def test_script_output_is_as_expected(expected: list[str]) -> None:
    """Guard against a vacuous test: a script that only gets errors prints the same on every server."""
    lines = dict(line.split(": ", 1) for line in expected)
    assert lines["state"] == '["active","Binary",true,true,true,"nil"]'
    assert lines["iterator GE"] == '[[[3,"Walden",1854],[4,"Dubliners",1914],[2,"Ulysses",1922]]]'
    assert lines["left"] == '[[[1,"dot",10,"end"],[3,"eve",0]]]'
    assert lines["five hundred"] == "[125250,500]"
    assert '"AccessDeniedError",42,"Write access to space \'books\' is denied' in lines["writes"]
    assert len(expected) > 60


def test_net_box_output_is_equal_on_a_node_and_the_real_server(expected: list[str], seen: list[str]) -> None:
    assert seen == expected
