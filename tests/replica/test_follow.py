"""Both forms of `flowstone.follow` in a program."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import flowstone
from flowstone.errors import LocalProtocolError
from flowstone.iproto.uri import UriError
from tests.node.upstream_server import Upstream

SECONDS = 20.0


async def test_follow_runs_for_the_duration_of_the_async_with_block(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream", dialect="2.11")
    await upstream.start()
    try:
        told: list[flowstone.SettledChange] = []
        following = flowstone.follow(upstream.uri, spaces=["fruit"], on_change=told.extend)
        async with following as replica:
            await upstream.fruit.insert((42, "fig"))
            await replica.wait_for(upstream.vclock, timeout=SECONDS)
            assert replica.space("fruit").get(42) == (42, "fig")
            assert [change.new for change in told] == [(42, "fig")]
        assert replica.info()["upstream"]["status"] == "off"
        assert replica.space("fruit").get(42) == (42, "fig")
        with pytest.raises(LocalProtocolError, match="already used"):
            async with following:
                pass
    finally:
        await upstream.stop()


def test_failed_follow_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(flowstone.CannotFollow, match=r"cannot follow 127\.0\.0\.1:1:"), flowstone.follow("127.0.0.1:1"):
        pass
    assert threading.active_count() == before


def test_invalid_address_is_rejected_at_once() -> None:
    with pytest.raises(UriError):
        flowstone.follow("no address")
    with pytest.raises(UriError, match="not NoneType"):
        flowstone.follow(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("spaces", ["orders", 512])
def test_spaces_given_as_a_string_are_rejected(spaces: Any) -> None:
    with pytest.raises(LocalProtocolError, match=rf"write spaces=\[{spaces!r}\]"):
        flowstone.follow("127.0.0.1:1", spaces=spaces)
