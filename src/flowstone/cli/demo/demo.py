"""`flowstone demo`: kill the leader of a replica set while Spark mirrors it into a lake; or tour the other tools.

Everything runs in a temporary directory, with the public commands and classes. The parts are in the other modules of
`cli/demo/`.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flowstone.client.connection import Connection

EXAMPLE = "Example: `flowstone demo --keep`, then `flowstone demo --tour`"


def demo(
    tour: Annotated[
        bool,
        typer.Option("--tour", help="Show the log tools, a node, replica sets, a follower and elections; no Spark."),
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="Seconds that each act lasts; ignored with --tour.")
    ] = 15.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files.")] = False,
) -> int:
    """Kill the leader of a replica set while Spark mirrors it into Delta tables, then verify the tables."""
    directory = Path(tempfile.mkdtemp(prefix="flowstone-demo-"))
    try:
        if tour:
            with _inside(directory):
                _show_tour()
            code = 0
        else:
            code = _show_lake(directory, seconds)
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
    where = f"The files are in {directory}." if keep else "The files are deleted; --keep keeps them."
    print(f"\n{where} More: {'flowstone --help' if tour else 'flowstone demo --tour, flowstone --help'}")
    return code


def _show_lake(directory: Path, seconds: float) -> int:
    from rich.console import Console

    from flowstone.cli import event_loop, extras

    extras.need("spark", "flowstone demo")
    from flowstone.cli.demo.lake import Scale, show_lake
    from flowstone.spark.spark_session import check_java

    check_java()
    return event_loop.run(show_lake(directory, Console(), Scale(seconds)))


def _show_tour() -> None:
    _show_logs()
    _show_node()
    with _quiet_log():  # it would report the peers that the demo stops on purpose
        _show_replica_set()
        _show_elections()


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Change to `directory` for the block, so that the commands shown are short and can be repeated there."""
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _quiet_log() -> Iterator[None]:
    log = logging.getLogger("flowstone")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _show_logs() -> None:
    from flowstone.cli.demo.shop import write_shop
    from flowstone.outside import production

    write_shop(production(), "shop")
    _tell("A snapshot and two logs of a shop, written by Flowstone:")
    for path in sorted(Path("shop").iterdir()):
        print(f"  {path} ({path.stat().st_size} bytes)")
    _tell("Every change, with the names of spaces and fields; brackets mark transactions:")
    _run("cat", "--format", "table", "shop")
    _tell("Orders are synchronous. One of them was written and then rolled back, but is still in the log:")
    _run("cat", "--format", "table", "--space", "orders", "shop/00000000000000000000.xlog")
    _tell("With --settled, only the orders that the replica set has confirmed are shown:")
    _run("cat", "--format", "table", "--space", "orders", "--settled", "shop/00000000000000000000.xlog")
    _tell("The election before the first order, as YAML:")
    _run("cat", "--from", "1", "--to", "2", "shop/00000000000000000000.xlog")
    _tell("One space as CSV, with columns typed by the format of the space:")
    _run("cat", "--format", "csv", "--space", "products", "--columns", "_lsn,_type,id,name,price,_operations", "shop")
    _tell("The settled orders as Parquet, for a data lake:")
    _run("cat", "--format", "parquet", "--space", "orders", "--settled", "--output", "orders.parquet", "shop")
    _read_back("orders.parquet")
    _tell("JSON, one line per row, as tarantoolctl prints it:")
    _run("cat", "--format", "json", "--from", "4", "--to", "6", "shop/00000000000000000000.xlog")
    _tell("A log that ends inside a write, as after a crash: the rows before it are shown, a warning names the place:")
    torn = _tear("shop", "torn")
    _run("cat", "--format", "table", torn)


def _show_node() -> None:
    from flowstone.cli import event_loop

    event_loop.run(_serve_and_recover())
    _tell("The log of the node is read like any other:")
    _run("cat", "--format", "table", "--space", "orders", "--from", "1", "--replica", "1", "node")


def _show_replica_set() -> None:
    from flowstone.cli import event_loop
    from flowstone.cli.demo.replication import show_replica_set

    _tell("A replica set in this process; real Tarantool servers could be members, too:")
    first = event_loop.run(show_replica_set())
    _tell("Every member has all rows in its own log, no matter which member wrote them:")
    _run("cat", "--format", "table", "--space", "orders", "--from", "1", first)


def _show_elections() -> None:
    from flowstone.cli import event_loop
    from flowstone.cli.demo.elections import show_elections

    _tell("A replica set with elections, and a space whose changes need a quorum:")
    last = event_loop.run(show_elections())
    _tell("The log of the last leader; its PROMOTE decides about the pending transactions:")
    _run("cat", "--format", "table", "--from", "1", f"elected-{last}")


async def _serve_and_recover() -> None:
    """Start a node and use it through a socket; then start it again from its files."""
    import flowstone
    from flowstone.client.connection import Connection
    from flowstone.iproto.uri import parse_uri
    from flowstone.outside import production

    _tell("A node in this process, on a port of the loopback interface:")
    async with flowstone.Node("node", listen="127.0.0.1:0", user=("demo", "secret")) as node:
        print(f'  flowstone.Node("node", listen="{node.address}", user=("demo", …))')
        orders = await node.create_space(
            "orders", format=[("id", "unsigned"), ("what", "string"), ("count", "unsigned")]
        )
        await orders.create_index("primary")
        _tell("A client that uses the node through a socket, as any Tarantool client does:")
        async with await Connection.open(production(), parse_uri(f"demo:secret@{node.address}")) as client:
            await _order(client)
        print(f"  without a socket: orders.get(2) == {orders.get(2)}")
    _tell("The node is stopped, and started again from its files:")
    async with flowstone.Node("node") as node:
        print(f"  {len(node.space('orders'))} orders, the log ends at {node.info()['vclock']}")


async def _order(client: Connection) -> None:
    from flowstone.iproto.constants import Key, RequestType
    from flowstone.iproto.errors import TarantoolError
    from flowstone.iproto.msgpack import pack

    async def request(type: RequestType, **body: object) -> object:
        answer = await client.request(type, pack({Key[name].value: value for name, value in body.items()}))
        return answer[Key.DATA]

    space = {"SPACE_NAME": "orders"}
    for order in ((1, "tea", 2), (2, "salt", 1)):
        print(f"  INSERT {order} -> {await request(RequestType.INSERT, **space, TUPLE=order)}")
    changed = await request(RequestType.UPDATE, **space, KEY=(1,), TUPLE=(("+", "count", 3),))
    print(f"  UPDATE (1,) + 3 -> {changed}")
    try:
        await request(RequestType.INSERT, **space, TUPLE=(2, "pepper", 1))
    except TarantoolError as error:
        print(f"  INSERT (2, …) -> {error.message} (code {error.code}, as on the real server)")


def _tell(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def _run(*arguments: str) -> None:
    """Print the command line and run it in this process; exit if it fails."""
    from flowstone.cli import run

    print(f"$ flowstone {shlex.join(arguments)}", flush=True)
    code = run(arguments)
    sys.stdout.flush()
    if code:
        raise typer.Exit(code)


def _read_back(path: str) -> None:
    from pyarrow import parquet

    table = parquet.read_table(path)
    fields = ", ".join(f"{field.name} {field.type}" for field in table.schema if not field.name.startswith("_"))
    print(f"{path}: {table.num_rows} rows, read back with pyarrow; fields: {fields}")


def _tear(directory: str, copy: str) -> str:
    """Copy the directory, cut the last log inside its last block, as a crash does, and return the path of that log."""
    shutil.copytree(directory, copy)
    last = max(Path(copy).glob("*.xlog"))
    last.write_bytes(last.read_bytes()[:-12])
    return str(last)
