"""Joins a master with an empty node and prints the elapsed seconds: `python joining_node.py URI`.

A separate program, so that the type checker sees its calls. Compiling is left out of the measurement.
"""

from __future__ import annotations

import asyncio
import sys
import time

import flowstone
from flowstone.node.warm_up import warm_up


async def main(uri: str) -> None:
    warm_up()
    started = time.perf_counter()
    async with flowstone.Node("data", replication=[uri]):
        print(time.perf_counter() - started)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
