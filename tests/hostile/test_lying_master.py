"""A master lies to a node that follows it: the node reports it, continues, and stores nothing."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.replication.vclock import VClock
from tests.hostile.liar import SPACE_ID, Liar, Talk
from tests.hostile.lie import BOTH, Lie
from tests.hostile.master_lies import LIES
from tests.hostile.stage import PASSWORD, Stage, Stages, until

SECRET = "never-to-be-said"
CASES = [pytest.param(lie, dialect, id=f"{lie}-{dialect}") for lie in LIES for dialect in lie.dialects]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    made = Stages(tmp_path_factory.mktemp("lying_master"))
    yield made
    made.close()


@pytest.mark.parametrize(("lie", "dialect"), CASES)
def test_forged_rows_of_a_master_are_rejected_and_not_stored(
    lie: Lie, dialect: str, stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowstone")
    stages.run(be_lied_to(lie, dialect, stages, caplog))
    assert SECRET not in caplog.text
    assert PASSWORD not in caplog.text
    assert "Traceback" not in caplog.text


async def be_lied_to(lie: Lie, dialect: str, stages: Stages, caplog: pytest.LogCaptureFixture) -> None:
    scene = await stages.get(dialect, victim_leads=lie.victim_leads)
    before = scene.picture()
    async with Liar(scene.role, lie.tell) as liar:
        try:
            await scene.victim.reconfigure(replication=[f"spy:{SECRET}@{liar.address}"])
            await be_told(lie, scene, liar, caplog)
            assert SECRET not in str(scene.victim.info())
            assert scene.picture() == before
            if lie.ends_tenure:
                await scene.victim.promote()
            await scene.assert_serves()
        finally:
            await scene.victim.reconfigure(replication=[])
    scene.assert_nothing_kept()


@pytest.mark.parametrize("dialect", BOTH)
def test_ballot_with_more_of_our_rows_makes_the_node_read_only_while_it_follows_that_master(
    dialect: str, stages: Stages
) -> None:
    """The claim may be true: a member that has lost rows must not reuse their LSNs. An operator must decide."""
    stages.run(hear_of_lost_rows(dialect, stages))


async def hear_of_lost_rows(dialect: str, stages: Stages) -> None:
    scene = await stages.get(dialect)
    await scene.assert_serves()

    async def tell(talk: Talk) -> None:
        await talk.polite_until(RequestType.VOTE)
        await talk.say(talk.ballot(vclock=VClock({1: 10**6})))
        while (request := await talk.hear()).type != RequestType.SUBSCRIBE:
            await talk.say(talk.polite_answer(request.type))
        await talk.say(talk.subscription())

    async with Liar(scene.role, tell) as liar:
        await scene.victim.reconfigure(replication=[liar.address])
        await until(lambda: scene.victim.info()["status"] == "orphan")
        with pytest.raises(errors.Readonly):
            await scene.victim.space(SPACE_ID).replace((1, "true"))
        assert scene.victim.space(SPACE_ID).get(1) == (1, "true")
        await scene.victim.reconfigure(replication=[])
    assert scene.victim.info()["status"] == "running"
    await scene.assert_serves()


async def be_told(lie: Lie, scene: Stage, liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    """Return when the victim has reported the expected error."""
    if not lie.reason:
        await until(lambda: scene.upstream.get("status") in ("sync", "follow") and liar.is_done)
        await asyncio.sleep(0.02)
        assert "message" not in scene.upstream
    elif lie.is_known:
        await until(lambda: has_failed(scene) and re.search(lie.reason, scene.upstream.get("message", "")))
        assert len(scene.upstream["message"]) < 2000
    else:
        await until(lambda: re.search(lie.reason, caplog.text))
        assert liar.address in caplog.text


def has_failed(scene: Stage) -> bool:
    return scene.upstream.get("status") in ("stopped", "disconnected", "loading")
