"""Servers for the tests of live reads and writes: a real Tarantool and a node of ours, with the same spaces.

Space `orders` has a format and three rows, `pairs` a key of two parts and 40 rows, and `loose` no format. User
`limited` may only read and write `orders` (on the real server only).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from flowstone.spark.sources.tarantool.live_node import select_body
from tests import real_tarantool, served_node

KINDS = ("real", "node")
ORDERS, PAIRS, LOOSE, EMPTY = 512, 513, 514, 515
ORDERS_FORMAT = (("id", "unsigned"), ("name", "string"), ("amount", "number"), ("note", "string", True))
PAIRS_FORMAT = (("a", "unsigned"), ("b", "string"), ("c", "integer", True))
ORDER_ROWS: tuple[tuple[Any, ...], ...] = (
    (1, "one", 1.5, None),
    (2, "two", 2, "second", "extra", [1]),
    (3, "three", -3),
)
PAIR_ROWS = tuple((a, f"b{b}", a * b) for a in range(4) for b in range(10))

LIMITED = """
box.schema.user.create('limited', {password = 'pass'})
box.schema.user.grant('limited', 'read,write', 'space', 'orders')
box.schema.user.create('replicator', {password = 'secret'})
box.schema.user.grant('replicator', 'replication')
"""


@contextmanager
def server(kind: str, directory: Path, *, binary: str = "tarantool") -> Iterator[str]:
    """Yield the address of a server of that kind, whose guest has all privileges."""
    if kind == "real":
        with real_tarantool.serve(directory, binary=binary) as real:
            fill(real.uri)
            run(real.uri, LIMITED)
            yield real.uri
    else:
        with served_node.serve(directory) as node:
            address = f"127.0.0.1:{node.port}"

            async def grant() -> None:
                async with await served_node.connect(node) as connection:
                    await served_node.grant_guest(connection)

            asyncio.run(grant())
            fill(address)
            yield address


def fill(address: str) -> None:
    create(address, ORDERS, "orders", ORDERS_FORMAT)
    create(address, PAIRS, "pairs", PAIRS_FORMAT, key=((0, "unsigned"), (1, "string")))
    create(address, LOOSE, "loose", ())
    create(address, EMPTY, "empty", ORDERS_FORMAT)
    insert(address, ORDERS, ORDER_ROWS)
    insert(address, PAIRS, PAIR_ROWS)
    insert(address, LOOSE, [(1, {"a": [True, None]})])


def create(
    address: str,
    space_id: int,
    name: str,
    fields: Sequence[tuple[Any, ...]],
    *,
    key: Sequence[tuple[int, str]] = ((0, "unsigned"),),
    options: dict[str, Any] | None = None,
    more_indexes: Sequence[tuple[str, Sequence[tuple[int, str]]]] = (),
) -> None:
    """Create a space with a unique tree by `key`; each field is given by its name, its type, and whether it is
    nullable.
    """
    format = [{"name": name, "type": kind, "is_nullable": bool(rest)} for name, kind, *rest in fields]
    rows = [
        (space_id, number, index, "tree", {"unique": True}, list(parts))
        for number, (index, parts) in enumerate([("pk", key), *more_indexes])
    ]
    insert(address, served_node.SPACE, [(space_id, 1, name, "memtx", 0, options or {}, format)])
    insert(address, served_node.INDEX, rows)


def insert(address: str, space_id: int, rows: Sequence[tuple[Any, ...]]) -> None:
    bodies = [pack({Key.SPACE_ID.value: space_id, Key.TUPLE.value: row}) for row in rows]
    asyncio.run(_requests(address, [(RequestType.REPLACE, body) for body in bodies]))


def rows_of(address: str, space_id: int) -> list[tuple[Any, ...]]:
    """Return all rows that a client sees."""
    (answer,) = asyncio.run(_requests(address, [(RequestType.SELECT, select_body(space_id, iterator=2))]))
    return list(answer[Key.DATA])


def run(address: str, lua: str) -> Any:
    """Run Lua on a real server."""
    expression = f"return box.session.su('admin', function() {lua} end)"
    body = pack({Key.EXPR.value: expression, Key.TUPLE.value: []})
    (answer,) = asyncio.run(_requests(address, [(RequestType.EVAL, body)]))
    return answer[Key.DATA]


async def _requests(address: str, requests: Sequence[tuple[RequestType, bytes]]) -> list[dict[int, Any]]:
    async with await Connection.open(production(), parse_uri(address)) as connection:
        sent = [connection.send(kind, body) for kind, body in requests]
        return [connection.values(await connection.answer(one)) for one in sent]
