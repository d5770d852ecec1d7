"""Clients of a set under chaos accept rejections and report unexpected answers."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from flowstone.client.connection import ConnectionFailed
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from tests.chaos.clients import Client, Clients, Doors
from tests.chaos.lines import Line, dial_own
from tests.chaos.seats import Seats
from tests.interop.member import Member, NodeMember, RealMember


async def told(error: FlowstoneError, kind: str, who: type[Member] = NodeMember) -> list[str]:
    """Return the reason why it is unexpected as an answer to this operation."""
    member = Mock(spec=who)
    member.name = "a"
    doors = Doors(cast("Seats", SimpleNamespace(members=[member], master=None, is_calm=False)))
    clients = Clients(doors, Random(0), has_elections=True)
    client = Client(clients, "1", Random(0), dial_own)
    client._lines[member] = cast("Line", SimpleNamespace(close=_nothing))

    async def work(line: Line) -> None:
        raise error

    operation = await client.perform(member, ("sets", kind, 0, 1), work)
    assert operation is not None
    assert not operation.is_ok
    return clients.surprises


async def _nothing() -> None: ...


@pytest.mark.parametrize("kind", ["add", "read"])
@pytest.mark.parametrize(
    "error",
    [
        errors.Readonly("no"),
        errors.AccessDenied("not yet"),
        errors.SyncQuorumTimeout("too few"),
        errors.WalIo("full"),
        ConnectionFailed("gone"),
    ],
    ids=repr,
)
async def test_rejected_request_is_not_a_violation(error: FlowstoneError, kind: str) -> None:
    assert await told(error, kind) == []


@pytest.mark.parametrize(
    ("error", "kind"), [(errors.TupleFound("twice"), "add"), (errors.NoSuchSpace("which"), "read")], ids=repr
)
async def test_malformed_answer_is_a_violation(error: FlowstoneError, kind: str) -> None:
    (surprise,) = await told(error, kind)
    assert surprise.startswith("an answer that nobody has promised: #0 sets")


async def test_any_answer_of_a_real_server_is_accepted() -> None:
    assert await told(errors.NoSuchSpace("not loaded yet"), "read", RealMember) == []
