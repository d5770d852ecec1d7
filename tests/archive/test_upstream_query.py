"""The data that an archive requests from a server when it starts in the middle of its log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone.archive import upstream_query as archive_upstream
from flowstone.archive.definitions_file import DefinitionsFile
from flowstone.archive.upstream_query import ask_ballot, ask_facts, first_of
from flowstone.box.schema import SchemaTracker
from flowstone.client.connection import ConnectionFailed
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from tests import served_node
from tests.interop.versions import ANY, parameters
from tests.node.archived_server import RealServer


@pytest.fixture(params=parameters(ANY))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path / "master", binary=request.param.path) as running:
        yield running


@pytest.mark.real
@pytest.mark.usefixtures("tarantool")
async def test_real_server_reports_its_identity_and_schema(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_upstream, "PAGE_SIZE", 10)
    facts = await ask_facts(production(), parse_uri(server.uri))
    (uuids,) = server.eval("return {box.info.uuid, box.info.cluster and box.info.cluster.uuid}")
    assert str(facts.instance_uuid) == uuids[0]
    assert facts.ballot.vclock.without_zero() == VClock(server.vclock())
    tracker = SchemaTracker()
    DefinitionsFile({}, "", "", facts.definitions).apply_to(tracker)
    assert [index.name for index in tracker.schema.space("t").indexes] == ["pk", "by_text"]
    server.eval("fill(1, 10)")
    assert (await ask_ballot(production(), parse_uri(server.uri))).vclock.get(1) == facts.ballot.vclock.get(1) + 10


async def test_node_reports_its_identity_and_schema(tmp_path: Path) -> None:
    with served_node.serve(tmp_path / "node") as node:
        facts = await ask_facts(production(), node.uri)
        async with await served_node.connect(node) as connection:
            await served_node.create_space(connection, 512, "orders", [("id", "unsigned")])
        later = await ask_facts(production(), node.uri)
    assert later.replicaset_uuid == facts.replicaset_uuid
    assert len(later.definitions) == len(facts.definitions) + 2


async def test_first_member_that_answers_is_used() -> None:
    asked: list[str] = []

    async def ask(uri: Uri) -> str:
        asked.append(uri.address)
        if uri.host == "a":
            raise ConnectionFailed("a is away")
        return uri.host

    members = [parse_uri("a:1"), parse_uri("b:1"), parse_uri("c:1")]
    assert await first_of(members, ask) == "b"
    assert asked == ["a:1", "b:1"]
    with pytest.raises(FlowstoneError, match="a is away"):
        await first_of(members[:1], ask)
