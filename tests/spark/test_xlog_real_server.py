"""Source `xlog` on files of real servers: archives with images, and the directory of a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowstone.archive.archive import Archive
from flowstone.outside import production
from flowstone.spark.sources.options import xlog_options
from flowstone.spark.sources.xlog.log_directories import LogDirectories
from flowstone.spark.sources.xlog.past_state import plan_state, read_state
from flowstone.spark.sources.xlog.source import XlogReader
from tests.interop.versions import ANY, Binary, parameters
from tests.node.archived_server import SCHEMA, RealServer
from tests.spark.test_xlog_stream import Query

SETUP = f"""{SCHEMA}
local orders = box.schema.space.create('orders', {{if_not_exists = true, is_sync = true,
    format = {{{{'id', 'unsigned'}}, {{'name', 'string'}}, {{'amount', 'number', is_nullable = true}}}}}})
orders:create_index('pk', {{if_not_exists = true}})
claim()
function work(seed)
    math.randomseed(seed)
    local s = box.space.orders
    for i = 1, 300 do
        local id, kind = math.random(50), math.random(8)
        if kind <= 2 then s:replace{{id, 'r' .. i, i}}
        elseif kind == 3 then s:delete(id)
        elseif kind == 4 then s:update(id, {{{{'=', 2, 'u' .. i}}, {{'+', 3, 1}}}})
        elseif kind == 5 then s:upsert({{id, 'n' .. i, 0}}, {{{{'+', 3, 10}}}})
        elseif kind == 6 then
            box.begin()
            for j = 0, 3 do s:replace{{id + j, 't' .. i, j}} box.space.t:replace{{i, 'v'}} end
            box.commit()
        elseif kind == 7 and i % 20 == 0 then s:truncate()
        else box.space.t:replace{{i, 'v' .. i}} end
    end
end
function withdraw()
    box.cfg{{replication_synchro_quorum = 2, replication_synchro_timeout = 0.03}}
    pcall(box.space.orders.replace, box.space.orders, {{999, 'gone', 0}})
    box.cfg{{replication_synchro_quorum = 1, replication_synchro_timeout = 5}}
end
function moment()
    local rows, vclock = {{}}, {{}}
    for _, tuple in box.space.orders:pairs() do table.insert(rows, tuple) end
    for key, lsn in pairs(box.info.vclock) do table.insert(vclock, {{key, lsn}}) end
    return rows, vclock
end
"""


def moment(server: RealServer) -> tuple[list[Any], str]:
    """Return the current rows of `orders` and their position."""
    rows, vclock = server.eval("return moment()")
    return [tuple(row) for row in rows], "{" + ", ".join(f"{key}: {lsn}" for key, lsn in vclock) + "}"


def state(directory: Path, **options: str) -> list[Any]:
    given = {"path": str(directory), "mode": "state", "space": "orders", **options}
    disk = production().disk
    parts = plan_state(LogDirectories.open(disk, [str(directory)]), xlog_options(given))
    rows = [row for part in parts for batch in read_state(disk, part) for row in batch.to_pylist()]
    return sorted((row["id"], row["name"], row["amount"]) for row in rows)


@pytest.mark.parametrize("binary", parameters(ANY))
def test_directory_of_a_running_server_is_followed(tmp_path: Path, binary: Binary) -> None:
    directory = tmp_path / "server"
    with RealServer(directory, setup=SETUP, cfg="wal_max_size=20000", binary=binary.path) as server:
        query = Query(str(directory), space="orders")
        moments = []
        rows = []
        for seed in range(6):
            server.eval("work(...)", seed)
            moments.append(moment(server))
            server.eval("withdraw()")
            if seed == 3:
                server.eval("box.snapshot()")
            rows += [row for batch in query.batches() for row in batch]
        # The last rows are settled by the CONFIRM after them, which is written when the server has answered.
        settled = query.reader._refreshed().sets
        assert len(settled) == 1
        for known, at in moments:
            assert state(directory, asOf=at) == known
        now, _ = moment(server)
        assert state(directory) == now
    assert not any(row["id"] == 999 for row in rows)
    keys = [(row["_replica_id"], row["_lsn"]) for row in rows]
    assert len(keys) == len(set(keys)) > 500
    versions = [row["_commit_version"] for row in rows]
    assert versions == sorted(versions)
    # The server has stopped, and its log ends there: one batch has the same changes.
    reader = XlogReader(xlog_options({"path": str(directory), "space": "orders"}))
    again = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row for row in again if (row["_replica_id"], row["_lsn"]) in set(keys)] == rows


@pytest.mark.parametrize("binary", parameters(ANY))
async def test_images_of_a_real_servers_rows_lead_from_state_to_state(tmp_path: Path, binary: Binary) -> None:
    directory = tmp_path / "archive"
    with RealServer(tmp_path / "server", setup=SETUP, binary=binary.path) as server:
        await Archive(server.uri, directory, images=True).run(once=True)
        server.eval("work(1) withdraw() work(2)")
        await Archive(server.uri, directory, images=True).run(once=True)
        known, _ = moment(server)
    reader = XlogReader(xlog_options({"path": str(directory), "space": "orders", "images": "full"}))
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    held: dict[int, Any] = {}
    for row in rows:
        values = row["id"], row["name"], row["amount"]
        kind = row["_change_type"]
        if row["_operation"] == "truncate":
            assert kind == "delete"
            held.clear()
        elif kind == "insert":
            assert row["id"] not in held
            held[row["id"]] = values
        elif kind == "update_postimage":
            held[row["id"]] = values
        else:
            assert held[row["id"]] == values, f"{kind} of LSN {row['_lsn']}"
            if kind == "delete":
                del held[row["id"]]
    assert sorted(held.values()) == known == state(directory)
    posts = XlogReader(xlog_options({"path": str(directory), "space": "orders", "images": "post"}))
    shown = [row for part in posts.partitions() for batch in posts.read(part) for row in batch.to_pylist()]
    assert shown == [row for row in rows if row["_change_type"] != "update_preimage"]
    assert held == replayed_messages(directory)


def replayed_messages(directory: Path) -> dict[int, Any]:
    """Return the rows that the messages of all changes lead to; each row before a change is the one after the last."""
    reader = XlogReader(xlog_options({"path": str(directory), "space": "orders", "envelope": "debezium"}))
    messages = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    held: dict[int, Any] = {}
    for each in messages:
        value = json.loads(each["value"])
        if value["op"] == "t":
            held.clear()
            continue
        number = json.loads(each["key"])["id"]
        assert held.pop(number, None) == value["before"]
        if value["after"] is not None:
            held[number] = value["after"]
    return {number: (row["id"], row["name"], row["amount"]) for number, row in held.items()}
