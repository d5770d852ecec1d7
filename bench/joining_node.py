"""Joins a master with an empty node and prints the elapsed seconds: `python joining_node.py URI`.

A separate program, so that the type checker sees its calls.
"""

from __future__ import annotations

import asyncio
import sys
import time

import flowstone


async def main(uri: str) -> None:
    started = time.perf_counter()
    async with flowstone.Node("data", replication=[uri]):
        print(time.perf_counter() - started)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
