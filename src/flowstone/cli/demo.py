"""`flowstone demo`: the log tools at work, on the log of a small shop that is written for the occasion."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: `flowstone demo --keep`"


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the files there, to try more on them.")] = False,
) -> int:
    """Show the log tools on a small shop: a snapshot and logs with transactions, an election and a rollback."""
    directory = Path(tempfile.mkdtemp(prefix="flowstone-demo-"))
    try:
        with _inside(directory):
            _show()
    finally:
        if not keep:
            shutil.rmtree(directory)
    where = f"The files are in {directory}." if keep else "The files are gone; with --keep they stay."
    print(f"\n{where} This was the first part of Flowstone, its log tools: flowstone --help")
    return 0


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Works in `directory`, so that the commands shown are short and can be typed there."""
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def _show() -> None:
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
