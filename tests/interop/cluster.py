"""The members and proxies of one test: created in its directory, stopped with it, their logs shown after a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.interop.member import SECONDS, Member, NodeMember, RealMember
from tests.interop.proxy import Proxy
from tests.interop.versions import Binary

M = TypeVar("M", bound=Member)

LOG_SHOWN = 6000
IS_OURS_REAL = os.environ.get("FLOWSTONE_INTEROP_OURS") == "tarantool"
"""True if real servers replace ours, to check the tests."""

Test = TypeVar("Test", bound=Callable[..., Any])


def not_for_stand_ins(test: Test) -> Test:
    """Mark a test that only nodes, not real servers, can pass."""
    return pytest.mark.unfit(test) if IS_OURS_REAL else test


QUICK = {"replication_timeout": 0.5, "replication_connect_timeout": 10}
"""A lost peer is noticed within two seconds and retried after half a second."""

LATE = {"replication_connect_timeout": SECONDS}
"""For members that start together: on a busy machine one may start long after the others, which would give up."""


class Cluster:
    """Creates members; their options are the defaults here and those of the test."""

    def __init__(self, directory: Path, binary: Binary) -> None:
        self.directory = directory
        self.binary = binary
        self.members: list[Member] = []
        self.proxies: list[Proxy] = []

    def real(self, name: str, *, start: bool = True, **options: Any) -> RealMember:
        """Return a real server of the version under test."""
        member = RealMember(name, self.directory / name, self.binary.path, **(self._defaults() | options))
        return self._add(member, start)

    def ours(self, name: str, *, start: bool = True, dialect: str | None = None, **options: Any) -> Member:
        """Return a Flowstone node; if it joins no upstream, in the dialect of the version under test."""
        if IS_OURS_REAL:
            return self.real(name, start=start, **options)
        if dialect is None and not options.get("replication"):
            dialect = self.binary.dialect
        return self._add(
            NodeMember(name, self.directory / name, dialect=dialect, **(self._defaults() | options)), start
        )

    def _defaults(self) -> dict[str, Any]:
        """Return options that let a new server join without connecting to all members first."""
        return QUICK | ({} if self.binary.dialect == "2.6" else {"bootstrap_strategy": "legacy"})

    def proxy(self, target: Member) -> Proxy:
        """Return a proxy in front of `target`."""
        proxy = Proxy(target.port)
        self.proxies.append(proxy)
        return proxy

    def _add(self, member: M, start: bool) -> M:
        self.members.append(member)
        if start:
            member.start()
        return member

    def logs(self) -> str:
        """Return the end of every member's log."""
        return "\n".join(f"--- log of {member!r}\n{member.log()[-LOG_SHOWN:]}" for member in self.members)

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        for member in self.members:
            with suppress(ProcessLookupError, AssertionError):
                member.resume()
            member.kill()
