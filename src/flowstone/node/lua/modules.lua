-- The modules that `require` knows: json, msgpack, yaml, decimal, uuid, datetime, digest, clock, log, fiber, fun, string.

local K = ...

local type, next, error, setmetatable, select, unpack = type, next, error, setmetatable, select, unpack
local rawget, getmetatable, concat, floor = rawget, debug.getmetatable, table.concat, math.floor
local python, completed, content = K.python, K.completed, K.content
local ffi = require('ffi')
local istype = ffi.istype
local modules = K.modules

-- Values of extensions: decimal, uuid, datetime, and others, whose bytes are kept.

local function text_of(value)
    local found = content[value]
    if found.text == nil then
        found.text = completed(python.extension_text(found.code, found.data))
    end
    return found.text
end

local function extension_class(code, kind, metatable)
    metatable.__tostring = metatable.__tostring or text_of
    local class = K.class('struct { const uint8_t _' .. kind .. '; }', metatable)
    K.extension(code, kind, class)
    return class
end

local function is_a(class)
    return function(value) return type(value) == 'cdata' and istype(class, value) end
end

local function data_of(value)
    return content[value].data
end

local decimal_methods = {}
local decimal_meta = {__index = function(_, name) return decimal_methods[name] end}
local decimal_class
local function decimal(value)
    if type(value) == 'cdata' and istype(decimal_class, value) then
        return value
    end
    local text = type(value) == 'number' and ('%.17g'):format(value) or K.tostring(value):gsub('[UL]+$', '')
    if type(value) == 'number' and tonumber(('%.14g'):format(value)) == value then
        text = ('%.14g'):format(value)
    end
    return K.new_extension(1, completed(python.decimal_of(text)))
end
local function decimal_operation(name)
    return function(one, other)
        if type(other) == 'nil' then -- not ==, which is an operator of decimals, too
            other = one
        end
        return K.new_extension(1, completed(python.decimal_operation(name, data_of(decimal(one)),
            data_of(decimal(other)))))
    end
end
local function compared(test)
    return function(one, other)
        return test(completed(python.decimal_compare(data_of(decimal(one)), data_of(decimal(other)))))
    end
end
decimal_meta.__add, decimal_meta.__sub = decimal_operation('add'), decimal_operation('sub')
decimal_meta.__mul, decimal_meta.__div = decimal_operation('mul'), decimal_operation('div')
decimal_meta.__mod, decimal_meta.__pow = decimal_operation('mod'), decimal_operation('pow')
decimal_meta.__unm = decimal_operation('neg')
decimal_meta.__lt = compared(function(order) return order < 0 end)
decimal_meta.__le = compared(function(order) return order <= 0 end)
decimal_meta.__eq = function(one, other)
    for _, value in next, {type(one), type(other)} do
        if value ~= 'cdata' and value ~= 'number' then
            return false
        end
    end
    if not (modules.decimal.is_decimal(one) and modules.decimal.is_decimal(other)) then
        return false
    end
    return completed(python.decimal_compare(data_of(decimal(one)), data_of(decimal(other)))) == 0
end
decimal_class = extension_class(1, 'decimal', decimal_meta)
modules.decimal = {new = decimal, is_decimal = is_a(decimal_class), abs = decimal_operation('abs')}
function decimal_methods.tonumber(value) return tonumber(text_of(value)) end

local uuid_methods = {}
local uuid_class
local function uuid_text(value) return text_of(value) end
local uuid_meta = {
    __index = function(_, name) return uuid_methods[name] end,
    __eq = function(one, other)
        return type(one) == 'cdata' and type(other) == 'cdata' and istype(uuid_class, one) and istype(uuid_class, other)
            and data_of(one) == data_of(other)
    end,
    __tostring = uuid_text,
}
uuid_class = extension_class(2, 'uuid', uuid_meta)
function uuid_methods.str(value) return uuid_text(value) end
function uuid_methods.bin(value) return data_of(value) end
function uuid_methods.isnil(value) return data_of(value) == ('\0'):rep(16) end
local function new_uuid() return K.new_extension(2, completed(python.random_uuid())) end
modules.uuid = setmetatable({
    new = new_uuid,
    str = function() return uuid_text(new_uuid()) end,
    bin = function() return data_of(new_uuid()) end,
    fromstr = function(text)
        local data = python.uuid_of(K.tostring(text))
        return data and K.new_extension(2, data) or nil
    end,
    frombin = function(data) return #data == 16 and K.new_extension(2, data) or nil end,
    is_uuid = is_a(uuid_class),
    NULL = K.new_extension(2, ('\0'):rep(16)),
}, {__call = new_uuid, __metatable = false})

local datetime_meta = {
    __index = function(value, name)
        local parts = K.decode(completed(python.datetime_parts(data_of(value))), 1)
        if name == 'format' then
            return function() return text_of(value) end
        elseif name == 'totable' then
            return function() return parts end
        end
        return parts[name]
    end,
    __lt = function(one, other) return one.timestamp < other.timestamp end,
    __le = function(one, other) return one.timestamp <= other.timestamp end,
    __eq = function(one, other)
        return type(one) == 'cdata' and type(other) == 'cdata' and one.timestamp == other.timestamp
    end,
}
local datetime_class = extension_class(4, 'datetime', datetime_meta)
modules.datetime = {
    new = function(parts) return K.new_extension(4, completed(python.datetime_of(K.pack(parts or {})))) end,
    now = function() return K.new_extension(4, completed(python.datetime_now())) end,
    parse = function(text) return K.new_extension(4, completed(python.datetime_parse(text))) end,
    is_datetime = is_a(datetime_class),
}

extension_class('other', 'extension', {})

-- Text forms.

local function codec(name)
    return {
        encode = function(value) return (completed(python.encode(name, K.pack(value)))) end,
        decode = function(text)
            if type(text) ~= 'string' then
                error('bad argument #1 to \'decode\' (string expected, got ' .. type(text) .. ')', 2)
            end
            return (K.decode(completed(python.decode(name, text)), 1))
        end,
        NULL = K.NULL,
        array_mt = K.array_meta,
        map_mt = K.map_meta,
    }
end
modules.json = codec('json')
modules.json.new, modules.json.cfg = function() return codec('json') end, function() end
modules.yaml = codec('yaml')
modules.msgpack = {
    NULL = K.NULL, array_mt = K.array_meta, map_mt = K.map_meta,
    encode = function(value) return K.pack(value) end,
    decode = function(text, at)
        local size = completed(python.size_of_value(text, at or 1))
        return (K.decode(text, at or 1)), (at or 1) + size
    end,
}
modules.msgpackffi = modules.msgpack

function K.to_text(tuple)
    return (completed(python.encode('flow', K.raw_of(tuple))))
end

-- digest, clock, log.

modules.digest = {}
for _, name in next, {'md5', 'sha1', 'sha224', 'sha256', 'sha384', 'sha512'} do
    local bare = name == 'md5' and name or name
    modules.digest[bare] = function(text) return (completed(python.digest(name, text))) end
    modules.digest[bare .. '_hex'] = function(text) return (completed(python.hex_digest(name, text))) end
end
modules.digest.base64_encode = function(text) return (completed(python.base64(text))) end
modules.digest.base64_decode = function(text) return (completed(python.from_base64(text))) end
modules.digest.crc32 = function(text) return (completed(python.crc32c(text))) end
modules.digest.urandom = function(size) return (completed(python.random_bytes(size))) end

local function nanoseconds(f) return function() return ffi.cast('uint64_t', floor(f() * 1e6)) * 1000ULL end end
modules.clock = {
    time = python.wall, realtime = python.wall, monotonic = python.monotonic, proc = python.monotonic,
    thread = python.monotonic, time64 = nanoseconds(python.wall), realtime64 = nanoseconds(python.wall),
    monotonic64 = nanoseconds(python.monotonic),
    bench = function(f, ...)
        local before = python.monotonic()
        local results = {f(...)}
        return {python.monotonic() - before, unpack(results)}
    end,
}

modules.log = {}
for name, level in next, {error = 'ERROR', warn = 'WARNING', info = 'INFO', verbose = 'INFO', debug = 'DEBUG'} do
    modules.log[name] = function(text, ...)
        if type(text) == 'table' then
            text = modules.json.encode(text)
        elseif select('#', ...) > 0 then
            text = K.string.format(text, ...)
        end
        python.log(level, K.tostring(text))
    end
end

-- fiber

local fiber_methods = {}
local fiber_meta = {__index = fiber_methods, __metatable = false}
function fiber_methods.id(self) return self.number end
function fiber_methods.name(self, name)
    if name == nil then
        return self.called
    end
    self.called = name
end
function fiber_methods.status() return 'running' end
local function self_fiber()
    return setmetatable({number = python.task_id(), called = 'iproto', storage = {}}, fiber_meta)
end
modules.fiber = {
    sleep = function(seconds) completed(python.sleep(seconds)) end,
    yield = function() completed(python.sleep(0)) end,
    self = self_fiber,
    id = function() return python.task_id() end,
    name = function() return 'iproto' end,
    status = function() return 'running' end,
    testcancel = function() end,
    time = python.wall, clock = python.monotonic,
    time64 = function() return ffi.cast('uint64_t', floor(python.wall() * 1e6)) end,
    clock64 = function() return ffi.cast('uint64_t', floor(python.monotonic() * 1e6)) end,
    create = function() error('fiber.create() is not supported: a request has one fiber', 2) end,
}
modules.fiber.new = modules.fiber.create

-- fun: lazy iterators.

local iterator_methods = {}
local iterator_meta = {__index = iterator_methods, __metatable = false}
iterator_meta.__call = function(self, param, state) return self.gen(param, state) end
-- Of spaces: without the look-up, which costs a tenth of a loop over tuples.
K.cursor_meta = {__index = iterator_methods, __metatable = false}
local next_tuple = K.next_tuple
K.cursor_meta.__call = function(_, cursor, number) return next_tuple(cursor, number) end

function K.iterator(gen, param, state)
    return setmetatable({gen = gen, param = param, state = state}, iterator_meta), param, state
end
local iterator = K.iterator

local function indexed(list, number)
    number = number + 1
    if number > #list then
        return nil
    end
    return number, list[number]
end
local function keyed(map, key)
    local following, value = next(map, key)
    if following == nil then
        return nil
    end
    return following, following, value
end
local function of_value(value, param, state)
    if type(value) == 'table' then
        if getmetatable(value) == iterator_meta or getmetatable(value) == K.cursor_meta then
            return value.gen, value.param, value.state
        elseif #value > 0 or next(value) == nil then
            return indexed, value, 0
        end
        return keyed, value, nil
    elseif type(value) == 'function' then
        return value, param, state
    elseif type(value) == 'string' then
        return function(text, at)
            at = at + 1
            if at <= #text then
                return at, text:sub(at, at)
            end
        end, value, 0
    elseif K.is_tuple(value) then
        return value:pairs()
    end
    error('object ' .. K.tostring(value) .. ' of type "' .. type(value) .. '" is not iterable', 3)
end

local function lazily(step)
    -- `step(following, ...)` returns a state and values; `following` advances the source.
    return function(self, ...)
        return (iterator(step(self.gen, self.param, ...), nil, self.state))
    end
end

local function mapped(f, state, ...)
    if state ~= nil then
        return state, f(...)
    end
end
iterator_methods.map = lazily(function(gen, param, f)
    return function(_, state) return mapped(f, gen(param, state)) end
end)
iterator_methods.filter = lazily(function(gen, param, f)
    return function(_, state)
        while true do
            local results = {gen(param, state)}
            state = results[1]
            if state == nil then
                return nil
            elseif f(unpack(results, 2)) then
                return unpack(results)
            end
        end
    end
end)
iterator_methods.take_while = lazily(function(gen, param, f)
    return function(_, state)
        local results = {gen(param, state)}
        if results[1] ~= nil and f(unpack(results, 2)) then
            return unpack(results)
        end
    end
end)
function iterator_methods.take_n(self, count)
    local gen, param = self.gen, self.param
    return (iterator(function(_, state)
        if state[1] >= count then
            return nil
        end
        local results = {gen(param, state[2])}
        if results[1] == nil then
            return nil
        end
        return {state[1] + 1, results[1]}, unpack(results, 2)
    end, nil, {0, self.state}))
end
function iterator_methods.take(self, what)
    return type(what) == 'number' and self:take_n(what) or self:take_while(what)
end
function iterator_methods.drop_n(self, count)
    local state = self.state
    for _ = 1, count do
        local following = self.gen(self.param, state)
        if following == nil then
            return (iterator(function() return nil end, nil, nil))
        end
        state = following
    end
    return (iterator(self.gen, self.param, state))
end
iterator_methods.drop = iterator_methods.drop_n
iterator_methods.head = function(self) return (select(2, self.gen(self.param, self.state))) end
iterator_methods.nth = function(self, number) return self:drop_n(number - 1):head() end
function iterator_methods.each(self, f)
    local state = self.state
    local function visit(following, ...)
        if following ~= nil then
            f(...)
        end
        return following
    end
    repeat
        state = visit(self.gen(self.param, state))
    until state == nil
end
iterator_methods.for_each = iterator_methods.each
function iterator_methods.reduce(self, f, start)
    local result = start
    self:each(function(...) result = f(result, ...) end)
    return result
end
iterator_methods.foldl = function(self, f, start) return self:reduce(f, start) end
function iterator_methods.totable(self)
    local list = {}
    self:each(function(value) list[#list + 1] = value end)
    return list
end
function iterator_methods.tomap(self)
    local map = {}
    self:each(function(key, value) map[key] = value end)
    return map
end
function iterator_methods.length(self) return self:reduce(function(count) return count + 1 end, 0) end
function iterator_methods.sum(self) return self:reduce(function(total, value) return total + value end, 0) end
function iterator_methods.any(self, f) return self:filter(f):head() ~= nil end
function iterator_methods.all(self, f) return not self:any(function(...) return not f(...) end) end
function iterator_methods.min(self)
    return self:reduce(function(one, other) return (one == nil or other < one) and other or one end)
end
function iterator_methods.max(self)
    return self:reduce(function(one, other) return (one == nil or other > one) and other or one end)
end
function iterator_methods.enumerate(self)
    local gen, param = self.gen, self.param
    local function numbered(number, state, ...)
        if state ~= nil then
            return {number, state}, number, ...
        end
    end
    return (iterator(function(_, state) return numbered(state[1] + 1, gen(param, state[2])) end, nil, {0, self.state}))
end
iterator_methods.unwrap = function(self) return self.gen, self.param, self.state end

local function made(value, param, state) return (iterator(of_value(value, param, state))) end
modules.fun = {
    iter = function(...) return iterator(of_value(...)) end,
    range = function(first, last, step)
        if last == nil then
            first, last = first > 0 and 1 or -1, first
        end
        step = step or (first <= last and 1 or -1)
        return iterator(function(_, value)
            value = value + step
            if (step > 0 and value <= last) or (step < 0 and value >= last) then
                return value, value
            end
        end, nil, first - step)
    end,
}
for name in next, iterator_methods do
    modules.fun[name] = name == 'take' and function(n, value, ...) return made(value, ...):take(n) end
        or function(first, value, ...)
            if value == nil then
                return iterator_methods[name](made(first))
            end
            return iterator_methods[name](made(value, ...), first)
        end
end
modules.fun.totable = function(...) return made(...):totable() end
modules.fun.each = function(f, ...) return made(...):each(f) end
modules.fun.reduce = function(f, start, ...) return made(...):reduce(f, start) end
modules.fun.foldl = modules.fun.reduce

-- console: what `tarantoolctl connect` and `tt connect` send.

local pcall = pcall

local function shown(ok, ...)
    local text
    if ok then
        text = K.pack_array(...)
    else
        text = K.pack_array({error = K.tostring((...))})
    end
    return (completed(python.encode('console', text)))
end

modules.console = {
    eval = function(line)
        local load = K.globals.load
        local chunk, problem = load('return ' .. line, line)
        if chunk == nil then
            chunk, problem = load(line, line)
        end
        if chunk == nil then
            return shown(false, problem)
        end
        local ok, text = pcall(shown, pcall(chunk))
        return ok and text or shown(false, text)
    end,
}

-- utf8 and extensions of string.

modules.utf8 = {
    len = function(text) return (completed(python.utf8('len', text))) end,
    upper = function(text) return (completed(python.utf8('upper', text))) end,
    lower = function(text) return (completed(python.utf8('lower', text))) end,
}

local string = K.string
function string.split(text, separator, limit)
    local parts, at = {}, 1
    if separator == nil or separator == '' then
        for word in string.gmatch(text, '%S+') do
            parts[#parts + 1] = word
        end
        return parts
    end
    while not limit or #parts < limit do
        local first, last = string.find(text, separator, at, true)
        if first == nil then
            break
        end
        parts[#parts + 1] = text:sub(at, first - 1)
        at = last + 1
    end
    parts[#parts + 1] = text:sub(at)
    return parts
end
function string.startswith(text, head) return text:sub(1, #head) == head end
function string.endswith(text, tail) return tail == '' or text:sub(-#tail) == tail end
function string.lstrip(text)
    local at = 1
    while at <= #text and (text:byte(at) == 32 or (text:byte(at) >= 9 and text:byte(at) <= 13)) do at = at + 1 end
    return text:sub(at)
end
function string.rstrip(text)
    local at = #text
    while at > 0 and (text:byte(at) == 32 or (text:byte(at) >= 9 and text:byte(at) <= 13)) do at = at - 1 end
    return text:sub(1, at)
end
function string.strip(text) return string.lstrip(string.rstrip(text)) end
function string.ljust(text, width, fill) return text .. string.rep(fill or ' ', width - #text) end
function string.rjust(text, width, fill) return string.rep(fill or ' ', width - #text) .. text end
function string.hex(text) return (text:gsub('.', function(c) return ('%02x'):format(c:byte()) end)) end
function string.fromhex(text) return (text:gsub('..', function(c) return string.char(tonumber(c, 16)) end)) end

modules.string, modules.table, modules.box = K.string, K.table, K.box
modules.bit, modules.math = bit, math
modules.tonumber64 = function(value)
    if type(value) == 'string' then
        return (K.decode(completed(python.decode('integer', value)), 1))
    end
    return value
end
