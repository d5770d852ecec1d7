-- Tuples: cdata objects that refer to their MessagePack and decode a field when it is read.
--
-- Tuples of one batch share a string. `at` is the position of the tuple in it, and `names` numbers the fields.

local K = ...

local byte, sub, type, error, next, unpack, concat = string.byte, string.sub, type, error, next, unpack, table.concat
local ffi = require('ffi')
local istype = ffi.istype
local decode, skip, array_head, array_start = K.decode, K.skip, K.array_head, K.array_start
local content, python = K.content, K.python

local names_of = {[0] = {}}
local methods = {}
local tuple_class
local buffers = content -- of a tuple: the string itself

local function raw_of(tuple)
    local buffer = buffers[tuple]
    local at = tuple._at
    if at == 1 and tuple._is_alone == 1 then
        return buffer
    end
    return sub(buffer, at, skip(buffer, at) - 1)
end
K.raw_of = raw_of

local function field(tuple, number)
    local buffer, at = buffers[tuple], tuple._at
    local count = byte(buffer, at) - 0x90
    if count <= 15 then -- an array has no code below 0x90
        at = at + 1
    else
        count, at = array_head(buffer, at)
    end
    if number < 1 or number > count then
        return nil
    end
    local code = byte(buffer, at)
    for _ = 2, number do
        if code < 0x80 or code >= 0xe0 then
            at = at + 1
        else
            at = skip(buffer, at)
        end
        code = byte(buffer, at)
    end
    if code < 0x80 then
        return code
    end
    return (decode(buffer, at))
end

local function size(tuple)
    return (array_head(buffers[tuple], tuple._at))
end

local metatable
metatable = {
    __index = function(tuple, name)
        if type(name) == 'number' then -- the body of `field` for what is most common: the call would cost a third
            local buffer, at = buffers[tuple], tuple._at
            local count, code = byte(buffer, at, at + 1)
            if name == 1 and count > 0x90 and count < 0xa0 and code < 0x80 then
                return code
            end
            return field(tuple, name)
        end
        local number = names_of[tuple._names][name]
        if number then
            return field(tuple, number)
        end
        local method = methods[name]
        if method == nil and type(name) == 'string' and name:find('[%.%[]') then
            return methods.at_path(tuple, name)
        end
        return method
    end,
    __len = size,
    __tostring = function(tuple) return K.to_text(tuple) end,
    __newindex = function() error('box.tuple is read-only', 2) end,
}
tuple_class = K.class('struct { const uint32_t _at; const uint32_t _names; const uint8_t _is_alone; }', metatable)

K.tuple_class = tuple_class

local function is_tuple(value)
    return type(value) == 'cdata' and istype(tuple_class, value)
end
K.is_tuple = is_tuple

local function new_tuple(raw, names)
    local made = tuple_class(1, names or 0, 1)
    buffers[made] = raw
    return made
end
K.new_tuple = new_tuple

function K.tuple_at(buffer, at, names)
    local made = tuple_class(at, names, 0)
    buffers[made] = buffer
    return made
end

function K.name_fields(list)
    -- Returns the number of a list of field names.
    local numbers = {}
    for number, name in next, list do
        numbers[name] = number
    end
    names_of[#names_of + 1] = numbers
    return #names_of
end

local function values(tuple)
    local buffer = buffers[tuple]
    local count, at = array_head(buffer, tuple._at)
    local found = {}
    for number = 1, count do
        found[number], at = decode(buffer, at)
    end
    return found, count
end

function methods.unpack(tuple, first, last)
    local found, count = values(tuple)
    return unpack(found, first or 1, last or count)
end

function methods.totable(tuple, first, last)
    local found, count = values(tuple)
    if first or last then
        local part = {}
        for number = first or 1, last or count do
            part[#part + 1] = found[number]
        end
        found = part
    end
    return setmetatable(found, K.array_meta)
end

function methods.tomap(tuple, options)
    local found, count = values(tuple)
    local map = {}
    local only = options and options.names_only
    for name, number in next, names_of[tuple._names] do
        map[name] = found[number]
    end
    if not only then
        for number = 1, count do
            map[number] = found[number]
        end
    end
    return map
end

function methods.bsize(tuple)
    return #raw_of(tuple)
end

function methods.slice(tuple, first, last)
    local found, count = values(tuple)
    if first < 0 then
        first = count + first
    end
    last = last or count
    return unpack(found, first + 1, last < 0 and count + last or last)
end

function methods.find(tuple, first, value)
    if value == nil then
        first, value = 1, first
    end
    local found, count = values(tuple)
    for number = first, count do
        if found[number] == value then
            return number
        end
    end
end

function methods.findall(tuple, first, value)
    if value == nil then
        first, value = 1, first
    end
    local found, count = values(tuple)
    local numbers = {}
    for number = first, count do
        if found[number] == value then
            numbers[#numbers + 1] = number
        end
    end
    return unpack(numbers)
end

function methods.next(tuple, number)
    number = (number or 0) + 1
    if number > size(tuple) then
        return nil
    end
    return number, field(tuple, number)
end

local function iterate(tuple)
    return methods.next, tuple, 0
end
methods.pairs, methods.ipairs = iterate, iterate
metatable.__pairs, metatable.__ipairs = iterate, iterate
K.tuple_meta = {__pairs = iterate, __ipairs = iterate}

local function changed(tuple, state, ...)
    return new_tuple(K.completed(state, ...), tuple._names)
end

local function sorted_names(tuple)
    local list = {}
    for name, number in next, names_of[tuple._names] do
        list[number] = name
    end
    return K.pack(list)
end

function methods.update(tuple, operations)
    return changed(tuple, python.update_tuple(raw_of(tuple), K.pack_tuple(operations), sorted_names(tuple), false))
end

function methods.upsert(tuple, operations)
    return changed(tuple, python.update_tuple(raw_of(tuple), K.pack_tuple(operations), sorted_names(tuple), true))
end

function methods.transform(tuple, first, count, ...)
    local found, total = values(tuple)
    local made = {}
    for number = 1, first - 1 do
        made[number] = found[number]
    end
    for _, value in next, {...} do
        made[#made + 1] = value
    end
    for number = first + (count or 0), total do
        made[#made + 1] = found[number]
    end
    return new_tuple(K.pack_tuple(made))
end

function methods.at_path(tuple, path)
    local found = tuple
    for bracketed, dotted in path:gmatch('%[([^%]]+)%]%.?([^%.%[]*)') do
        local key = tonumber(bracketed) or bracketed:gsub('^["\']', ''):gsub('["\']$', '')
        if found == nil or (type(found) ~= 'table' and not is_tuple(found)) then
            return nil
        end
        found = found[key]
        if dotted ~= '' then
            if type(found) ~= 'table' then
                return nil
            end
            found = found[dotted]
        end
    end
    local head, rest = path:match('^([^%.%[]+)%.?(.*)$')
    if head then
        found = tuple[head]
        for part in rest:gmatch('[^%.%[%]"\']+') do
            if type(found) ~= 'table' then
                return nil
            end
            found = found[tonumber(part) or part]
        end
    end
    return found
end

local function new_from(...)
    local count = select('#', ...)
    local first = ...
    if count == 1 and is_tuple(first) then
        return first
    elseif count == 1 and type(first) == 'table' then
        return new_tuple(K.pack_tuple(first))
    end
    return new_tuple(K.pack_array(...))
end

K.tuple_module = {new = new_from, is = is_tuple, bsize = methods.bsize, update = methods.update,
    upsert = methods.upsert, next = methods.next}
