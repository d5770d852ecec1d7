"""Directories of logs written by a real server of 2.6 or a node, with several logs and snapshots in each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import flowstone
from tests import real_tarantool

ROWS = 20
LOGS = 3

REAL = f"""
box.cfg{{log = 'server.log', checkpoint_count = 10}}
local s = box.schema.space.create('things', {{id = 600, format = {{{{'id', 'unsigned'}}, {{'text', 'string'}}}}}})
s:create_index('pk')
for log = 1, {LOGS} do
    for row = 1, {ROWS} do s:insert{{log * 1000 + row, 'text ' .. row}} end
    if log < {LOGS} then box.snapshot() end
end
os.exit()
"""


def leave(kind: str, directory: Path) -> Path:
    """Return the files of a server of this kind: LOGS logs of ROWS rows each, and a snapshot between each two."""
    if kind == "real":
        real_tarantool.run(REAL, directory)
    else:
        asyncio.run(_ours(directory))
    return directory


async def _ours(directory: Path) -> None:
    async with flowstone.Node(str(directory), checkpoint_count=10) as node:
        space = await node.create_space("things", id=600, format=[("id", "unsigned"), ("text", "string")])
        await space.create_index("pk")
        for log in range(1, LOGS + 1):
            for row in range(1, ROWS + 1):
                await space.insert((log * 1000 + row, f"text {row}"))
            if log < LOGS:
                await node.snapshot()
