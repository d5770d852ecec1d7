"""The public interface for type checkers. This module is never imported: mypy and pyright read it
(test_typed_surface.py).

`assert_type` states the type of a call. A line that ends in `type: ignore` must be an error: both checkers report
unused ignore comments.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import assert_type

from pyspark.sql import SparkSession

import flowstone
import flowstone.limestone
import flowstone.spark
from flowstone import limestone
from flowstone.spark import Mirror, lake_tables, restore, session, verify


@dataclass
class Order:
    id: int
    status: str


async def nodes(node: flowstone.Node) -> None:
    assert_type(flowstone.Node("data", listen=3301, replication=["db1:3301"], election_mode="voter"), flowstone.Node)
    flowstone.Node("data", lisen="127.0.0.1:3301")  # type: ignore[call-arg]
    flowstone.Node("data", read_only="yes")  # type: ignore[arg-type]
    assert_type(await node.reconfigure(read_only=True), list[str])
    assert_type(node.statistics(), flowstone.Statistics)
    assert_type(await node.disk_usage(), flowstone.DiskUsage)
    orders = assert_type(node.space("orders"), flowstone.Space)
    assert_type(orders.get(42), flowstone.Tuple | None)
    assert_type(orders.index("by_status").select("late", limit=10), list[flowstone.Tuple])
    assert_type(await orders.insert((42, "new")), flowstone.Tuple)
    assert_type(orders[42], flowstone.Tuple)
    assert_type(orders.as_(Order).get(42), Order | None)
    assert_type(await orders.as_(Order).insert(Order(42, "new")), Order)
    orders.select(limit="10")  # type: ignore[arg-type]
    async with node.transaction() as transaction:
        assert_type(transaction.space("orders").insert((42, "new")), flowstone.Tuple)
    with node.read_view() as view:
        assert_type(view.space("orders"), flowstone.ViewSpace)


async def replicas() -> None:
    async with flowstone.follow("db1:3301", spaces=["orders"]) as replica:
        assert_type(replica, flowstone.Replica)
        assert_type(replica.vclock, flowstone.VClock)
        assert_type(replica.space("orders").get(42), flowstone.Tuple | None)
    with flowstone.follow("db1:3301") as blocking:
        assert_type(blocking, flowstone.BlockingReplica)
        assert_type(blocking.space("orders"), flowstone.BlockingSpace)
    flowstone.follow("db1:3301", connect_timeout="10")  # type: ignore[arg-type]
    async with flowstone.Archive("db1:3301", "/backup/db1") as archive:
        assert_type(archive.settled, flowstone.VClock)


async def clients() -> None:
    async with flowstone.connect(["db1:3301", "db2:3301"], read_from=2.0) as client:
        assert_type(client, flowstone.Client)
        orders = assert_type(client.space("orders"), flowstone.ClientSpace[flowstone.Tuple])
        assert_type(await orders.get(42), flowstone.Tuple | None)
        assert_type(await orders.insert({"id": 42, "status": "new"}), flowstone.Tuple)
        assert_type(await orders.insert_many([(43, "new")]), int)
        objects = assert_type(orders.as_(Order), flowstone.ClientSpace[Order])
        assert_type(await objects.index("by_status").select("late"), list[Order])
        assert_type(await objects.update(42, {"status": "paid"}), Order | None)
        async with client.transaction() as transaction:
            assert_type(await transaction.space("orders").delete(42), flowstone.Tuple | None)
        assert_type(client.members, tuple[flowstone.ClientMember, ...])
    with flowstone.connect("db1:3301") as blocking:
        assert_type(blocking, flowstone.BlockingClient)
        assert_type(blocking.space("orders").as_(Order).get(42), Order | None)
    flowstone.connect("db1:3301", read_from="follower")  # type: ignore[arg-type]
    flowstone.connect("db1:3301", request_timeout="10")  # type: ignore[arg-type]


def datastores() -> None:
    with limestone.Datastore("log", on_lost="degrade") as store:
        assert_type(store.create_channel(), limestone.LogChannel)
        assert_type(store.snapshot(), limestone.StoreSnapshot)
        assert_type(store.status(), limestone.Status)
        assert_type(store.begin_backup(), limestone.Backup)
    limestone.Datastore("log", on_lost="never")  # type: ignore[arg-type]


def pipeline(spark: SparkSession) -> None:
    with Mirror("db1:3301", Path("/lake"), spark=spark, mask={"users.email": "sha256"}, spool="/spool") as mirror:
        assert_type(mirror, Mirror)
        assert_type(mirror.run_once(), flowstone.spark.MirrorStopped)
        assert_type(mirror.run().changes, int)
    Mirror("db1:3301", "/lake", mask={"users.email": "md5"})  # type: ignore[dict-item]
    Mirror("db1:3301", "/lake", spaces=["orders"])  # type: ignore[call-arg]
    Mirror("db1:3301", "/lake", transport="pigeon")  # type: ignore[arg-type]
    report = assert_type(verify("db1:3301", "/lake", at="common"), flowstone.spark.VerifyReport)
    assert_type(report.a, flowstone.spark.SideReport)
    assert_type(report.spaces, tuple[flowstone.spark.SpaceResult, ...])
    assert_type(report.differences[0].fields[0], flowstone.spark.FieldDifference)
    verify("db1:3301")  # type: ignore[call-arg]
    verify("db1:3301", "/lake", at=1.5)  # type: ignore[arg-type]
    restored = assert_type(restore("/backup", "/out", to=datetime.now().astimezone()), flowstone.spark.Restored)
    assert_type(restored.position, flowstone.VClock)
    assert_type(restored.spaces[0], flowstone.spark.RestoredSpace)
    restore("/backup", "/out", to=flowstone.VClock({1: 500}), format=["snap", "delta"])
    restore("/backup", "/out", format="csv")  # type: ignore[arg-type]
    assert_type(lake_tables("/lake"), dict[str, flowstone.spark.LakeTableStatus])
    with session("report") as started:
        flowstone.spark.register(started)


def events(event: flowstone.spark.MirrorEvent) -> str:
    match event:
        case flowstone.spark.MirrorProgress():
            assert_type(event.tables, dict[str, flowstone.spark.TableProgress])
            assert_type(event.lag, float | None)
        case flowstone.spark.MirrorTable():
            assert_type(event.what, str)
        case _:
            pass
    return str(event)
