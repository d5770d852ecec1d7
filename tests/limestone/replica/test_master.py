"""A replica's view of a master, and the condition under which another master may connect."""

from __future__ import annotations

from flowstone.limestone.replica.connection import ReplicaConnection
from flowstone.limestone.replica.master import Master
from tests.limestone.replica.test_connection import FakeClient


async def test_master_is_over_after_losing_its_control_channel_or_all_connections() -> None:
    control, log = ReplicaConnection(FakeClient()), ReplicaConnection(FakeClient())
    master = Master("10.0.0.1:5")
    assert master.is_over
    master.channels[0] = log
    assert not master.is_over  # the original opens its control channel last
    master.control, master.had_control = control, True
    assert not master.is_over
    master.channels.clear()
    assert not master.is_over
    master.channels[0] = log
    master.control = None
    assert master.is_over
