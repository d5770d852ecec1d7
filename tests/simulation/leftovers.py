"""Resources that a stopped process must have released: tasks, timers, connections, locks, files, views."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowstone.box.box import Box
from tests.simulation.loop import Handle, Life, VirtualLoop
from tests.simulation.network import Internet

if TYPE_CHECKING:
    from tests.simulation.disk import Storage


def left_behind(loop: VirtualLoop, internet: Internet, storage: Storage, life: Life, box: Box | None) -> list[str]:
    """Return the leftovers as text, one per resource; called when the process reports its end, before it is removed."""
    found = [f"the task {task.get_coro()}" for task in life.tasks]
    found += [f"the timer {timer}" for timer in loop.timers_of(life) if not _is_given_up(timer)]
    ends = [end for end in internet._ends if end.life is life and end.is_handed_over]
    found += [f"{end}" for end in ends if not end.is_gone and not end.is_closing]
    found += [f"the address {host}:{port}" for (host, port), each in internet.listeners.items() if each.life is life]
    found += [f"a lock on {held}" for held, owner in storage.locked.items() if owner is life]
    found += [f"{file.path}, open" for file, owner in storage.opened.items() if owner is life]
    if box is not None:
        found += [f"the view {view}" for view in box.views]
    return found


def _is_given_up(timer: Handle) -> bool:
    """Return True for worker calls whose waiter was cancelled: by the contract of `Blocking` they run to their end."""
    return bool(timer.args) and isinstance(timer.args[0], asyncio.Future) and timer.args[0].cancelled()
