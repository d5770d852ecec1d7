"""Waits for an instance to become writable or read-only."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.node.server.mode_waiters import wait_read_only
from tests.node.instances import make_instance


async def test_wait_returns_at_once_if_the_mode_is_already_reached() -> None:
    await wait_read_only(make_instance(), False, 0.0)
    await wait_read_only(make_instance(read_only=True), True, 0.0)


async def test_wait_returns_when_the_condition_holds() -> None:
    instance = make_instance(read_only=True)
    waiting = asyncio.ensure_future(wait_read_only(instance, False))
    await asyncio.sleep(0)
    assert not waiting.done()
    instance.configuration = replace(instance.configuration, read_only=False)
    instance.settle_read_only()
    await asyncio.wait_for(waiting, 60)


async def test_wait_ends_with_the_node() -> None:
    instance = make_instance(read_only=True)
    waiting = asyncio.ensure_future(wait_read_only(instance, False))
    await asyncio.sleep(0)
    await instance.elections.close()
    with pytest.raises(FlowstoneError, match="the node was stopped"):
        await asyncio.wait_for(waiting, 60)


async def test_wait_times_out() -> None:
    with pytest.raises(errors.System, match="timed out") as raised:
        await wait_read_only(make_instance(), True, 0.02)
    assert raised.value.stack is not None
    assert raised.value.stack.errors[0].type == "TimedOut"
