-- box.space: spaces and indexes as objects. Keys and tuples cross to Python as MessagePack.

local K = ...

local type, next, error, setmetatable, byte, sub = type, next, error, setmetatable, string.byte, string.sub
local python, completed, raise = K.python, K.completed, K.raise
local pack_key, pack_tuple, new_tuple, tuple_at = K.pack_key, K.pack_tuple, K.new_tuple, K.tuple_at
local is_tuple, raw_of, skip = K.is_tuple, K.raw_of, K.skip
local tuple_class, buffers = K.tuple_class, K.content

local ITERATORS = {EQ = 0, REQ = 1, ALL = 2, LT = 3, LE = 4, GE = 5, GT = 6}
local LIMIT_MAX = 4294967295
local FIRST_BATCH, LARGEST_BATCH = 32, 1024

local space_methods, index_methods = {}, {}

local function check(self, name)
    if type(self) ~= 'table' or self.id == nil then
        error('Use space:' .. name .. '(...) instead of space.' .. name .. '(...)', 3)
    end
end

local function iterator_of(options, key)
    local given = options
    if type(options) == 'table' then
        given = options.iterator
    end
    if given == nil then
        return key == '\x90' and 2 or 0
    elseif type(given) == 'number' then
        return given
    end
    local number = type(given) == 'string' and ITERATORS[given:upper()]
    if not number then
        raise(72, "Unknown iterator type '" .. K.tostring(given) .. "'")
    end
    return number
end

local function tuple_or_nil(names, raw)
    if raw ~= nil then
        return new_tuple(raw, names)
    end -- no value at all, as on a real server
end

local function batch_of(names, buffer, count)
    local found, at = {}, 1
    for number = 1, count do
        found[number] = tuple_at(buffer, at, names)
        at = skip(buffer, at)
    end
    return setmetatable(found, K.array_meta)
end

-- Reading, through an index: a space uses its primary index.

local function get(space, index, key)
    return tuple_or_nil(space._names, completed(python.get(space.id, index, pack_key(key))))
end

local function select_page(space, index, key, options)
    key = pack_key(key)
    local after = ''
    options = options or {}
    if type(options) == 'table' and options.after ~= nil then
        local given = options.after
        after = type(given) == 'string' and given or completed(python.position(space.id, index, pack_tuple(given)))
    end
    local is_table = type(options) == 'table'
    local buffer, count, position = completed(python.select(space.id, index, iterator_of(options, key),
        is_table and options.offset or 0, is_table and options.limit or LIMIT_MAX, key, after,
        is_table and options.fetch_pos or false))
    local found = batch_of(space._names, buffer, count)
    if position ~= nil then
        return found, position
    end
    return found
end

-- A cursor reads batches that grow: a loop that ends early has read little.
local function next_tuple(cursor, number)
    number = number + 1
    if number > cursor.count then
        if cursor.is_last then
            return nil
        end
        local buffer, count, position, sizes = completed(python.select(cursor.id, cursor.index, cursor.iterator, cursor.offset,
            cursor.size, cursor.key, cursor.position, true))
        if count == 0 then
            return nil
        end
        cursor.buffer, cursor.at, cursor.count = buffer, 1, cursor.count + count
        cursor.sizes, cursor.place = sizes, 1
        cursor.position, cursor.offset, cursor.is_last = position, 0, count < cursor.size
        cursor.size = cursor.size * 4 < LARGEST_BATCH and cursor.size * 4 or LARGEST_BATCH
    end
    local buffer, at, place = cursor.buffer, cursor.at, cursor.place
    local a, b, c, d = byte(cursor.sizes, place, place + 3)
    cursor.at, cursor.place = at + ((a * 256 + b) * 256 + c) * 256 + d, place + 4
    local made = tuple_class(at, cursor.names, 0)
    buffers[made] = buffer
    return number, made
end

K.next_tuple = next_tuple

local function pairs_of(space, index, key, options)
    key = pack_key(key)
    local after = type(options) == 'table' and options.after or nil
    local cursor = {
        id = space.id, index = index, key = key, iterator = iterator_of(options, key), names = space._names,
        offset = type(options) == 'table' and options.offset or 0, size = FIRST_BATCH, count = 0,
        position = after ~= nil and completed(python.position(space.id, index, pack_tuple(after))) or '',
    }
    return setmetatable({gen = next_tuple, param = cursor, state = 0}, K.cursor_meta), cursor, 0
end

local function count(space, index, key, options)
    key = pack_key(key)
    return (completed(python.count(space.id, index, iterator_of(options, key), key)))
end

local function edge(name)
    return function(space, index, key)
        return tuple_or_nil(space._names, completed(python.edge(name, space.id, index, pack_key(key))))
    end
end

local reads = {
    get = get, select = select_page, pairs = pairs_of, count = count, min = edge('min'), max = edge('max'),
    random = function(space, index, seed)
        return tuple_or_nil(space._names, completed(python.random(space.id, index, seed or 0)))
    end,
    len = function(space, index)
        return (completed(python.count(space.id, index, 2, '\x90')))
    end,
    update = function(space, index, key, operations)
        return tuple_or_nil(space._names, completed(python.update(space.id, index, pack_key(key),
            pack_tuple(operations))))
    end,
    delete = function(space, index, key)
        return tuple_or_nil(space._names, completed(python.delete(space.id, index, pack_key(key))))
    end,
}
for name, method in next, reads do
    space_methods[name] = function(self, ...)
        check(self, name)
        return method(self, 0, ...)
    end
    index_methods[name] = function(self, ...)
        check(self, name)
        return method(self._space, self.id, ...)
    end
end
space_methods.len = function(self)
    check(self, 'len')
    if self._is_empty then
        return 0
    end
    return reads.len(self, 0)
end

-- Writing.

function space_methods.insert(self, tuple)
    check(self, 'insert')
    return new_tuple(completed(python.insert(self.id, pack_tuple(tuple))), self._names)
end

function space_methods.replace(self, tuple)
    check(self, 'replace')
    return new_tuple(completed(python.replace(self.id, pack_tuple(tuple))), self._names)
end
space_methods.put = space_methods.replace

function space_methods.upsert(self, tuple, operations)
    check(self, 'upsert')
    completed(python.upsert(self.id, pack_tuple(tuple), pack_tuple(operations)))
end

function space_methods.frommap(self, map, options)
    check(self, 'frommap')
    local fields = {}
    local last = 0
    for name, value in next, map do
        local number = self._numbers[name]
        if number == nil then
            return nil, "Unknown field '" .. K.tostring(name) .. "'"
        end
        fields[number] = value
        last = number > last and number or last
    end
    for number = 1, last do
        if fields[number] == nil then
            fields[number] = K.NULL
        end
    end
    if options and options.table then
        return fields
    end
    return new_tuple(pack_tuple(fields), self._names)
end

-- Everything else is a built-in procedure.

local function procedure_of_space(name)
    space_methods[name] = function(self, ...)
        check(self, name)
        return K.call('box.space.' .. self.name .. ':' .. name, ...)
    end
end
for _, name in next, {'truncate', 'drop', 'rename', 'format', 'auto_increment', 'bsize'} do
    procedure_of_space(name)
end

function space_methods.create_index(self, name, options)
    check(self, 'create_index')
    K.call('box.space.' .. self.name .. ':create_index', name, options)
    return K.box.space[self.name].index[name]
end

for _, name in next, {'drop', 'rename', 'alter'} do
    index_methods[name] = function(self, ...)
        check(self, name)
        return K.call('box.space.' .. self._space.name .. '.index.' .. self.name .. ':' .. name, ...)
    end
end

local space_meta = {__index = space_methods, __metatable = false, __serialize = function(self)
    return {id = self.id, name = self.name, engine = self.engine}
end}
local index_meta = {__index = index_methods, __metatable = false, __serialize = function(self)
    return {id = self.id, name = self.name, type = self.type, unique = self.unique, parts = self.parts}
end}

local function new_space(described)
    local numbers = {}
    for number, name in next, described.names do
        numbers[name] = number
    end
    local space = {
        id = described.id, name = described.name, engine = described.engine, field_count = described.field_count,
        is_local = described.is_local, is_sync = described.is_sync, temporary = described.temporary, enabled = true,
        index = {}, _names = K.name_fields(described.names), _numbers = numbers,
        _is_empty = #described.indexes == 0,
    }
    for _, given in next, described.indexes do
        local index = setmetatable({
            id = given.id, name = given.name, type = given.type, unique = given.unique, parts = given.parts,
            space_id = space.id, _space = space,
        }, index_meta)
        space.index[given.id] = index
        space.index[given.name] = index
    end
    return setmetatable(space, space_meta)
end

local spaces, version = {}, -1

K.space = setmetatable({}, {
    __metatable = false,
    __newindex = function() error('box.space is read-only', 2) end,
    __index = function(_, name)
        local current = python.schema_version()
        if current ~= version then
            spaces, version = {}, current
        end
        local space = spaces[name]
        if space == nil then
            if type(name) ~= 'string' and type(name) ~= 'number' then
                return nil
            end
            local described = python.describe(name)
            if described == nil then
                return nil
            end
            space = new_space((K.decode(described, 1)))
            spaces[name] = space
        end
        return space
    end,
})
