-- MessagePack to and from Lua values, with the conversions of a real server.
--
-- Integers of 10^14 and above are 64-bit cdata, nil is box.NULL, extensions are objects that keep their bytes. The
-- position arguments are numbers from 1; decoders return the value and the position after it.

local K = ...

local byte, char, sub, concat, strrep = string.byte, string.char, string.sub, table.concat, string.rep
local floor, type, error, setmetatable, next, tostring = math.floor, type, error, setmetatable, next, tostring
local getmetatable, rawget, huge = debug.getmetatable, rawget, math.huge
local ffi = require('ffi')
local istype, cast, new, copy, ffi_string = ffi.istype, ffi.cast, ffi.new, ffi.copy, ffi.string
local content = K.content

local NULL = cast('void *', 0)
K.NULL = NULL

local NUMBER_MAX = 99999999999999
local NESTING_MAX = 128

local int64, uint64 = ffi.typeof('int64_t'), ffi.typeof('uint64_t')
local number_buffer = new('union { double d; float f; uint8_t bytes[8]; }')

-- Extensions.

local EXTENSIONS = {} -- by code: the class
local CODES = {} -- by kind

function K.extension(code, kind, class)
    EXTENSIONS[code] = {kind = kind, class = class}
    CODES[kind] = code
end

local function new_extension(code, data)
    local found = EXTENSIONS[code] or EXTENSIONS.other
    local made = found.class()
    content[made] = {kind = found.kind, code = code, data = data}
    return made
end
K.new_extension = new_extension

-- Skipping.

local FIXED = {} -- size of a value by its first byte
for code = 0, 0x7f do FIXED[code] = 1 end
for code = 0xe0, 0xff do FIXED[code] = 1 end
for code = 0xa0, 0xbf do FIXED[code] = code - 0xa0 + 1 end
for code, size in next, {[0xc0] = 1, [0xc2] = 1, [0xc3] = 1, [0xca] = 5, [0xcb] = 9, [0xcc] = 2, [0xcd] = 3, [0xce] = 5,
    [0xcf] = 9, [0xd0] = 2, [0xd1] = 3, [0xd2] = 5, [0xd3] = 9, [0xd4] = 3, [0xd5] = 4, [0xd6] = 6, [0xd7] = 10,
    [0xd8] = 18} do
    FIXED[code] = size
end

local function be16(s, at)
    local a, b = byte(s, at, at + 1)
    return a * 256 + b
end

local function be32(s, at)
    local a, b, c, d = byte(s, at, at + 3)
    return ((a * 256 + b) * 256 + c) * 256 + d
end

local function size_of(s, at, width)
    if width == 1 then
        return byte(s, at)
    end
    return width == 2 and be16(s, at) or be32(s, at)
end

local WIDTH = {[0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xc7] = 1, [0xc8] = 2, [0xc9] = 4, [0xd9] = 1, [0xda] = 2,
    [0xdb] = 4, [0xdc] = 2, [0xdd] = 4, [0xde] = 2, [0xdf] = 4}

local function skip(s, at)
    local left = 1
    repeat
        local code = byte(s, at)
        local size = FIXED[code]
        left = left - 1
        if size then
            at = at + size
        elseif code >= 0x90 and code <= 0x9f then
            left, at = left + code - 0x90, at + 1
        elseif code >= 0x80 and code <= 0x8f then
            left, at = left + 2 * (code - 0x80), at + 1
        else
            local width = WIDTH[code]
            local count = size_of(s, at + 1, width)
            at = at + 1 + width
            if code >= 0xde then
                left = left + 2 * count
            elseif code >= 0xdc then
                left = left + count
            elseif code >= 0xc7 and code <= 0xc9 then
                at = at + 1 + count
            else
                at = at + count
            end
        end
    until left == 0
    return at
end
K.skip = skip

local function array_head(s, at)
    local code = byte(s, at)
    if code >= 0x90 and code <= 0x9f then
        return code - 0x90, at + 1
    end
    local width = WIDTH[code]
    return size_of(s, at + 1, width), at + 1 + width
end
K.array_head = array_head

-- Decoding.

local array_meta, map_meta = {__serialize = 'seq'}, {__serialize = 'map'}
K.array_meta, K.map_meta = array_meta, map_meta

local decode

local function decode_items(s, at, count)
    local values = {}
    for number = 1, count do
        values[number], at = decode(s, at)
    end
    return setmetatable(values, array_meta), at
end

local function decode_map(s, at, count)
    local values = {}
    for _ = 1, count do
        local key, value
        key, at = decode(s, at)
        value, at = decode(s, at)
        if key ~= nil then
            values[key] = value
        end
    end
    return setmetatable(values, map_meta), at
end

local function wide(high, low, is_signed)
    if is_signed and high >= 0x80000000 then
        local value = (high - 0x100000000) * 0x100000000
        if value + low >= -NUMBER_MAX then
            return value + low
        end
        return cast(int64, uint64(high) * 0x100000000ULL + uint64(low))
    end
    local value = high * 0x100000000 + low
    if value <= NUMBER_MAX then
        return value
    end
    return uint64(high) * 0x100000000ULL + uint64(low)
end

local DECODERS = {
    [0xc0] = function(_, at) return NULL, at end,
    [0xc2] = function(_, at) return false, at end,
    [0xc3] = function(_, at) return true, at end,
    [0xca] = function(s, at)
        local a, b, c, d = byte(s, at, at + 3)
        local bytes = number_buffer.bytes
        bytes[0], bytes[1], bytes[2], bytes[3] = d, c, b, a
        return number_buffer.f, at + 4
    end,
    [0xcb] = function(s, at)
        local a, b, c, d, e, f, g, h = byte(s, at, at + 7)
        local bytes = number_buffer.bytes
        bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7] = h, g, f, e, d, c, b, a
        return number_buffer.d, at + 8
    end,
    [0xcc] = function(s, at) return byte(s, at), at + 1 end,
    [0xcd] = function(s, at) return be16(s, at), at + 2 end,
    [0xce] = function(s, at) return be32(s, at), at + 4 end,
    [0xcf] = function(s, at) return wide(be32(s, at), be32(s, at + 4)), at + 8 end,
    [0xd0] = function(s, at)
        local value = byte(s, at)
        return value < 128 and value or value - 256, at + 1
    end,
    [0xd1] = function(s, at)
        local value = be16(s, at)
        return value < 32768 and value or value - 65536, at + 2
    end,
    [0xd2] = function(s, at)
        local value = be32(s, at)
        return value < 2147483648 and value or value - 4294967296, at + 4
    end,
    [0xd3] = function(s, at) return wide(be32(s, at), be32(s, at + 4), true), at + 8 end,
}
for width, codes in next, {[1] = {0xc4, 0xd9}, [2] = {0xc5, 0xda}, [4] = {0xc6, 0xdb}} do
    for _, code in next, codes do
        DECODERS[code] = function(s, at)
            local size = size_of(s, at, width)
            at = at + width
            return sub(s, at, at + size - 1), at + size
        end
    end
end
for code, size in next, {[0xd4] = 1, [0xd5] = 2, [0xd6] = 4, [0xd7] = 8, [0xd8] = 16} do
    DECODERS[code] = function(s, at)
        return new_extension(byte(s, at), sub(s, at + 1, at + size)), at + 1 + size
    end
end
for code, width in next, {[0xc7] = 1, [0xc8] = 2, [0xc9] = 4} do
    DECODERS[code] = function(s, at)
        local size = size_of(s, at, width)
        at = at + width
        return new_extension(byte(s, at), sub(s, at + 1, at + size)), at + 1 + size
    end
end
for code, width in next, {[0xdc] = 2, [0xdd] = 4} do
    DECODERS[code] = function(s, at) return decode_items(s, at + width, size_of(s, at, width)) end
end
for code, width in next, {[0xde] = 2, [0xdf] = 4} do
    DECODERS[code] = function(s, at) return decode_map(s, at + width, size_of(s, at, width)) end
end

function decode(s, at)
    local code = byte(s, at)
    if code < 0x80 then
        return code, at + 1
    elseif code >= 0xa0 and code < 0xc0 then
        local stop = at + code - 0xa0
        return sub(s, at + 1, stop), stop + 1
    elseif code >= 0xe0 then
        return code - 256, at + 1
    elseif code >= 0x90 and code < 0xa0 then
        return decode_items(s, at + 1, code - 0x90)
    elseif code < 0x90 then
        return decode_map(s, at + 1, code - 0x80)
    end
    return DECODERS[code](s, at + 1)
end
K.decode = decode

local unpack, select = unpack, select

local function decode_array(s)
    local count, at = array_head(s, 1)
    if count == 0 then
        return
    elseif count == 1 then
        return (decode(s, at))
    end
    local values = {}
    for number = 1, count do
        values[number], at = decode(s, at)
    end
    return unpack(values, 1, count)
end

-- Encoding: `encode` appends to the list `out` and returns its new length.

local function u16(n) return char(floor(n / 256), n % 256) end
local function u32(n)
    return char(floor(n / 16777216), floor(n / 65536) % 256, floor(n / 256) % 256, n % 256)
end

local function encode_unsigned(n)
    if n < 0x80 then
        return char(n)
    elseif n < 0x100 then
        return char(0xcc, n)
    elseif n < 0x10000 then
        return '\xcd' .. u16(n)
    elseif n < 0x100000000 then
        return '\xce' .. u32(n)
    end
    local high = floor(n / 0x100000000)
    return '\xcf' .. u32(high) .. u32(n - high * 0x100000000)
end

local function encode_negative(n)
    if n >= -32 then
        return char(256 + n)
    elseif n >= -128 then
        return char(0xd0, 256 + n)
    elseif n >= -32768 then
        return '\xd1' .. u16(65536 + n)
    elseif n >= -2147483648 then
        return '\xd2' .. u32(4294967296 + n)
    end
    local high = floor(n / 0x100000000)
    return '\xd3' .. u32(high + 0x100000000) .. u32(n - high * 0x100000000)
end

local function encode_double(n)
    number_buffer.d = n
    local b = number_buffer.bytes
    return char(0xcb, b[7], b[6], b[5], b[4], b[3], b[2], b[1], b[0])
end

local function encode_number(n)
    if n == floor(n) and n < 18446744073709551616 and n >= -9223372036854775808 then
        return n >= 0 and encode_unsigned(n) or encode_negative(n)
    end
    return encode_double(n)
end

local function string_head(size)
    if size < 32 then
        return char(0xa0 + size)
    elseif size < 256 then
        return char(0xd9, size)
    elseif size < 65536 then
        return '\xda' .. u16(size)
    end
    return '\xdb' .. u32(size)
end

local function array_start(count)
    if count < 16 then
        return char(0x90 + count)
    end
    return count < 65536 and '\xdc' .. u16(count) or '\xdd' .. u32(count)
end
K.array_start = array_start

local function map_start(count)
    if count < 16 then
        return char(0x80 + count)
    end
    return count < 65536 and '\xde' .. u16(count) or '\xdf' .. u32(count)
end

local function encode_extension(code, data)
    local size = #data
    local fixed = size == 1 and '\xd4' or size == 2 and '\xd5' or size == 4 and '\xd6' or size == 8 and '\xd7'
        or size == 16 and '\xd8'
    return (fixed or (size < 256 and char(0xc7, size)) or '\xc9' .. u32(size)) .. char(code) .. data
end

local function encode_cdata(value)
    if istype(int64, value) or istype(uint64, value) then
        if istype(uint64, value) or value >= 0 then
            value = cast(uint64, value)
            if value < 0x100000000ULL then
                return encode_unsigned(tonumber(value))
            end
            return '\xcf' .. u32(tonumber(value / 0x100000000ULL)) .. u32(tonumber(value % 0x100000000ULL))
        end
        if value >= -2147483648LL then
            return encode_negative(tonumber(value))
        end
        value = cast(uint64, value)
        return '\xd3' .. u32(tonumber(value / 0x100000000ULL)) .. u32(tonumber(value % 0x100000000ULL))
    elseif K.is_tuple(value) then
        return K.raw_of(value)
    elseif K.is_error(value) then
        local text = tostring(value)
        return string_head(#text) .. text
    end
    local found = content[value]
    if found then
        return encode_extension(found.code, found.data)
    elseif value == nil then
        return '\xc0'
    elseif istype('float', value) or istype('double', value) then
        return encode_double(tonumber(value))
    end
    error("unsupported Lua type 'cdata'", 0)
end

-- Whether a table is an array, and its length: a table with other keys than 1, 2, … is a map, and so is one with more
-- than half of its places empty.
local function shape_of(value)
    local metatable = getmetatable(value)
    local hint = metatable and rawget(metatable, '__serialize')
    if hint == 'map' or hint == 'mapping' then
        local count = 0
        for _ in next, value do
            count = count + 1
        end
        return nil, count
    end
    local count, last, is_array = 0, 0, true
    for key in next, value do
        count = count + 1
        if is_array then
            if type(key) ~= 'number' or key < 1 or key ~= floor(key) then
                is_array = false
            elseif key > last then
                last = key
            end
        end
    end
    if hint == 'seq' or hint == 'sequence' then
        return #value
    elseif not is_array or (last > 10 and last > count * 2) then
        return nil, count
    end
    return last
end
K.shape_of = shape_of

local function encode(value, out, count, depth)
    local kind = type(value)
    if kind == 'number' then
        out[count + 1] = encode_number(value)
        return count + 1
    elseif kind == 'string' then
        out[count + 1], out[count + 2] = string_head(#value), value
        return count + 2
    elseif kind == 'table' then
        if depth > NESTING_MAX then
            error('Too high nest level - ' .. depth, 0)
        end
        local metatable = getmetatable(value)
        local serialize = metatable and rawget(metatable, '__serialize')
        if type(serialize) == 'function' then
            return encode(serialize(value), out, count, depth + 1)
        end
        local length, pairs_count = shape_of(value)
        if length then
            count = count + 1
            out[count] = array_start(length)
            for number = 1, length do
                count = encode(value[number], out, count, depth + 1)
            end
            return count
        end
        count = count + 1
        out[count] = map_start(pairs_count)
        for key, item in next, value do
            count = encode(key, out, count, depth + 1)
            count = encode(item, out, count, depth + 1)
        end
        return count
    end
    local text
    if kind == 'nil' then
        text = '\xc0'
    elseif kind == 'boolean' then
        text = value and '\xc3' or '\xc2'
    elseif kind == 'cdata' then
        text = encode_cdata(value)
    else
        error("unsupported Lua type '" .. kind .. "'", 0)
    end
    out[count + 1] = text
    return count + 1
end

local function pack(value)
    local kind = type(value)
    if kind == 'number' then
        return encode_number(value)
    elseif kind == 'string' then
        return string_head(#value) .. value
    elseif kind == 'cdata' then
        return encode_cdata(value)
    end
    local out = {}
    encode(value, out, 0, 1)
    return concat(out)
end
K.pack = pack

local function pack_all(...)
    local count = select('#', ...)
    if count == 1 then
        return pack((...))
    end
    local out, length = {}, 0
    for number = 1, count do
        length = encode((select(number, ...)), out, length, 1)
    end
    return concat(out)
end

function K.pack_array(...)
    return array_start(select('#', ...)) .. pack_all(...)
end

function K.pack_key(key)
    local kind = type(key)
    if kind == 'number' then
        return '\x91' .. encode_number(key)
    elseif kind == 'nil' then
        return '\x90'
    elseif kind == 'table' then
        local length = shape_of(key)
        if length == nil then
            error('Invalid key', 0)
        end
        local out = {array_start(length)}
        local count = 1
        for number = 1, length do
            count = encode(key[number], out, count, 1)
        end
        return concat(out)
    elseif kind == 'cdata' then
        if K.is_tuple(key) then
            return K.raw_of(key)
        elseif key == nil then
            return '\x90'
        end
    end
    return '\x91' .. pack(key)
end

function K.pack_tuple(value)
    local kind = type(value)
    if kind == 'table' then
        local length = shape_of(value)
        if length then
            local out = {array_start(length)}
            local count = 1
            for number = 1, length do
                count = encode(value[number], out, count, 1)
            end
            return concat(out)
        end
    elseif kind == 'cdata' and K.is_tuple(value) then
        return K.raw_of(value)
    end
    K.raise(22, 'Tuple/Key must be MsgPack array')
end

K.use({
    decode_array = decode_array,
    encode_results = function(...) return select('#', ...), pack_all(...) end,
})
