"""Waiting until an instance is writable or read-only: `box.ctl.wait_rw` and `box.ctl.wait_ro`."""

from __future__ import annotations

import asyncio

from flowstone.errors import FlowstoneError
from flowstone.node.instance import Instance
from flowstone.node.synchro.promotion import timed_out


async def wait_read_only(instance: Instance, is_read_only: bool, timeout: float | None = None) -> None:
    """Wait until the instance is read-only, or is writable; raise ER_SYSTEM "timed out" after `timeout` seconds."""
    elections, timer = instance.elections, None
    if timeout is not None and instance.is_read_only != is_read_only:
        timer = asyncio.get_running_loop().create_task(instance.outside.clock.sleep(max(0.0, timeout)))
        timer.add_done_callback(lambda _: elections.wake())
    try:
        while instance.is_read_only != is_read_only:
            if elections.is_closed:
                raise FlowstoneError("the node was stopped")
            if timer is not None and timer.done():
                raise timed_out()
            await elections.changed()
    finally:
        if timer is not None:
            timer.cancel()
