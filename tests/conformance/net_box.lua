-- What net.box sees of the books on a server: each step prints one line, the same for every server that is right.
local net_box, json = require('net.box'), require('json')
local buffer, msgpack = require('buffer'), require('msgpack')
local EMPTY = setmetatable({}, {__serialize = 'map'})
local uri, name = os.getenv('LIBRARY'), os.getenv('READER')

json.cfg({encode_use_tostring = true})

local function say(what, ...)
    local values = {}
    for number = 1, select('#', ...) do
        local value = select(number, ...)
        values[number] = value == nil and 'nil' or value
    end
    print(what .. ': ' .. json.encode(values))
end

-- An error as a client sees it; the place in the source is the server's own business.
local function described(err)
    if type(err) ~= 'cdata' then
        return tostring(err)
    end
    local fields = err:unpack()
    return {fields.type, fields.code, fields.message, fields.object_type, fields.object_name, fields.access_type}
end

local function try(what, action, ...)
    local ok, result = pcall(action, ...)
    say(what, ok and 'went well' or described(result), ok and result or nil)
end

local c = net_box.connect(uri)
say('state', c.state, c.protocol, c:is_connected(), c:ping(), c:wait_connected(1), c.error)
say('peer', c.peer_version_id == tonumber(os.getenv('VERSION_ID')), #c.peer_uuid)

local books, loans = c.space.books, c.space.loans
say('space', books.id, books.name, books.engine, books.field_count, books.temporary, books.is_sync, books:format())
for number = 0, 2 do
    local index = books.index[number]
    say('index', index.name, index.type, index.unique, index.parts)
end
say('unknown', c.space.nothing, books.index.nothing)

say('select', books:select(), books:select({2}), books:select({99}))
say('get', books:get({1}), books:get({99}), books:get(3).title)
say('by index', books.index.title:select({'Emma'}), books.index.title:get('Walden'))
for _, iterator in pairs({'EQ', 'REQ', 'GE', 'GT', 'LE', 'LT', 'ALL'}) do
    say('iterator ' .. iterator, books.index.year:select({1854}, {iterator = iterator, limit = 3}))
end
say('offset', books:select({}, {offset = 1, limit = 2}))
say('min and max', books.index.year:min(), books.index.year:max(), books.index.year:min({1900}), books.index.year:max({1}))
say('count', books.index.primary:count(), books.index.year:count({1900}, {iterator = 'GE'}))

say('insert', loans:insert({1, 'ann', {3}}))
say('replace', loans:replace({1, 'bob', 4}), loans:replace({2, 'cid', 5}))
say('update', loans:update({1}, {{'+', 3, 10}, {'=', 2, 'dot'}, {'!', -1, 'end'}}), loans:update({99}, {{'=', 2, 1}}))
say('upsert', loans:upsert({1, '', 0}, {{'-', 3, 4}}), loans:upsert({3, 'eve', 0}, {{'-', 3, 4}}))
say('delete', loans:delete({2}), loans:delete({2}))
say('left', loans:select())
say('by names', books:update({1}, {{'=', 'notes', {a = 1}}}), books:update({1}, {{'=', 'notes.a', 2}}))
say('values', loans:replace({9, -1ll, 18446744073709551615ull, 0.5, true, box.NULL, 'é', require('decimal').new('1.50')}))
say('uuid', tostring(loans:replace({10, require('uuid').fromstr('64d22e4d-ac92-4a23-899a-e59f34af5479')})[2]))

try('duplicate', books.insert, books, {1, 'x', 1})
try('secondary duplicate', books.insert, books, {9, 'Emma', 1})
try('field type', books.insert, books, {9, 1, 1})
try('missing field', books.insert, books, {9})
try('key type', books.select, books, {'x'})
try('key parts', books.get, books, {1, 2})
try('update type', books.update, books, 1, {{'+', 2, 1}})
try('primary key', books.update, books, 1, {{'=', 1, 5}})
try('non-unique', books.index.year.delete, books.index.year, {1815})
try('more than one', books.index.year.get, books.index.year, {1815})
try('iterator', books.select, books, {1}, {iterator = 'OVERLAPS'})
try('no procedure', c.call, c, 'nothing', {1, 2})
try('system space', c.space._space.insert, c.space._space, {600, 1, 'x', 'stone', 0, EMPTY, {}})
try('view', c.space._vspace.delete, c.space._vspace, {512})

say('info', c:call('box.info').status, c:call('box.info').ro, c:call('box.space.books:len'))
say('old call', c:call_16('box.space.books:get', 2)[1])

-- Requests without waiting
local future = books:select({}, {is_async = true, limit = 2})
say('future', future:wait_result(10), future:is_ready(), future:result())
local failing = books:insert({1, 'x', 1}, {is_async = true})
local result, err = failing:wait_result(10)
say('failing future', result, described(err))
local futures = {}
for number = 1, 500 do
    futures[number] = loans:replace({number, 'async'}, {is_async = true})
end
local sum = 0
for number = 1, 500 do
    sum = sum + futures[number]:wait_result(10)[1]
end
say('five hundred', sum, #loans:select({}, {limit = 1000}))
local gone = loans:select({1}, {is_async = true})
gone:discard()
say('discarded', select(2, gone:result()).message, gone:is_ready())

-- Answers as they came
local ibuf = buffer.ibuf()
local size = books:select({1}, {buffer = ibuf})
say('buffer', size, (msgpack.decode(ibuf.rpos, ibuf:size()))[48])
ibuf:reset()
books:select({2}, {buffer = ibuf, skip_header = true})
say('buffer without header', (msgpack.decode(ibuf.rpos, ibuf:size())))

-- The schema changes
local reloads = 0
c:on_schema_reload(function() reloads = reloads + 1 end)
local version = c.schema_version
c.space._space:insert({600, 1, 'later', 'memtx', 0, EMPTY, {{name = 'a', type = 'string'}}})
c.space._index:insert({600, 0, 'primary', 'tree', {unique = true}, {{0, 'string'}}})
say('later', c.space.later:insert({'x'}), c.schema_version > version, reloads > 0)
version = c.schema_version
c.space._index:insert({600, 1, 'second', 'tree', {unique = false}, {{field = 1, type = 'scalar', is_nullable = true}}})
c:reload_schema()
say('second', c.space.later.index.second:select({box.NULL}), c.schema_version > version)
say('second parts', c.space.later.index.second.parts)
c.space._index:delete({600, 1})
c.space._index:delete({600, 0})
c.space._space:delete({600})
c:reload_schema()
say('dropped', c.space.later)

-- Another user
local reader = net_box.connect((uri:gsub('^.*@', name .. '@')))
say('reader', reader.state, reader.space.books ~= nil, reader.space.loans ~= nil, reader.space._user ~= nil)
say('reads', reader.space.books:get(2))
try('writes', reader.space.books.insert, reader.space.books, {9, 'x', 1})
try('calls', reader.call, reader, 'box.info')
reader:close()
local stranger = net_box.connect((uri:gsub('^.*@', 'first:wrong@')))
say('stranger', stranger.state, stranger.error)
stranger:close()
local guest = net_box.connect((uri:gsub('^.*@', '')))
say('guest', guest.state, guest.space.books, guest.space._vspace ~= nil)
guest:close()

-- The end
local disconnected = 0
c:on_disconnect(function() disconnected = disconnected + 1 end)
c:close()
say('closed', c.state, c:ping(), disconnected, c:is_connected())
try('after the end', books.select, books)
os.exit(0)
