"""Waiting until an instance is writable or read-only: `box.ctl.wait_rw` and `box.ctl.wait_ro`."""

from __future__ import annotations

from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.node.instance import Instance
from flowstone.node.synchro.promotion import timed_out

STEP_SECONDS: Final = 0.01
"""Polling interval. A change of leaders takes seconds, so a shorter one gains nothing."""


async def wait_read_only(instance: Instance, is_read_only: bool, timeout: float | None = None) -> None:
    """Wait until the instance is read-only, or is writable; raise ER_SYSTEM "timed out" after `timeout` seconds."""
    clock = instance.outside.clock
    deadline = None if timeout is None else clock.monotonic() + timeout
    while instance.is_read_only != is_read_only:
        if instance.elections.is_closed:
            raise FlowstoneError("the node was stopped")
        if deadline is not None and clock.monotonic() >= deadline:
            raise timed_out()
        await clock.sleep(STEP_SECONDS)
