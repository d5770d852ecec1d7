"""The two servers on which cases run, each as a process: the real Tarantool and `flowstone serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import real_tarantool, served_node
from tests.conformance.target import Target

REAL_SETUP = f"""
box.schema.user.revoke('guest', 'super')
box.schema.user.create('{served_node.USER}', {{password='{served_node.PASSWORD}'}})
box.schema.user.grant('{served_node.USER}', 'super')
"""


@contextmanager
def real_target(directory: Path) -> Iterator[Target]:
    with (
        real_tarantool.serve(directory, setup=REAL_SETUP, cfg="log_level=1") as server,
        _opened("tarantool", server.port) as target,
    ):
        yield target


@contextmanager
def node_target(directory: Path, *, dialect: str) -> Iterator[Target]:
    with served_node.serve(directory, dialect=dialect) as server, _opened("node", server.port) as target:
        yield target


@contextmanager
def _opened(name: str, port: int) -> Iterator[Target]:
    target = Target(name, port)
    try:
        yield target
    finally:
        target.close()
