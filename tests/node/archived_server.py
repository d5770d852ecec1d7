"""A real Tarantool to be archived: killed, restarted, and compared with its archive."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Self

import tarantool

from tests import real_tarantool

SCHEMA = r"""
local t = box.schema.space.create('t', {if_not_exists=true})
t:create_index('pk', {if_not_exists=true})
t:create_index('by_text', {parts={2, 'string'}, unique=false, if_not_exists=true})
box.schema.user.create('replicator', {password='secret', if_not_exists=true})
box.schema.user.grant('replicator', 'replication', nil, nil, {if_not_exists=true})
box.schema.user.create('nobody', {password='secret', if_not_exists=true})
function claim() if box.ctl.promote then box.ctl.promote() end end
function fill(first, last) for i = first, last do box.space.t:replace{i, 'v' .. i} end end
"""

DUMP = r"""
local msgpack, digest = require('msgpack'), require('digest')
function dump()
    local lines = {}
    for _, space in box.space._space:pairs({}) do
        local is_ours = space[4] == 'memtx' and space[6].group_id ~= 1 and box.space[space[1]].index[0]
        if space[1] >= 280 and is_ours then
            for _, t in box.space[space[1]]:pairs() do
                table.insert(lines, space[3] .. ' ' .. digest.base64_encode(msgpack.encode(t), {nowrap=true}))
                if #lines % 1000 == 0 then require('fiber').sleep(0) end
            end
        end
    end
    return table.concat(lines, '\n')
end
"""

RECOVER = f"""
box.cfg{{log='recovered.log'}}
{DUMP}
local file = require('fio').open('dump.txt', {{'O_CREAT', 'O_WRONLY'}}, 420)
file:write(dump()) file:close()
for k, v in pairs(box.info.vclock) do if k > 0 then print(k, v) end end
os.exit(0)
"""


class RealServer:
    """A server in `directory`, on a port that it keeps across restarts."""

    def __init__(self, directory: Path, *, cfg: str = "", setup: str = SCHEMA, binary: str = "tarantool") -> None:
        self.directory = directory
        self.binary = binary
        self.port = real_tarantool.free_port()
        self.cfg = cfg
        self.setup = setup
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def uri(self) -> str:
        return f"replicator:secret@{self.address}"

    def start(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "server.lua").write_text(
            f"box.cfg{{listen='{self.address}', log='server.log', wal_mode='write', {self.cfg}}}\n"
            "box.schema.user.grant('guest', 'super', nil, nil, {if_not_exists=true})\n"
            f"{self.setup}\n{DUMP}\nprint('READY') io.stdout:flush()\n"
        )
        self.process = subprocess.Popen(
            [self.binary, "server.lua"], cwd=self.directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == b"READY":
                return self
        raise RuntimeError(f"tarantool did not start: {(self.directory / 'server.log').read_text()[-2000:]}")

    def kill(self) -> None:
        self._end("kill")

    def stop(self) -> None:
        self._end("terminate")

    def _end(self, how: str) -> None:
        process, self.process = self.process, None
        if process is not None:
            getattr(process, how)()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()

    def eval(self, script: str, *arguments: Any) -> Any:
        connection = tarantool.connect("127.0.0.1", self.port)
        try:
            return connection.eval(script, arguments).data
        finally:
            connection.close()

    def vclock(self) -> dict[int, int]:
        """Return its vclock without local rows."""
        (pairs,) = self.eval("local r = {} for k, v in pairs(box.info.vclock) do table.insert(r, {k, v}) end return r")
        return {key: lsn for key, lsn in pairs if key}

    def dump(self) -> str:
        """Return all tuples, one per line."""
        (text,) = self.eval("return dump()")
        return str(text)

    def recovered(self, directory: Path) -> tuple[str, dict[int, int], str]:
        """Let a server of its version recover the files of an archive; return all tuples, its vclock, its log.

        The server writes to that directory, so pass a copy.
        """
        (directory / "recover.lua").write_text(RECOVER)
        command = [self.binary, "recover.lua"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        pairs = (line.split() for line in done.stdout.splitlines() if line.strip())
        log = (directory / "recovered.log").read_text(errors="replace")
        return (directory / "dump.txt").read_text(), {int(key): int(lsn) for key, lsn in pairs}, log

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
