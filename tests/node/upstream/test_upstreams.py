"""The upstreams of a node: bootstraps, restarts, orphans, joining, leaving and changing members, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from errno import EIO
from typing import Any
from unittest.mock import patch

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.node.upstream import upstreams
from flowstone.node.upstream.membership_query import is_registered
from flowstone.node.wal.journal import Journal
from tests.simulation.cluster import all_follow_all, start_set
from tests.simulation.disk import Loss
from tests.simulation.simulation import Simulation, simulated

DIALECTS = ("2.6", "2.11")


def uris(sim: Simulation, *names: str) -> list[str]:
    return [sim.uri(name) for name in names]


def ids(sim: Simulation, name: str) -> dict[int, str]:
    return {number: member["uuid"] for number, member in sim.node(name).info()["replication"].items()}


def upstream(sim: Simulation, name: str, of: str) -> dict[str, Any]:
    uuid = sim.machine(of).uuid
    found = (member for member in sim.node(name).info()["replication"].values() if member["uuid"] == uuid)
    shown: dict[str, Any] = next(found).get("upstream", {})
    return shown


async def make_space(sim: Simulation, name: str) -> None:
    async def make() -> None:
        space = await sim.node(name).create_space("ledger")
        await space.create_index("pk")

    await sim.on(name, make())


async def put(sim: Simulation, name: str, *keys: int) -> None:
    async def write() -> None:
        for key in keys:
            await sim.node(name).space("ledger").replace([key, name])

    await sim.on(name, write())


def is_ready(sim: Simulation, name: str) -> bool:
    space = sim.node(name).box.names.get("ledger")
    return space is not None and space.primary is not None


def has(sim: Simulation, name: str, key: int) -> bool:
    return is_ready(sim, name) and sim.node(name).space("ledger").get(key) is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_instances_without_data_agree_on_a_bootstrap_leader_and_follow_each_other(dialect: str) -> None:
    async def scenario(sim: Simulation) -> None:
        peers = uris(sim, "a", "b", "c")
        options: dict[str, Any] = {"dialect": dialect, "replication": peers}
        await asyncio.gather(*(sim.start(name, **options) for name in "abc"))
        await sim.until(lambda: ids(sim, "a") == ids(sim, "b") == ids(sim, "c"))
        assert sorted(ids(sim, "a")) == [1, 2, 3]
        first = min("abc", key=lambda name: sim.machine(name).uuid)
        assert ids(sim, "a")[1] == sim.machine(first).uuid
        await sim.until(lambda: all(sim.node(name).info()["status"] == "running" for name in "abc"))
        await make_space(sim, "a")
        await sim.until(lambda: all(is_ready(sim, name) for name in "bc"))
        for key, name in enumerate("abc"):
            await put(sim, name, key)
        await sim.until(lambda: all(has(sim, name, key) for name in "abc" for key in range(3)))
        await sim.until(lambda: len({str(sim.node(name).info()["vclock"]) for name in "abc"}) == 1)

    for seed in range(3):
        Simulation(seed).run(scenario)


@simulated()
async def test_first_snapshot_of_a_2_6_set_has_all_members(sim: Simulation) -> None:
    await asyncio.gather(*(sim.start(name, dialect="2.6", replication=uris(sim, "a", "b")) for name in "ab"))
    assert sim.node("a").info()["vclock"] == {}
    in_order = sorted(sim.machine(name).uuid for name in "ab")
    assert list(ids(sim, "a").values()) == in_order


@simulated()
async def test_instance_without_data_fails_without_its_peers(sim: Simulation) -> None:
    with pytest.raises(errors.Cfg, match="failed to connect to one or more replicas") as caught:
        await sim.start("a", dialect="2.6", replication=uris(sim, "a", "b"))
    assert caught.value.hint is not None
    assert "b:3301" in caught.value.hint
    assert sim.now >= 30


@simulated()
async def test_majority_is_enough_to_bootstrap_in_dialect_2_11(sim: Simulation) -> None:
    peers = uris(sim, "a", "b", "c")
    await asyncio.gather(*(sim.start(name, replication=peers) for name in "ab"))
    assert sorted(ids(sim, "a")) == [1, 2]
    await sim.start("c", replication=peers)
    await sim.until(lambda: sorted(ids(sim, "a")) == [1, 2, 3])


@simulated()
async def test_two_addresses_of_one_instance_are_rejected(sim: Simulation) -> None:
    await sim.start("a", dialect="2.6")
    with pytest.raises(errors.Cfg, match="duplicate connection to the same replica"):
        await sim.start("b", dialect="2.6", replication=[sim.uri("a"), sim.uri("a")])


@simulated()
async def test_joining_instance_must_list_all_members(sim: Simulation) -> None:
    await sim.start("a")
    await sim.start("b", replication=uris(sim, "a", "b"))
    with pytest.raises(errors.BootstrapConnectionNotToAll) as caught:
        await sim.start("c", replication=uris(sim, "a"))
    assert sim.machine("b").uuid in (caught.value.hint or "")


@simulated()
async def test_the_configured_leader_is_joined_and_another_one_is_an_error(sim: Simulation) -> None:
    await sim.start("a")
    options: dict[str, Any] = {"replication": uris(sim, "a", "b"), "bootstrap_strategy": "config"}
    with pytest.raises(errors.Cfg, match="failed to connect to the bootstrap leader elsewhere"):
        await sim.start("b", bootstrap_leader="elsewhere", **options)
    await sim.start("b", bootstrap_leader=sim.machine("a").uuid, **options)
    assert sorted(ids(sim, "b")) == [1, 2]


@simulated()
async def test_instance_is_an_orphan_until_its_peers_return(sim: Simulation) -> None:
    options: dict[str, Any] = {"dialect": "2.6", "replication": uris(sim, "a", "b"), "replication_connect_timeout": 5}
    await asyncio.gather(sim.start("a", **options), sim.start("b", **options))
    await make_space(sim, "a")
    sim.kill("b")
    await sim.restart("a")
    assert sim.node("a").info()["status"] == "orphan"
    with pytest.raises(errors.Readonly):
        await put(sim, "a", 1)
    await sim.restart("b")
    await sim.until(lambda: sim.node("a").info()["status"] == "running")
    await put(sim, "a", 1)


@simulated(seeds=range(2))
async def test_members_reconnect_soon_when_a_member_is_back(sim: Simulation) -> None:
    await start_set(sim, replication_timeout=100, replication_connect_timeout=1000)
    await sim.until(lambda: all_follow_all(sim), seconds=300)
    sim.kill("a")
    await sim.sleep(1)  # the next attempt is due in 99 s
    await sim.restart("a")
    before = sim.now
    await sim.until(lambda: all_follow_all(sim))
    assert sim.now - before < 10


@simulated()
async def test_quorum_of_zero_prevents_orphan_mode(sim: Simulation) -> None:
    options: dict[str, Any] = {"dialect": "2.6", "replication": uris(sim, "a", "b"), "replication_connect_timeout": 5}
    await asyncio.gather(sim.start("a", **options), sim.start("b", **options))
    sim.kill("b")
    await sim.restart("a", replication_connect_quorum=0)
    assert sim.node("a").info()["status"] == "running"


@simulated()
async def test_replication_can_be_changed_while_the_node_runs(sim: Simulation) -> None:
    await sim.start("a")
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"))
    await sim.on("b", sim.node("b").reconfigure(replication=[]))
    await put(sim, "a", 1)
    await sim.sleep(10)
    assert not has(sim, "b", 1)
    await sim.on("b", sim.node("b").reconfigure(replication=uris(sim, "a")))
    assert has(sim, "b", 1)
    assert upstream(sim, "b", "a")["status"] == "follow"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_anonymous_replica_becomes_a_member_while_it_runs(dialect: str) -> None:
    async def scenario(sim: Simulation) -> None:
        await sim.start("a", dialect=dialect)
        await make_space(sim, "a")
        await sim.start("b", replication=uris(sim, "a"), replication_anon=True, read_only=True)
        info = sim.node("b").info()
        assert (info["id"], info["ro"], sorted(ids(sim, "a"))) == (0, True, [1])
        await put(sim, "a", 1)
        await sim.until(lambda: has(sim, "b", 1))
        assert sim.node("a").info()["replication_anon"] == {"count": 1}
        await sim.on("b", sim.node("b").reconfigure(replication_anon=False, read_only=False))
        assert (sim.node("b").info()["id"], sorted(ids(sim, "a"))) == (2, [1, 2])
        await put(sim, "b", 2)
        assert sim.node("b").info()["vclock"][2] == 1
        with pytest.raises(errors.Cfg, match="cannot be turned on after bootstrap has finished"):
            await sim.on("b", sim.node("b").reconfigure(replication_anon=True, read_only=True))

    Simulation(1).run(scenario)


@simulated()
async def test_registration_fails_without_a_reachable_master(sim: Simulation) -> None:
    await sim.start("a")
    await sim.start("b", replication=uris(sim, "a"), replication_anon=True, read_only=True)
    sim.kill("a")
    await sim.on("b", sim.node("b").reconfigure(replication_connect_timeout=1))
    with pytest.raises(errors.CannotRegister):
        await sim.on("b", sim.node("b").reconfigure(replication_anon=False))
    assert sim.node("b").configuration.replication_anon


async def lose_logs_of_b(sim: Simulation) -> None:
    """Start members a and b, and kill b; a no longer has the logs that b needs."""
    await sim.start("a", dialect="2.6", checkpoint_count=1, wal_cleanup_delay=0)
    await make_space(sim, "a")
    await sim.start("b", dialect="2.6", replication=uris(sim, "a"))
    position = sim.node("b")._instance.vclock
    sim.kill("b")
    await sim.restart("a")  # consumers are lost with the process
    await put(sim, "a", *range(10))
    await sim.on("a", sim.node("a").snapshot())
    await put(sim, "a", *range(10, 20))
    await sim.on("a", sim.node("a").snapshot())
    files = sim.node("a")._instance.files
    await sim.until(lambda: not files.gc_vclock <= position, what="the logs that b needs are deleted")


@simulated()
async def test_instance_rejoins_when_no_member_has_the_logs_it_needs(sim: Simulation) -> None:
    await lose_logs_of_b(sim)
    await sim.restart("b")
    assert all(has(sim, "b", key) for key in range(20))
    assert (sim.node("b").info()["id"], sorted(ids(sim, "a"))) == (2, [1, 2])
    await sim.restart("b")
    assert all(has(sim, "b", key) for key in range(20))


@pytest.mark.parametrize("is_told", [False, True])
@simulated()
async def test_rejoin_is_checked_again_after_its_source_died(sim: Simulation, is_told: bool) -> None:
    """The source dies before it answers, or before the join; it soon returns."""
    await lose_logs_of_b(sim)
    restarts: list[asyncio.Future[Any]] = []
    questions = 0

    async def lose_source() -> None:
        sim.kill("a")
        restarts.append(asyncio.ensure_future(sim.restart("a")))
        await sim.sleep(0.01)

    async def asking(*arguments: Any) -> bool:
        nonlocal questions
        questions += 1
        if questions == 1 and not is_told:
            await lose_source()
        is_member = await is_registered(*arguments)
        if questions == 1 and is_told:
            await lose_source()
        return is_member

    with patch.object(upstreams, "is_registered", asking):
        await sim.restart("b")
    await asyncio.gather(*restarts)
    assert questions > 1
    await sim.until(lambda: all(has(sim, "b", key) for key in range(20)))
    assert (sim.node("b").info()["id"], sorted(ids(sim, "a"))) == (2, [1, 2])


@simulated()
async def test_member_without_privileges_to_check_its_rejoin_does_not_start(sim: Simulation) -> None:
    """JOIN needs the same rights."""
    await lose_logs_of_b(sim)
    with pytest.raises(errors.CredsMismatch):
        await sim.restart("b", replication=[sim.uri("a").replace("first", "nobody")])


@simulated()
async def test_removed_member_is_no_longer_listed(sim: Simulation) -> None:
    await sim.start("a")
    await sim.start("b", replication=uris(sim, "a"))
    sim.kill("b")
    client = await sim.client("a")
    await client.request(RequestType.DELETE, pack({Key.SPACE_ID.value: 320, Key.KEY.value: [2]}))
    assert sorted(ids(sim, "a")) == [1]


@simulated()
async def test_logs_are_not_kept_for_members_disconnected_longer_than_the_limit(sim: Simulation) -> None:
    await sim.start("a", checkpoint_count=1)
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"))
    sim.kill("b")
    await sim.restart("a")
    for _ in range(2):
        await put(sim, "a", 1)
        await sim.on("a", sim.node("a").snapshot())
    logs = [name for name in sim.storage("a").names if name.endswith(".xlog")]
    assert len(logs) > 1
    await sim.on("a", sim.node("a").reconfigure(wal_cleanup_delay=1))
    await sim.until(lambda: len([name for name in sim.storage("a").names if name.endswith(".xlog")]) < len(logs))


@simulated()
async def test_node_is_an_orphan_while_its_peers_are_being_changed(sim: Simulation) -> None:
    await sim.start("a")
    await make_space(sim, "a")
    changing = asyncio.ensure_future(
        sim.on("a", sim.node("a").reconfigure(replication=uris(sim, "nobody"), replication_connect_timeout=3))
    )
    for _ in range(20):
        await sim.sleep(0.1)
        assert sim.node("a").info()["ro"]
    await changing


@simulated()
async def test_replica_without_an_id_is_always_read_only(sim: Simulation) -> None:
    await sim.start("a")
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"), replication_anon=True, read_only=True)
    sim.cut("a", "b")
    options: dict[str, Any] = {"replication_anon": False, "read_only": False, "replication_connect_timeout": 3}
    changing = asyncio.ensure_future(sim.on("b", sim.node("b").reconfigure(**options)))
    await sim.sleep(1)
    with pytest.raises(errors.Readonly):
        await put(sim, "b", 7)
    with pytest.raises(errors.CannotRegister):
        await changing
    with pytest.raises(errors.Readonly):
        await put(sim, "b", 8)
    assert sim.node("b").configuration.read_only
    sim.heal()
    await put(sim, "a", 9)
    await sim.until(lambda: has(sim, "b", 9), what="it follows again, as before")


@simulated()
async def test_rows_of_a_failed_write_are_received_again_when_replication_is_set(sim: Simulation) -> None:
    await sim.start("a")
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"))
    await sim.until(lambda: is_ready(sim, "b"))
    sim.storage("b").room = 0
    await put(sim, "a", 1, 2, 3)
    await sim.until(lambda: upstream(sim, "b", "a").get("status") == "stopped")
    sim.storage("b").room = 1 << 30
    assert not any(has(sim, "b", key) for key in (1, 2, 3))
    await sim.on("b", sim.node("b").reconfigure(replication=uris(sim, "a")))
    await sim.until(lambda: all(has(sim, "b", key) for key in (1, 2, 3)))


@simulated()
async def test_failed_change_of_peers_has_no_effect(sim: Simulation) -> None:
    await sim.start("a")
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"))
    with pytest.raises(errors.Cfg, match="duplicate connection"):
        await sim.on("b", sim.node("b").reconfigure(replication=uris(sim, "a", "a")))
    assert sim.node("b").configuration.replication == (sim.uri("a"),)
    await put(sim, "a", 1)
    await sim.until(lambda: has(sim, "b", 1) and not sim.node("b").info()["ro"])


@simulated()
async def test_cancelled_change_of_peers_has_no_effect(sim: Simulation) -> None:
    await sim.start("a")
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"))
    changing = asyncio.ensure_future(sim.on("b", sim.node("b").reconfigure(replication=uris(sim, "a", "nobody"))))
    await sim.sleep(5)
    changing.cancel()
    await asyncio.gather(changing, return_exceptions=True)
    await put(sim, "a", 1)
    await sim.until(lambda: has(sim, "b", 1) and not sim.node("b").info()["ro"])


@simulated(seeds=range(3))
async def test_node_stopped_during_a_change_of_peers_leaves_no_resources(sim: Simulation) -> None:
    await sim.start("a")
    await sim.start("b", replication=uris(sim, "a"))
    change = sim.node("b").reconfigure(replication=uris(sim, "a", "nobody"))
    changing = asyncio.ensure_future(sim.on("b", change))
    await sim.sleep(sim.random.uniform(0, 0.01))
    await sim.stop("b")
    await asyncio.gather(changing, return_exceptions=True)
    assert sim.now < 10


@simulated()
async def test_rejoined_member_with_local_rows_can_be_restarted(sim: Simulation) -> None:
    await sim.start("a", dialect="2.6", checkpoint_count=1)
    await make_space(sim, "a")

    async def make_local_space() -> None:
        local = await sim.node("a").create_space("mine", is_local=True)
        await local.create_index("pk")

    await sim.on("a", make_local_space())
    await sim.start("b", dialect="2.6", replication=uris(sim, "a"))

    async def write_locally() -> None:
        for key in range(100):
            await sim.node("b").space("mine").insert([key])
        await sim.node("b").snapshot()

    await sim.on("b", write_locally())
    sim.kill("b")
    await sim.restart("a", replication=[])
    await put(sim, "a", *range(10))
    await sim.on("a", sim.node("a").snapshot())
    await put(sim, "a", *range(10, 20))
    await sim.on("a", sim.node("a").snapshot())
    await sim.restart("b")
    await sim.restart("b")
    assert all(has(sim, "b", key) for key in range(20))


@simulated()
async def test_setting_the_same_peers_again_keeps_their_appliers(sim: Simulation) -> None:
    peers = uris(sim, "a", "b", "c")
    await asyncio.gather(*(sim.start(name, replication=peers) for name in "abc"))
    await sim.until(lambda: all(upstream(sim, "c", of).get("status") == "follow" for of in "ab"))
    sim.kill("b")
    line_count = len(sim.trace.lines)
    await sim.on("c", sim.node("c").reconfigure(replication=peers, replication_connect_timeout=2))
    assert not [line for line in list(sim.trace.lines)[line_count:] if " c:" in line and "to a:3301" in line]
    assert upstream(sim, "c", "a")["status"] == "follow"


@simulated()
async def test_bootstrap_fails_when_a_login_is_rejected_for_too_long(sim: Simulation) -> None:
    await sim.start("a")
    wrong = sim.uri("a").replace("secret", "wrong")
    with pytest.raises(errors.CredsMismatch):
        await sim.start("b", replication=[wrong], replication_connect_timeout=5)
    assert 5 <= sim.now < 15


@simulated()
async def test_start_does_not_wait_for_a_peer_that_rejects_the_login(sim: Simulation) -> None:
    await sim.start("a")
    await sim.start("b", replication=uris(sim, "a"))
    wrong = sim.uri("a").replace("secret", "wrong")
    before = sim.now
    await sim.on("b", sim.node("b").reconfigure(replication=[wrong]))
    assert sim.now - before < 5
    assert sim.node("b").info()["status"] == "orphan"
    assert "Incorrect password" in upstream(sim, "b", "a")["message"]


@simulated()
async def test_peer_that_replaced_lost_rows_is_followed_after_a_decision_of_the_operator(
    sim: Simulation,
) -> None:
    await sim.start("a")
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"))
    await sim.on("a", sim.node("a").snapshot())
    await put(sim, "a", *range(5))
    await sim.until(lambda: has(sim, "b", 4))
    sim.crash("a", Loss.UNSYNCED)
    await sim.restart("a")
    await sim.until(lambda: "has lost its rows" in upstream(sim, "b", "a").get("message", ""))
    await put(sim, "a", *range(10, 30))
    await sim.until(lambda: upstream(sim, "b", "a").get("status") == "stopped")
    assert "has written new rows since" in upstream(sim, "b", "a")["message"]
    await sim.on("b", sim.node("b").reconfigure(replication=uris(sim, "a")))
    assert upstream(sim, "b", "a")["status"] == "follow"
    await put(sim, "a", 99)
    await sim.until(lambda: has(sim, "b", 99))


@simulated()
async def test_instance_without_data_waits_for_a_writable_leader(sim: Simulation) -> None:
    await sim.start("a")
    await make_space(sim, "a")
    await sim.on("a", sim.node("a").reconfigure(election_mode="voter"))
    joining = asyncio.ensure_future(sim.start("b", replication=uris(sim, "a")))
    await sim.sleep(5)
    assert not joining.done()
    await sim.on("a", sim.node("a").reconfigure(election_mode="candidate"))
    await joining
    assert sorted(ids(sim, "b")) == [1, 2]


@simulated()
async def test_instance_without_data_times_out_waiting_for_a_writable_peer(sim: Simulation) -> None:
    await sim.start("a", read_only=False)
    await sim.on("a", sim.node("a").reconfigure(read_only=True))
    with pytest.raises(errors.Readonly):
        await sim.start("b", replication=uris(sim, "a"), replication_connect_timeout=5)


@simulated()
async def test_bootstrapping_member_with_elections_serves_no_peers_before_it_leads(sim: Simulation) -> None:
    """Real joining instances give up when no member is writable."""
    sim.build("a")
    sim.machine("a").blocking_seconds = (0.1, 0.2)  # a slow disk delays the write of its vote
    starting = asyncio.ensure_future(sim.start("a", replication=uris(sim, "a"), election_mode="candidate"))
    told: list[bool] = []
    while not starting.done():
        await sim.sleep(0.0001)
        with suppress(FlowstoneError):
            client = await sim.client("a")
            body = pack({Key.FUNCTION_NAME: "box.info", Key.TUPLE: []})
            answer = await client.request(RequestType.CALL, body)
            told.append(answer[Key.DATA][0]["ro"])
    assert told
    assert not any(told)


@simulated()
async def test_bootstrap_fails_when_the_first_term_cannot_be_written(sim: Simulation) -> None:
    def refuse(*_: object) -> None:
        raise OSError(EIO, "Input/output error")

    options: dict[str, Any] = {"election_mode": "candidate", "replication": uris(sim, "a")}
    told = "first term not written within 30 s"
    with patch.object(Journal, "_write", refuse), pytest.raises(FlowstoneError, match=told):
        await sim.start("a", **options)
    await sim.start("a", **options)
    await sim.until(lambda: not sim.node("a").info()["ro"])


@simulated()
async def test_elected_orphan_accepts_writes(sim: Simulation) -> None:
    """Otherwise the member that it waits for could not be expelled."""
    names = ("a", "b", "c")
    options: dict[str, Any] = {"bootstrap_strategy": "legacy", "replication_connect_quorum": 3}
    options |= {"election_mode": "manual", "replication": uris(sim, *names), "replication_connect_timeout": 5}
    await asyncio.gather(*(sim.start(name, **options) for name in names))
    sim.kill("c")
    await sim.restart("a")
    assert sim.node("a").info()["status"] == "orphan"
    await sim.on("a", sim.node("a").promote())
    await sim.until(lambda: not sim.node("a").info()["ro"])
    assert sim.node("a").info()["status"] == "running"
