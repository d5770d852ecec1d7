-- The module box: transactions, errors, sessions, and the built-in procedures of the node as functions.

local K = ...

local type, next, error, setmetatable, pcall, unpack = type, next, error, setmetatable, pcall, unpack
local select, rawget = select, rawget
local python, completed, raise, decode = K.python, K.completed, K.raise, K.decode

local function decode_results(count, buffer)
    local values, at = {}, 1
    for number = 1, count do
        values[number], at = decode(buffer, at)
    end
    return unpack(values, 1, count)
end

function K.call(name, ...)
    return decode_results(completed(python.call(name, K.pack_array(...))))
end
local call = K.call

-- A table of procedures: box.schema.space.create is the procedure of that name.
local function procedures(prefix, nested, others)
    others = others or {}
    for _, name in next, nested or {} do
        others[name] = procedures(prefix .. '.' .. name)
    end
    return setmetatable(others, {
        __metatable = false,
        __index = function(_, name)
            local full = prefix .. '.' .. K.tostring(name)
            if python.has_procedure(full) then
                return function(...) return call(full, ...) end
            end
        end,
    })
end

-- A table of values: box.info.status is a field of what the procedure box.info returns.
local function values(name, on_call)
    return setmetatable({}, {
        __metatable = false,
        __index = function(_, part)
            local value = call(name)[part]
            if part == 'gc' or part == 'memory' or part == 'sql' or part == 'vinyl' or part == 'replication_anon' then
                return function() return call(name .. '.' .. part) end
            end
            return value
        end,
        __call = on_call or function(_, ...) return call(name, ...) end,
        __serialize = function() return call(name) end,
    })
end

local box = {}
K.box = box
box.NULL = K.NULL
box.space = K.space
box.tuple = K.tuple_module

-- Transactions.

function box.begin(options) completed(python.begin(type(options) == 'table' and options.is_sync or false)) end
function box.commit() completed(python.commit()) end
function box.rollback() completed(python.rollback()) end
function box.is_in_txn() return (completed(python.is_in_transaction())) end
local savepoint_meta = {__metatable = false}
function box.savepoint() return setmetatable({number = completed(python.savepoint())}, savepoint_meta) end
function box.rollback_to_savepoint(savepoint) completed(python.rollback_to(savepoint.number)) end

local function finished(ok, ...)
    if not ok then
        if box.is_in_txn() then
            box.rollback()
        end
        error((...), 0)
    end
    box.commit()
    return ...
end

function box.atomic(first, ...)
    if type(first) == 'table' then
        box.begin(first)
        return finished(pcall(...))
    end
    box.begin()
    return finished(pcall(first, ...))
end

-- Errors.

local function error_from(code, ...)
    if type(code) == 'table' then
        return K.new_error(code.code or 0, code.reason or code.message or 'Unknown error', code.type or 'ClientError')
    elseif K.is_error(code) then
        return code
    elseif type(code) == 'number' then
        return K.new_error(code, python.error_text(code, K.pack_array(...)), 'ClientError')
    end
    error('Usage: box.error(code, reason) or box.error{code = code, reason = reason}', 3)
end

local errors = {
    new = function(...) return error_from(...) end,
    is = K.is_error,
    clear = function() end,
    last = function() return nil end,
}
for name, code in next, (decode(python.error_codes(), 1)) do
    errors[name] = code
end
box.error = setmetatable(errors, {__metatable = false, __call = function(_, ...)
    if select('#', ...) == 0 then
        return
    end
    error(error_from(...), 0)
end})

-- The rest: procedures of the node.

box.info = values('box.info')
box.cfg = values('box.cfg', function(_, options) return call('box.cfg', options) end)
box.stat = values('box.stat')
box.snapshot = function() return call('box.snapshot') end
box.broadcast = function(key, value) call('box.broadcast', key, value) end
box.ctl = procedures('box.ctl')
box.backup = procedures('box.backup')
box.schema = procedures('box.schema', {'index', 'sequence', 'func', 'user', 'role'}, {
    space = procedures('box.schema.space', nil, {
        create = function(name, options)
            call('box.schema.space.create', name, options)
            return box.space[name], 'created'
        end,
    }),
})
box.schema.create_space = box.schema.space.create

box.sequence = setmetatable({}, {__metatable = false, __index = function(_, name)
    local prefix = 'box.sequence.' .. K.tostring(name)
    if not python.has_procedure(prefix .. ':next') then
        return nil
    end
    return setmetatable({name = name}, {__metatable = false, __index = function(_, method)
        local full = prefix .. ':' .. K.tostring(method)
        if python.has_procedure(full) then
            return function(_, ...) return call(full, ...) end
        end
    end})
end})

box.session = procedures('box.session', nil, {
    push = function(value)
        completed(python.push(K.pack(value)))
        return true
    end,
    effective_user = function() return (completed(python.effective_user())) end,
    su = function(user, f, ...)
        local before = completed(python.su(user, f ~= nil))
        if f == nil then
            return
        end
        local function restored(ok, ...)
            completed(python.restore_user(before))
            if not ok then
                error((...), 0)
            end
            return ...
        end
        return restored(pcall(f, ...))
    end,
})

box.execute = function() raise(5, 'Flowstone does not support SQL: use box.space') end
