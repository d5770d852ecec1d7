"""The dashboard inside a node: its own report without a query, and those of its peers."""

from __future__ import annotations

from pathlib import Path

import flowstone
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from flowstone.web.node_view import NodeView
from tests.node.upstream_server import Upstream
from tests.real_tarantool import free_port


async def test_node_is_shown_without_a_query_and_its_peers_by_their_uris(tmp_path: Path) -> None:
    first = Upstream(tmp_path / "first", dialect="2.11")
    await first.start()
    second = flowstone.Node(tmp_path / "second", listen="127.0.0.1:0", replication=[first.uri])
    await second.start()
    silent = parse_uri(f"127.0.0.1:{free_port()}")
    view = NodeView(production(), second, [parse_uri(first.uri), silent])
    try:
        (one,) = await view.look()
        named = {member.id: member for member in one.members if member.id}
        assert [named[number].address for number in (1, 2)] == [first.address, second.address]
        assert all(named[number].report is not None for number in (1, 2))
        assert [member.unreachable.address for member in one.members if member.unreachable] == [silent.address]
        asking = view.asking(named[1])
        assert asking is not None
        assert asking.uri == parse_uri(first.uri)
        assert view.asking(named[2]) is None
        await first.stop()
        (one,) = await view.look()
        assert [member.report is not None for member in one.members if member.id] == [False, True]
        assert "secret" not in repr(one)
    finally:
        await view.close()
        await second.stop()
        await first.stop()


async def test_own_report_is_used_if_the_node_is_also_named(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "node", dialect="2.11")
    node = flowstone.Node(tmp_path / "other", listen="127.0.0.1:0")
    await upstream.start()
    view = NodeView(production(), upstream.node, [parse_uri(f"stranger:wrong@{upstream.address}")])
    early = NodeView(production(), node, [])
    try:
        (one,) = await view.look()
        assert [(member.id, member.unreachable) for member in one.members] == [(1, None)]
        assert await early.look() == ()
    finally:
        await view.close()
        await upstream.stop()
