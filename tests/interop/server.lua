-- A member of a replica set under test. Its options are JSON in cfg.json; functions for the harness are in `interop`.
-- Says READY when box.cfg has returned. The first member lets guests do everything and makes the replicators.
local json = require('json')
local fio = require('fio')

interop = {}

local function statement(step)
    local kind, space = step[1], box.space[step[2]]
    if space == nil then box.error(box.error.NO_SUCH_SPACE, '#' .. step[2]) end
    if kind == 'insert' then return space:insert(step[3]) end
    if kind == 'replace' then return space:replace(step[3]) end
    if kind == 'update' then return space:update(step[3], step[4]) end
    if kind == 'upsert' then return space:upsert(step[3], step[4]) end
    if kind == 'delete' then return space:delete(step[3]) end
    error('no such step: ' .. kind)
end

function interop.transaction(steps)
    box.begin()
    for _, step in ipairs(steps) do
        local ok, err = pcall(statement, step)
        if not ok then box.rollback() box.error(err) end
    end
    local ok, err = pcall(box.commit)
    if not ok then box.rollback() box.error(err) end
end

-- box.schema.space.create, box.space.name:method
local function resolve(name)
    local path, method = name:match('^([^:]+):?(.*)$')
    local value = _G
    for part in path:gmatch('[^.]+') do value = value[part] end
    if method == '' then return value end
    return function(...) return value[method](value, ...) end
end

local function run(step)
    if step[1] == 'transaction' then return interop.transaction(step[2]) end
    if step[1] == 'call' then return resolve(step[2])(unpack(step[3], 1, table.maxn(step[3]))) end
    return statement(step)
end

-- Runs steps one after the other; what each was refused with, by its number.
function interop.run(steps)
    local refused = setmetatable({}, {__serialize = 'map'})
    for number, step in ipairs(steps) do
        local ok, err = pcall(run, step)
        if not ok then
            refused[number] = {type(err) == 'cdata' and err.code or 0, tostring(err)}
            box.rollback()
        end
    end
    return refused
end

function interop.info() return box.info() end
function interop.gc() return box.info.gc() end
function interop.cfg(options) box.cfg(options) end

-- Changes of these keys become NOPs from now on.
function interop.veto(space, divisor)
    box.space[space]:before_replace(function(old, new)
        local some = new or old
        if some ~= nil and some[1] % divisor == 0 then return old end
        return new
    end)
end

-- Changes fail from now on, with an error that only this server's owner knows.
function interop.refuse(space, reason)
    box.space[space]:before_replace(function() error(reason) end)
end

local function read(path)
    local file = fio.open(path, {'O_RDONLY'})
    local text = file:read()
    file:close()
    return text
end

local options = json.decode(read('cfg.json'))
box.cfg(options)
if box.info.id == 1 and not box.info.ro then
    local here = {if_not_exists = true}
    box.schema.user.create('replicator', {password = 'secret', if_not_exists = true})
    box.schema.user.grant('replicator', 'replication', nil, nil, here)
    box.schema.user.grant('guest', 'super', nil, nil, here)
end
print('READY') io.stdout:flush()
