"""A real server that makes every change a log can express and records its data at some moments; a server started from
files.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.node.archived_server import DUMP, SCHEMA

HELD = (
    DUMP
    + r"""
-- All tuples, and what sequences stand at: numbers that inserts have taken are in no tuple of _sequence_data.
function held()
    local lines = {}
    for line in dump():gmatch('[^\n]+') do
        if not line:match('^_sequence_data ') then table.insert(lines, line) end
    end
    for _, row in box.space._sequence:pairs() do
        local is_started, value = pcall(function() return box.sequence[row[3]]:current() end)
        table.insert(lines, 'sequence ' .. row[3] .. ' ' .. tostring(is_started and value))
    end
    return table.concat(lines, '\n')
end
"""
)

START = (
    "box.cfg{log='started.log'}\n"
    + HELD
    + r"""
local file = require('fio').open('held.txt', {'O_CREAT', 'O_WRONLY'}, 420)
file:write(held()) file:close()
print(box.info.vclock[1], box.info.uuid, (box.info.replicaset or box.info.cluster).uuid)
-- It is one to go on with. Whose queue of synchronous transactions it is, is known; who starts again has to say so.
if box.ctl.promote then box.ctl.promote() end
box.space.plain:replace{1000000, 'after'}
box.snapshot()
os.exit(0)
"""
)

WORKLOAD = (
    SCHEMA
    + HELD
    + r"""
moments = {}
local fiber = require('fiber')
local r = math.random

local function format(second, third)
    return {{'id', 'unsigned'}, {second, 'string'}, {third, 'integer', is_nullable=true}}
end

function prepare()
    claim()
    local plain = box.schema.space.create('plain', {format=format('name', 'n')})
    plain:create_index('pk') plain:create_index('by_name', {parts={2, 'string'}})
    box.schema.space.create('words'):create_index('pk', {parts={{2, 'string', collation='unicode_ci'}}})
    box.schema.space.create('mixed'):create_index('pk', {parts={1, 'scalar', 3, 'number'}})
    box.schema.space.create('moving'):create_index('pk', {parts={1, 'unsigned'}})
    box.schema.space.create('numbered'):create_index('pk', {sequence=true})
    box.schema.sequence.create('free')
    box.schema.space.create('agreed', {is_sync=true}):create_index('pk')
    box.schema.space.create('local', {is_local=true}):create_index('pk')
end

local function name() return 'n' .. r(1e9) end
local function any() local all = {r(50), r(50) + 0.5, 'w' .. r(50), r(2) == 1, -r(50)} return all[r(#all)] end

local parts = {{1, 'unsigned'}, {2, 'string'}, {1, 'number', 2, 'string'}}
local key_of = {
    function(t) return {t[1]} end, function(t) return {t[2]} end, function(t) return {t[1], t[2]} end
}
local moving = 1

local function row(s) local t = s.index[0]:random(r(2^31)) return t end

local statements = {
    function() box.space.plain:replace{r(300), name(), r(100)} end,
    function() box.space.plain:insert{r(3000), name()} end,
    function() box.space.plain:update(r(300), {{'+', 3, r(9)}, {'=', 2, name()}}) end,
    function() box.space.plain:update(r(300), {{'=', box.space.plain:format()[2].name, name()}}) end,
    function() box.space.plain:update(r(300), {{':', 2, 1, 1, 'zz'}, {'!', -1, r(5)}}) end,
    function() box.space.plain:update(r(300), {{'#', 4, 1}}) end,
    function() box.space.plain:upsert({r(400), name(), 1}, {{'+', 3, 1}, {'=', 9, 'ignored'}, {'|', 3, 8}}) end,
    function() box.space.plain:delete(r(300)) end,
    function() local t = row(box.space.plain) box.space.plain.index.by_name:delete(t[2]) end,
    function() local t = row(box.space.plain) box.space.plain.index.by_name:update(t[2], {{'=', 3, -1}}) end,
    function() box.space.plain.index.by_name:delete('nobody') end,
    function() box.space.words:replace{r(100), ({'Straße', 'STRASSE', 'ä', 'Ä', 'b' .. r(40)})[r(5)], {a={r(9)}}} end,
    function() local t = row(box.space.words) box.space.words:update(t[2], {{'=', '[3].a[1]', r(9)}}) end,
    function() box.space.words:delete('B' .. r(40)) end,
    function() box.space.mixed:replace{any(), name(), ({r(9), r(9) + 0.25})[r(2)]} end,
    function() local t = row(box.space.mixed) box.space.mixed:upsert(t, {{'=', 2, 'upserted'}, {'=', 1, 'key'}}) end,
    function() local t = row(box.space.mixed) box.space.mixed:delete{t[1], t[3]} end,
    function() box.space.moving:replace{r(1e6), name(), 0} end,
    function() local t = row(box.space.moving) box.space.moving:update(key_of[moving](t), {{'+', 3, 1}}) end,
    function() local t = row(box.space.moving) box.space.moving:delete(key_of[moving](t)) end,
    function() box.space['local']:replace{r(10)} end,
}

-- Numbers stay taken where a transaction is rolled back, and no log tells: only what stands by itself takes some.
local numbering = {
    function() box.space.numbered:insert{box.NULL, name()} end,
    function() box.space.numbered:replace{r(2000), name()} end,
    function() box.space.numbered:delete(r(2000)) end,
    function() box.sequence.free:next() end,
}

local rare = {
    function() box.space.words:truncate() end,
    function() local t = box.space.temporary if t then t:drop() end end,
    function()
        local t = box.schema.space.create('temporary', {id=900})
        t:create_index('pk', {parts=({{1, 'unsigned'}, {2, 'string'}})[r(2)]})
        for i = 1, 5 do t:insert{i, 'x' .. i} end
    end,
    function() box.space.temporary:replace{r(9), 'y' .. r(9)} end,
    function() box.space.plain:format(format('title', 'name')) end,
    function() box.space.plain:format(format('name', 'title')) end,
    function()
        local number = r(3)
        box.space.moving.index.pk:alter{parts=parts[number]}
        moving = number
    end,
    function() box.sequence.free:set(r(100)) end,
    function() box.sequence.numbered_seq:set(box.sequence.numbered_seq:current() + r(100)) end,
    function() box.sequence.free:reset() end,
    function() box.schema.user.create('user' .. r(1e6), {password='x'}) end,
    function() box.space.mixed:rename('mixed') end,
    function()
        local f = box.space.moving
        local extra = f.index.extra
        if extra then extra:drop() else f:create_index('extra', {parts={1, 'unsigned'}, unique=false}) end
    end,
}

-- 2.6.0 does not start from a snapshot, not even its own, that has tuples of a synchronous space: there it stays empty.
local function agreed(text)
    box.begin()
    if box.ctl.promote then box.space.agreed:replace{r(50), text} else box.space.agreed:delete(r(50)) end
    box.space.plain:replace{r(300), text .. name(), 7}
    box.commit()
end

local function agree()
    if r(3) > 1 then
        pcall(agreed, 'agreed') -- a busy machine may be late
        box.rollback()
        return
    end
    -- Too few acknowledge (2.6.0 counts an archive, too): it is rolled back, with what came behind it.
    box.cfg{replication_synchro_quorum=3, replication_synchro_timeout=0.01}
    local behind = fiber.new(function()
        fiber.sleep(0.002)
        -- 2.6.0 rolls back what is behind without a word about it in the log.
        if box.ctl.promote then pcall(box.space.plain.insert, box.space.plain, {r(3000), name()}) end
    end)
    behind:set_joinable(true)
    pcall(agreed, 'withdrawn')
    behind:join()
    box.rollback()
    box.cfg{replication_synchro_quorum=1, replication_synchro_timeout=5}
end

function work(seed, count, every)
    math.randomseed(seed)
    for i = 1, count do
        local dice = r(100)
        if dice <= 10 then
            pcall(numbering[r(#numbering)])
        elseif dice <= 60 then
            pcall(statements[r(#statements)])
        elseif dice <= 90 then
            box.begin()
            for j = 1, r(6) do pcall(statements[r(#statements)]) end
            if r(5) > 1 then box.commit() else box.rollback() end
        elseif dice <= 96 then
            pcall(rare[r(#rare)])
        else
            agree()
        end
        if i % 50 == 0 then fiber.sleep(0) end
        if r(every) == 1 then moments[box.info.lsn] = held() end
    end
end
"""
)


def held_by_server_from(directory: Path, binary: str) -> tuple[list[str], int, str, str]:
    """Return the data of a server started from a copy of these files, sorted; its LSN, and the UUIDs of the server and
    its set.
    """
    copy = directory.with_name(directory.name + "-started")
    shutil.copytree(directory, copy)
    (copy / "start.lua").write_text(START)
    done = subprocess.run([binary, "start.lua"], cwd=copy, capture_output=True, text=True, timeout=300, check=False)
    log = (copy / "started.log").read_text(errors="replace") if (copy / "started.log").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log[-2000:]
    assert " E>" not in log
    lsn, uuid, cluster = done.stdout.split()
    return (
        sorted((copy / "held.txt").read_text().splitlines()),
        int(lsn.partition("U")[0].partition("L")[0]),
        uuid,
        cluster,
    )
