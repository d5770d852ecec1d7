"""A real server as the judge: it boots a copy of a directory and reports its data, or why it did not start."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgpack

from tests.judges.files import list_files
from tests.judges.recovery import JUDGED, Verdict, frozen, recovered

DUMP = """
local ok, problem = pcall(box.cfg, {log='judge.log', memtx_memory=256*1024*1024, wal_mode='none', CFG})
if not ok then io.stderr:write('refused: ' .. tostring(problem)) os.exit(3) end
local msgpack, found = require('msgpack'), {}
for _, space in box.space._space:pairs() do
    if space.id >= 512 or space.id == 272 or space.id == 280 or space.id == 320 then
        local tuples = setmetatable({}, {__serialize='array'})
        if box.space[space.id].index[0] ~= nil then
            for _, tuple in box.space[space.id]:pairs() do
                table.insert(tuples, (msgpack.encode(tuple):hex()))
            end
        end
        found[tostring(space.id)] = tuples
    end
end
local vclock = {}
for id, lsn in pairs(box.info.vclock) do vclock[tostring(id)] = tonumber(lsn) end
local queue = box.info.synchro and box.info.synchro.queue or {owner=0, len=0}
io.stdout:write(require('json').encode({data=found, vclock=vclock, owner=queue.owner or 0, len=queue.len}))
io.stdout:flush()
os.exit(0)
"""
assert set(JUDGED) == {272, 280, 320}


def booted(binary: str, directory: Path, copy: Path, *, newest: str | None = None) -> Verdict:
    """Return the data of the server `binary` after recovery from a copy of `directory`, made at `copy`.

    The copy has no snapshots after the one named `newest`.
    """
    copy.mkdir(parents=True)
    cfg = ""
    for path in directory.iterdir():
        is_left_out = path.suffix == ".snap" and newest is not None and path.name > newest
        if path.suffix in (".snap", ".xlog") and not is_left_out:
            shutil.copy(path, copy / path.name)
    expected = recovered(directory)
    members = {values[1].decode() for values in expected.rows.get(320, ())}
    if expected.refusal is None and instance_uuid(directory) not in members:
        # Otherwise 3.8 exits after recovery if it has no id, as with archives of anonymous replicas.
        cfg += ", replication_anon=true, read_only=true"
    (copy / "dump.lua").write_text(DUMP.replace("CFG", cfg))
    done = subprocess.run([binary, "dump.lua"], cwd=copy, capture_output=True, timeout=120, check=False)
    if done.returncode:
        log = (copy / "judge.log").read_text(errors="replace") if (copy / "judge.log").exists() else ""
        fatal = [line for line in log.splitlines() if " F> " in line or " E> " in line]
        return Verdict((done.stderr.decode(errors="replace") + "; " + "; ".join(fatal[-4:])).strip())
    told = json.loads(done.stdout)
    rows = {
        int(number): frozenset(
            frozen(msgpack.unpackb(bytes.fromhex(each), raw=True, strict_map_key=False)) for each in tuples
        )
        for number, tuples in told["data"].items()
    }
    vclock = {int(number): lsn for number, lsn in dict(told["vclock"]).items() if lsn}
    return Verdict(None, rows, vclock, told["owner"], told["len"])


def instance_uuid(directory: Path) -> str:
    """Return the UUID in the header of the newest snapshot."""
    return list_files(directory)[0][-1].instance_uuid
