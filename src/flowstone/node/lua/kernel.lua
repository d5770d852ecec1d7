-- The kernel of the Lua runtime: tasks, limits, errors, and the functions that hostile code may see.
--
-- Every request runs in a coroutine of its own. A function that has to wait yields SYSTEM, and Python resumes the
-- coroutine with the result. The count hook stops a task that exceeds its slice or the memory limit. The hook does not
-- run inside C functions, nor inside error handlers and finalizers, so user code gets no such function that can take
-- long: patterns are in pattern.lua, xpcall calls its handler after the error, and newproxy does not exist.

local python = ...

local K = {python = python, modules = {}}

local create, resume, yield = coroutine.create, coroutine.resume, coroutine.yield
local running, status = coroutine.running, coroutine.status
local raw_error, pcall, raw_tostring, raw_type, raw_load = error, pcall, tostring, type, load
local select, setmetatable, rawget, unpack, sort = select, setmetatable, rawget, unpack, table.sort
local sethook, format, concat, next, ipairs = debug.sethook, string.format, table.concat, next, ipairs
local traceback, floor = debug.traceback, math.floor
local ffi = require('ffi')

jit.off()
jit.off(true, true)

local SYSTEM = {}
local HOOK_COUNT = 1000 -- instructions between two checks: with a full memory, each may collect all garbage
local DEPTH_MAX = 100 -- nested calls of C functions that call Lua: each takes up to 10 KiB of the C stack

-- Objects: cdata, as on a real server, whose content is in a table with weak keys.

local content = setmetatable({}, {__mode = 'k'})
K.content = content

function K.class(declaration, metatable)
    metatable.__metatable = false
    return ffi.metatype(declaration, metatable)
end

-- Errors of box.

local ERROR_TYPES = {[2] = 'OutOfMemory', [32] = 'LuajitError', [42] = 'AccessDeniedError', [115] = 'SystemError'}
local error_methods = {}
local error_class
error_class = K.class('struct { const uint8_t _error; }', {
    __index = function(self, name)
        local value = content[self][name]
        if value == nil then
            value = error_methods[name]
        end
        return value
    end,
    __tostring = function(self) return content[self].message end,
})

local function new_error(code, message, kind)
    local made = error_class()
    kind = kind or ERROR_TYPES[code] or 'ClientError'
    content[made] = {code = code, message = message, type = kind, base_type = kind, trace = {}}
    return made
end
K.new_error = new_error

local function is_error(value)
    return raw_type(value) == 'cdata' and ffi.istype(error_class, value)
end
K.is_error = is_error

function error_methods.unpack(self)
    local copy = {}
    for name, value in next, content[self] do
        copy[name] = value
    end
    return copy
end

function error_methods.raise(self)
    raw_error(self, 0)
end

local function raise(code, message)
    raw_error(new_error(code, message), 0)
end
K.raise = raise

-- The hook, which is one for all coroutines.

local is_killed = false
local exceeded = python.exceeded

local function hook()
    if running() == nil then
        return -- the kernel itself
    end
    if not is_killed then
        if not exceeded() then
            return
        end
        is_killed = true
        sethook(hook, '', 1)
    end
    raw_error(new_error(32, python.reason()), 0)
end

-- Nested calls of C functions.

local depth = 0

local function leave(ok, ...)
    depth = depth - 1
    if not ok then
        raw_error((...), 0)
    end
    return ...
end

local function guard(f)
    return function(...)
        if depth >= DEPTH_MAX then
            raw_error('C stack overflow', 2)
        end
        depth = depth + 1
        return leave(pcall(f, ...))
    end
end
K.guard = guard

local guarded_tostring = guard(raw_tostring)

local function tostring(value)
    local kind = raw_type(value)
    if kind == 'table' or kind == 'cdata' then
        return guarded_tostring(value)
    end
    return raw_tostring(value)
end
K.tostring = tostring

-- Waiting: for the log, for a timer, for another member.

local function settled(state, ...)
    if state == false then
        raise(...)
    end
    return ...
end

local function completed(state, ...)
    if state == nil then
        return settled(yield(SYSTEM))
    elseif state == false then
        raise(...)
    end
    return ...
end
K.completed = completed -- for results of Python functions: true and results, false and an error, or nil: wait

-- Protected calls. Their nesting is limited: the hook cannot run where the Lua stack is full, so a loop of protected calls
-- that overflow the stack would never be interrupted.

local PROTECTED_MAX = 150
local level = 0 -- of the coroutine that runs
local levels = setmetatable({}, {__mode = 'k'}) -- of suspended coroutines

local function left(ok, ...)
    level = level - 1
    return ok, ...
end

local function user_pcall(f, ...)
    if level >= PROTECTED_MAX then
        return false, 'C stack overflow'
    end
    level = level + 1
    return left(pcall(f, ...))
end

-- Coroutines of user code: a wait inside them suspends the whole task.

local function resumed(co, before, ok, first, ...)
    levels[co] = level
    level = before
    if ok and first == SYSTEM then
        depth = depth - 1
        local results = {yield(SYSTEM)}
        depth = depth + 1
        before, level = level, levels[co]
        return resumed(co, before, resume(co, unpack(results)))
    end
    depth = depth - 1
    return ok, first, ...
end

local function user_resume(co, ...)
    if depth >= DEPTH_MAX then
        return false, 'C stack overflow'
    end
    depth = depth + 1
    local before = level
    level = levels[co] or 0
    return resumed(co, before, resume(co, ...))
end

local function unwrapped(ok, ...)
    if not ok then
        raw_error((...), 0)
    end
    return ...
end

local coroutines = {
    create = create, resume = user_resume, yield = yield, status = status, running = running,
    wrap = function(f)
        local co = create(f)
        return function(...) return unwrapped(user_resume(co, ...)) end
    end,
}

-- Tasks.

local tasks = {}

local function describe(problem)
    if is_error(problem) then
        local found = content[problem]
        return found.code, found.message, found.type
    end
    local kind = raw_type(problem)
    if kind == 'string' or kind == 'number' then
        return 32, raw_tostring(problem)
    elseif kind == 'table' or kind == 'cdata' then
        local ok, text = pcall(raw_tostring, problem)
        return 32, ok and text or 'Unknown error'
    end
    return 32, kind == 'nil' and 'nil' or raw_tostring(problem)
end

local function step(id, co, ok, first, second, third)
    if ok and status(co) ~= 'dead' then
        if first == SYSTEM then
            tasks[id], levels[co] = co, level
            return 2
        end
        return 1, 32, 'attempt to yield across C-call boundary'
    elseif ok then
        return 0, first, second
    end
    return 1, first, second, third
end

local function main(f, arguments)
    return f(arguments)
end

local function report(ok, ...)
    if ok then
        return ...
    end
    return nil, describe((...))
end

local function protected(f, arguments)
    return report(pcall(main, f, arguments))
end

local function entered(id, co, ok, first, ...)
    if ok and status(co) == 'dead' and first == nil then
        return 1, ... -- `report` has described the error, inside the limits of the task
    elseif not ok then
        return 1, 32, raw_type(first) == 'string' and first or python.reason()
    end
    return step(id, co, ok, first, ...)
end

local function begin(initial)
    depth, level = 0, initial
    is_killed = false
    sethook(hook, '', HOOK_COUNT)
end

function K.start(id, f, arguments)
    begin(0)
    local co = create(protected)
    return entered(id, co, resume(co, f, arguments))
end

function K.resume(id, ...)
    local co = tasks[id]
    tasks[id] = nil
    begin(levels[co])
    return entered(id, co, resume(co, ...))
end

function K.drop(id)
    tasks[id] = nil
end

-- What user code sees. Every environment has its own copies of the libraries.

local function copy(source, names)
    local made = {}
    if names then
        for _, name in ipairs(names) do
            made[name] = source[name]
        end
    else
        for name, value in next, source do
            made[name] = value
        end
    end
    return made
end
K.copy = copy

local function handled(handler, ok, ...)
    if ok then
        return true, ...
    end
    return false, handler((...))
end

local function xpcall(f, handler, ...)
    return handled(handler, user_pcall(f, ...))
end

local getmetatable_of = debug.getmetatable

local function meta_of(value, event)
    if raw_type(value) == 'table' then
        local metatable = getmetatable_of(value)
        return metatable and rawget(metatable, event)
    elseif raw_type(value) == 'cdata' and K.tuple_meta and K.is_tuple(value) then
        return K.tuple_meta[event]
    end
end

local raw_ipairs = ipairs

local function user_pairs(value)
    local iterate = meta_of(value, '__pairs')
    if iterate then
        return iterate(value)
    end
    if raw_type(value) ~= 'table' then
        raw_error("bad argument #1 to 'pairs' (table expected, got " .. raw_type(value) .. ')', 2)
    end
    return next, value, nil
end

local function user_ipairs(value)
    local iterate = meta_of(value, '__ipairs')
    if iterate then
        return iterate(value)
    end
    return raw_ipairs(value)
end

local function user_load(chunk, name, _, environment, default)
    if raw_type(chunk) == 'function' then
        local pieces = {}
        while true do
            local piece = chunk()
            if piece == nil or piece == '' then
                break
            end
            pieces[#pieces + 1] = piece
        end
        chunk = concat(pieces)
    end
    if raw_type(chunk) ~= 'string' then
        raw_error("bad argument #1 to 'load' (string expected, got " .. raw_type(chunk) .. ')', 2)
    end
    if #chunk > 1048576 then
        return nil, 'chunk is too large'
    end
    return raw_load(chunk, name or chunk, 't', environment or default)
end

K.string = copy(string, {'byte', 'char', 'len', 'lower', 'upper', 'reverse', 'sub'})
K.string.format = guard(format)
local rep = string.rep
function K.string.rep(s, n, separator)
    if (#s + #(separator or '')) * n > 67108864 then
        raw_error('not enough memory', 2)
    end
    return rep(s, n, separator)
end

K.table = copy(table, {'concat', 'insert', 'maxn', 'remove'})
K.table.sort = guard(sort)
function K.table.copy(source)
    return copy(source)
end
local function deepcopy(value, seen)
    if raw_type(value) ~= 'table' then
        return value
    elseif seen[value] then
        return seen[value]
    end
    local made = {}
    seen[value] = made
    for key, item in next, value do
        made[deepcopy(key, seen)] = deepcopy(item, seen)
    end
    return setmetatable(made, getmetatable_of(value))
end
function K.table.deepcopy(value)
    return deepcopy(value, {})
end

K.base = {
    assert = assert, error = raw_error, ipairs = user_ipairs, next = next, pairs = user_pairs, pcall = user_pcall,
    select = select, tonumber = tonumber, tostring = tostring, type = raw_type, unpack = unpack, xpcall = xpcall,
    print = function(...)
        local parts = {}
        for number = 1, select('#', ...) do
            parts[number] = tostring((select(number, ...)))
        end
        python.log('INFO', concat(parts, '\t'))
    end,
}

local function environment_of_sandbox()
    local environment = copy(K.base)
    environment.math = copy(math)
    environment.string = copy(K.string)
    environment.table = copy(K.table)
    environment.utf8 = K.modules.utf8 and copy(K.modules.utf8)
    return environment
end

local globals = copy(K.base)
K.globals = globals

function K.open()
    globals._G = globals
    globals._VERSION = _VERSION
    globals.math = copy(math)
    globals.bit = copy(bit)
    globals.string = copy(K.string)
    globals.table = copy(K.table)
    globals.coroutine = coroutines
    globals.os = copy(os, {'clock', 'date', 'difftime', 'time'})
    globals.debug = {traceback = traceback}
    globals.rawget, globals.rawset, globals.rawequal = rawget, rawset, rawequal
    globals.setmetatable = setmetatable
    globals.getmetatable = getmetatable
    globals.collectgarbage = function(what)
        return what == 'count' and collectgarbage('count') or 0
    end
    globals.load = function(chunk, name, mode, environment)
        return user_load(chunk, name, mode, environment, globals)
    end
    globals.loadstring = function(chunk, name) return user_load(chunk, name, 't', nil, globals) end
    globals.require = function(name)
        local module = K.modules[name]
        if module == nil then
            raw_error("module '" .. tostring(name) .. "' not found: files are not loaded, and only the built-in modules"
                .. ' that docs/reference/lua.md names exist', 2)
        end
        return module
    end
    globals.box = K.box
    globals.tonumber64, globals.utf8 = K.modules.tonumber64, K.modules.utf8
    local methods = copy(K.string)
    local of_strings = debug.getmetatable('')
    of_strings.__index = methods
    of_strings.__metatable = false
    -- The libraries are gone even for code that finds the environment of the kernel.
    for _, name in ipairs({'io', 'os', 'package', 'require', 'debug', 'dofile', 'loadfile', 'newproxy', 'jit',
        'getfenv', 'setfenv', 'python', 'load', 'loadstring', 'module', 'ffi'}) do
        _G[name] = nil
    end
end

-- Functions that requests run: of EVAL, of `_func`, and global ones.

local decode_array, encode_results

function K.use(codec)
    decode_array, encode_results = codec.decode_array, codec.encode_results
end

local function results_of(ok, ...)
    if not ok then
        raw_error((...), 0)
    end
    return encode_results(...)
end

-- The caller of user code is a C function, as on a real server: error() after a tail call has no position to add.
local function runner(f)
    return function(arguments) return results_of(pcall(f, decode_array(arguments))) end
end

function K.eval(expression)
    local chunk, problem = raw_load(expression, '=eval', 't', globals)
    if chunk == nil then
        return nil, problem
    end
    return runner(chunk)
end

function K.compile(body, is_sandboxed)
    local environment = is_sandboxed and environment_of_sandbox() or globals
    local text = 'return ' .. body
    local chunk, problem = raw_load(text, text, 't', environment)
    if chunk == nil then
        return nil, problem
    end
    return function(arguments)
        -- The body may be any expression: it is evaluated inside the limits of the request.
        local f = chunk()
        if raw_type(f) ~= 'function' then
            raise(99, 'given body doesn\'t define a function')
        end
        return results_of(pcall(f, decode_array(arguments)))
    end
end

function K.find(name)
    local found, object = globals, nil
    for part, separator in name:gmatch('([^.:]+)([.:]?)') do
        if raw_type(found) ~= 'table' then
            return nil
        end
        object = separator == '' and object or nil
        local value = rawget(found, part)
        if separator == ':' then
            object = value
        end
        found = value
    end
    if raw_type(found) ~= 'function' then
        return nil
    end
    if object ~= nil then
        local method = found
        found = function(...) return method(object, ...) end
    end
    return runner(found)
end

return K
