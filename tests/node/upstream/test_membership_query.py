"""The query whether an instance is still a member, to peers that answer, reject it or are lost."""

from __future__ import annotations

from uuid import UUID

import pytest

from flowstone.errors import RemoteProtocolError
from flowstone.iproto import errors
from flowstone.iproto.constants import Key
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.node.upstream.membership_query import is_registered
from flowstone.outside import production
from flowstone.replication.applier.states import ConnectionLost
from tests.node.fake_server import Reply, answering, peer, refusal
from tests.simulation.simulation import Simulation, simulated

PEER = UUID(int=1)
"""The UUID in the greeting of a fake server."""

STRANGER = UUID(int=9)


@pytest.mark.parametrize("dialect", ["2.6", "2.11"])
@simulated()
async def test_members_are_distinguished_from_other_instances(sim: Simulation, dialect: str) -> None:
    await sim.start("a", dialect=dialect)
    await sim.start("b", dialect=dialect, replication=[sim.uri("a")])
    uri, here, member = parse_uri(sim.uri("a")), UUID(sim.machine("a").uuid), UUID(sim.machine("b").uuid)
    assert await is_registered(sim.outside, uri, here, member)
    assert not await is_registered(sim.outside, uri, here, STRANGER)
    with pytest.raises(ConnectionLost, match="another instance answers"):
        await is_registered(sim.outside, uri, member, member)
    sim.kill("a")
    with pytest.raises(ConnectionLost, match="cannot connect to a:3301"):
        await is_registered(sim.outside, uri, here, member)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (refusal(42, "Read access to space '_cluster' is denied for user 'guest'"), errors.AccessDenied),
        (refusal(116, "Instance bootstrap hasn't finished yet"), errors.Loading),
        ((0, b"\x80"), RemoteProtocolError),
        ((0, pack({Key.DATA.value: 7})), RemoteProtocolError),
    ],
    ids=["denied", "loading", "no tuples", "a number"],
)
async def test_peer_without_an_answer_is_an_error(reply: Reply, error: type[Exception]) -> None:
    async with peer(answering(lambda request: reply, (2, 6, 0))) as address:
        with pytest.raises(error):
            await is_registered(production(), parse_uri(address), PEER, STRANGER)
