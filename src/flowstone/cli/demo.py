"""`flowstone demo`: a replica set whose leader dies while Spark mirrors it into a lake; or a tour of other tools."""

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
    from flowstone.node.connection import Connection

EXAMPLE = "Example: `flowstone demo --keep`, then `flowstone demo --tour`"


def demo(
    tour: Annotated[
        bool,
        typer.Option("--tour", help="Show the log tools, a node, replica sets, a follower and elections; no Spark."),
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="How long each act is played, without --tour.")
    ] = 15.0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the files there, to try more on them.")] = False,
) -> int:
    """Show a replica set whose leader is killed while Spark mirrors it into Delta tables; verify them in the end."""
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
    where = f"The files are in {directory}." if keep else "The files are gone; with --keep they stay."
    print(f"\n{where} More: {'flowstone --help' if tour else 'flowstone demo --tour, flowstone --help'}")
    return code


def _show_lake(directory: Path, seconds: float) -> int:
    from rich.console import Console

    from flowstone.cli import event_loop, extras

    extras.need("spark", "flowstone demo")
    from flowstone.cli.demo_lake import Scale, show_lake
    from flowstone.spark.session import check_java

    check_java()
    return event_loop.run(show_lake(directory, Console(), Scale(seconds)))


def _show_tour() -> None:
    _show_logs()
    _show_node()
    with _quiet_log():  # it tells of peers that come and go, which is what is shown here
        _show_replica_set()
        _show_elections()


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Works in `directory`, so that the commands shown are short and can be typed there."""
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
    from flowstone.cli.shop import write_shop
    from flowstone.outside import production

    write_shop(production(), "shop")
    _tell("A shop's snapshot and two logs, written here by Flowstone's own writer:")
    for path in sorted(Path("shop").iterdir()):
        print(f"  {path} ({path.stat().st_size} bytes)")
    _tell("Every change with the names of spaces and fields; brackets hold transactions together:")
    _run("cat", "--format", "table", "shop")
    _tell("Orders are synchronous. One was rolled back after it had been written; who just reads the log sees it:")
    _run("cat", "--format", "table", "--space", "orders", "shop/00000000000000000000.xlog")
    _tell("What the replica set agreed on is less:")
    _run("cat", "--format", "table", "--space", "orders", "--settled", "shop/00000000000000000000.xlog")
    _tell("The election before, as YAML:")
    _run("cat", "--from", "1", "--to", "2", "shop/00000000000000000000.xlog")
    _tell("One space as CSV, typed by its format:")
    _run("cat", "--format", "csv", "--space", "products", "--columns", "_lsn,_type,id,name,price,_operations", "shop")
    _tell("The same for a data lake:")
    _run("cat", "--format", "parquet", "--space", "orders", "--settled", "--output", "orders.parquet", "shop")
    _read_back("orders.parquet")
    _tell("JSON, a line per row, in the shape of tarantoolctl:")
    _run("cat", "--format", "json", "--from", "4", "--to", "6", "shop/00000000000000000000.xlog")
    _tell("A crash in the middle of a write: the rows before it are there, and it is said what is not.")
    torn = _tear("shop", "torn")
    _run("cat", "--format", "table", torn)


def _show_node() -> None:
    from flowstone.cli import event_loop

    event_loop.run(_serve_and_recover())
    _tell("What it wrote is a log like any other:")
    _run("cat", "--format", "table", "--space", "orders", "--from", "1", "--replica", "1", "node")


def _show_replica_set() -> None:
    from flowstone.cli import event_loop
    from flowstone.cli.demo_replication import show_replica_set

    _tell("A replica set, in this process; real Tarantool servers could be members, too:")
    first = event_loop.run(show_replica_set())
    _tell("Every member has all of it in its own log, whoever wrote it:")
    _run("cat", "--format", "table", "--space", "orders", "--from", "1", first)


def _show_elections() -> None:
    from flowstone.cli import event_loop
    from flowstone.cli.demo_elections import show_elections

    _tell("The same with elections, and a space whose changes need a quorum:")
    last = event_loop.run(show_elections())
    _tell("How that looks in the log of the last leader, whose PROMOTE decides about what waited:")
    _run("cat", "--format", "table", "--from", "1", f"elected-{last}")


async def _serve_and_recover() -> None:
    """A node and a client of it, over a socket; then the same node again, from its files."""
    import flowstone
    from flowstone.iproto.uri import parse_uri
    from flowstone.node.connection import Connection
    from flowstone.outside import production

    _tell("A node, in this process, on a port of the loopback interface:")
    async with flowstone.Node("node", listen="127.0.0.1:0", user=("demo", "secret")) as node:
        print(f'  flowstone.Node("node", listen="{node.address}", user=("demo", …))')
        orders = await node.create_space(
            "orders", format=[("id", "unsigned"), ("what", "string"), ("count", "unsigned")]
        )
        await orders.create_index("primary")
        _tell("A client in another place of this program, as any Tarantool client does it, over the wire:")
        async with await Connection.open(production(), parse_uri(f"demo:secret@{node.address}")) as client:
            await _order(client)
        print(f"  and in the process: orders.get(2) == {orders.get(2)}")
    _tell("Stopped. Started again, from its files:")
    async with flowstone.Node("node") as node:
        print(f"  {len(node.space('orders'))} orders, {node.info()['vclock']} is where the log ends")


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
        print(f"  INSERT (2, …) -> {error.message} (code {error.code}, as the real server has it)")


def _tell(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def _run(*arguments: str) -> None:
    """Shows the command line and runs it, here, as if it had been typed."""
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
    """A copy of the directory whose last log ends inside its last block, as a crash leaves it; that log's path."""
    shutil.copytree(directory, copy)
    last = max(Path(copy).glob("*.xlog"))
    last.write_bytes(last.read_bytes()[:-12])
    return str(last)
