-- string.find, match, gmatch and gsub that cannot take long without being interrupted.
--
-- The library's functions run in C, where the hook does not reach them, and a pattern may take time that is exponential
-- in its length. So they run only if the worst case is cheap; otherwise the matcher below does, which is Lua.

local K = ...

local byte, sub, char, concat = string.byte, string.sub, string.char, table.concat
local find, match, gmatch, gsub = string.find, string.match, string.gmatch, string.gsub
local unpack, type, error = unpack, type, error

local COST_MAX = 1e7 -- steps of the C functions: some 30 milliseconds

local is_quantifier = {[byte('*')] = true, [byte('+')] = true, [byte('-')] = true, [byte('?')] = true}

local function is_cheap(s, pattern)
    local cost = #s + 1
    local factor = cost
    for at = 1, #pattern do
        if is_quantifier[byte(pattern, at)] then
            cost = cost * factor
        end
    end
    if find(pattern, '%b', 1, true) then
        cost = cost * factor
    end
    return cost * (#pattern + 1) <= COST_MAX
end

-- Compilation: a pattern becomes a list of items.

local classes = {}
for letter in gmatch('acdlpsuwxzg', '.') do
    local inside, outside = {}, {}
    for code = 0, 255 do
        local ok, is_in = pcall(find, char(code), '%' .. letter)
        inside[code] = ok and is_in ~= nil or nil
        outside[code] = not inside[code] or nil
    end
    classes[letter], classes[letter:upper()] = inside, outside
end

local everything = {}
for code = 0, 255 do
    everything[code] = true
end

local function class_of(letter)
    return classes[letter] or {[byte(letter)] = true}
end

local function set_of(pattern, at)
    -- `at` is after the bracket.
    local is_negated = sub(pattern, at, at) == '^'
    if is_negated then
        at = at + 1
    end
    local set, is_first = {}, true
    while true do
        local letter = sub(pattern, at, at)
        if letter == '' then
            error('malformed pattern (missing \']\')', 0)
        elseif letter == ']' and not is_first then
            break
        elseif letter == '%' then
            for code in pairs(class_of(sub(pattern, at + 1, at + 1))) do
                set[code] = true
            end
            at = at + 2
        elseif sub(pattern, at + 1, at + 1) == '-' and sub(pattern, at + 2, at + 2) ~= ']'
            and sub(pattern, at + 2, at + 2) ~= '' then
            for code = byte(letter), byte(pattern, at + 2) do
                set[code] = true
            end
            at = at + 3
        else
            set[byte(letter)] = true
            at = at + 1
        end
        is_first = false
    end
    if is_negated then
        local other = {}
        for code = 0, 255 do
            other[code] = not set[code] or nil
        end
        set = other
    end
    return set, at + 1
end

local function compile(pattern, at)
    local items, count, open, captures = {}, 0, {}, 0
    while at <= #pattern do
        local letter = sub(pattern, at, at)
        local following = sub(pattern, at + 1, at + 1)
        local item
        if letter == '(' then
            captures = captures + 1
            if captures > 32 then
                error('too many captures', 0)
            end
            if following == ')' then
                item, at = {kind = 'position', n = captures}, at + 2
            else
                open[#open + 1] = captures
                item, at = {kind = 'open', n = captures}, at + 1
            end
        elseif letter == ')' then
            if #open == 0 then
                error('invalid pattern capture', 0)
            end
            item, at = {kind = 'close', n = open[#open]}, at + 1
            open[#open] = nil
        elseif letter == '$' and at == #pattern then
            item, at = {kind = 'end'}, at + 1
        elseif letter == '%' and following == 'b' then
            if #pattern < at + 3 then
                error('unbalanced pattern', 0)
            end
            item, at = {kind = 'balance', from = byte(pattern, at + 2), to = byte(pattern, at + 3)}, at + 4
        elseif letter == '%' and following == 'f' then
            local set
            set, at = set_of(pattern, at + 3)
            item = {kind = 'frontier', set = set}
        elseif letter == '%' and find(following, '^%d') then
            item, at = {kind = 'again', n = tonumber(following)}, at + 2
        else
            local set
            if letter == '%' then
                if following == '' then
                    error('malformed pattern (ends with \'%\')', 0)
                end
                set, at = class_of(following), at + 2
            elseif letter == '[' then
                set, at = set_of(pattern, at + 1)
            else
                set, at = letter == '.' and everything or {[byte(letter)] = true}, at + 1
            end
            item = {kind = 'set', set = set}
            local quantifier = sub(pattern, at, at)
            if is_quantifier[byte(quantifier)] then
                item.quantifier, at = quantifier, at + 1
            end
        end
        count = count + 1
        items[count] = item
    end
    if #open > 0 then
        error('unfinished capture', 0)
    end
    return items, captures
end

-- Matching: `attempt` returns the end of the match that starts at `at`, or nil.

local function matcher(s, items)
    local starts, stops = {}, {}
    local attempt

    local function repeated(item, number, at)
        local set, quantifier = item.set, item.quantifier
        if quantifier == '-' then
            while true do
                local stop = attempt(number + 1, at)
                if stop or not set[byte(s, at) or -1] then
                    return stop
                end
                at = at + 1
            end
        end
        local last = at
        while set[byte(s, last) or -1] and (quantifier ~= '?' or last == at) do
            last = last + 1
        end
        for stop = last, quantifier == '+' and at + 1 or at, -1 do
            local found = attempt(number + 1, stop)
            if found then
                return found
            end
        end
    end

    local function balanced(item, at)
        if byte(s, at) ~= item.from then
            return nil
        end
        local level, place = 1, at + 1
        while place <= #s do
            local code = byte(s, place)
            if code == item.to then
                level = level - 1
                if level == 0 then
                    return place + 1
                end
            elseif code == item.from then
                level = level + 1
            end
            place = place + 1
        end
    end

    function attempt(number, at)
        while true do
            local item = items[number]
            if item == nil then
                return at
            end
            local kind = item.kind
            if kind == 'set' then
                if item.quantifier then
                    return repeated(item, number, at)
                elseif not item.set[byte(s, at) or -1] then
                    return nil
                end
                at = at + 1
            elseif kind == 'open' then
                starts[item.n], stops[item.n] = at, nil
            elseif kind == 'position' then
                starts[item.n], stops[item.n] = at, 'position'
            elseif kind == 'close' then
                local before = stops[item.n]
                stops[item.n] = at
                local stop = attempt(number + 1, at)
                if not stop then
                    stops[item.n] = before
                end
                return stop
            elseif kind == 'end' then
                return at == #s + 1 and at or nil
            elseif kind == 'balance' then
                at = balanced(item, at)
            elseif kind == 'frontier' then
                if item.set[byte(s, at - 1) or 0] or not item.set[byte(s, at) or 0] then
                    return nil
                end
            else
                local first, stop = starts[item.n], stops[item.n]
                if not first or not stop then
                    error('invalid capture index', 0)
                end
                local text = sub(s, first, stop - 1)
                if sub(s, at, at + #text - 1) ~= text then
                    return nil
                end
                at = at + #text
            end
            if at == nil then
                return nil
            end
            number = number + 1
        end
    end

    local function capture(number)
        local stop = stops[number]
        if stop == 'position' then
            return starts[number]
        end
        return sub(s, starts[number], stop - 1)
    end

    return function(at) return attempt(1, at) end, capture
end

local function captured(capture, count, whole)
    if count == 0 then
        return whole
    end
    local values = {}
    for number = 1, count do
        values[number] = capture(number)
    end
    return unpack(values, 1, count)
end

local function first_match(s, pattern, init)
    local is_anchored = sub(pattern, 1, 1) == '^'
    local items, count = compile(pattern, is_anchored and 2 or 1)
    local attempt, capture = matcher(s, items)
    for at = init, #s + 1 do
        local stop = attempt(at)
        if stop then
            return at, stop - 1, capture, count
        elseif is_anchored then
            return nil
        end
    end
end

local function start_of(s, init)
    init = init or 1
    if init < 0 then
        init = math.max(#s + init + 1, 1)
    end
    return math.max(init, 1)
end

local function text(value, number, name)
    if type(value) == 'number' then
        return tostring(value)
    elseif type(value) ~= 'string' then
        error(("bad argument #%d to '%s' (string expected, got %s)"):format(
            number, name, value == nil and 'no value' or type(value)), 3)
    end
    return value
end

local plain_find = K.python.find

function K.string.find(s, pattern, init, is_plain)
    s, pattern = text(s, 1, 'find'), text(pattern, 2, 'find')
    if is_plain then
        if #s * #pattern <= COST_MAX then
            return find(s, pattern, init, true)
        end
        local at = plain_find(s, pattern, start_of(s, init))
        if at then
            return at, at + #pattern - 1
        end
        return nil
    end
    if is_cheap(s, pattern) then
        return find(s, pattern, init)
    end
    local at, stop, capture, count = first_match(s, pattern, start_of(s, init))
    if at == nil then
        return nil
    elseif count == 0 then
        return at, stop
    end
    return at, stop, captured(capture, count)
end

function K.string.match(s, pattern, init)
    s, pattern = text(s, 1, 'match'), text(pattern, 2, 'match')
    if is_cheap(s, pattern) then
        return match(s, pattern, init)
    end
    local at, stop, capture, count = first_match(s, pattern, start_of(s, init))
    if at == nil then
        return nil
    end
    return captured(capture, count, sub(s, at, stop))
end

function K.string.gmatch(s, pattern)
    s, pattern = text(s, 1, 'gmatch'), text(pattern, 2, 'gmatch')
    if is_cheap(s, pattern) then
        return gmatch(s, pattern)
    end
    local items, count = compile(pattern, 1)
    local attempt, capture = matcher(s, items)
    local at = 1
    return function()
        while at <= #s + 1 do
            local stop = attempt(at)
            if stop then
                local first = at
                at = stop > first and stop or stop + 1
                return captured(capture, count, sub(s, first, stop - 1))
            end
            at = at + 1
        end
    end
end

local function replaced(replacement, whole, capture, count)
    local kind = type(replacement)
    if kind == 'string' then
        return (gsub(replacement, '%%(.)', function(letter)
            if letter == '0' then
                return whole
            elseif find(letter, '%d') then
                local number = tonumber(letter)
                if number == 1 and count == 0 then
                    return whole
                elseif number > count then
                    error('invalid capture index', 0)
                end
                return tostring(capture(number))
            end
            return letter
        end))
    end
    local value
    if kind == 'table' then
        value = replacement[(captured(capture, count, whole))]
    else
        value = replacement(captured(capture, count, whole))
    end
    if not value then
        return whole
    elseif type(value) ~= 'string' and type(value) ~= 'number' then
        error('invalid replacement value (a ' .. type(value) .. ')', 0)
    end
    return tostring(value)
end

function K.string.gsub(s, pattern, replacement, limit)
    s, pattern = text(s, 1, 'gsub'), text(pattern, 2, 'gsub')
    if type(replacement) == 'number' then
        replacement = tostring(replacement)
    end
    if type(replacement) == 'string' and is_cheap(s, pattern) and #replacement * #s <= COST_MAX then
        return gsub(s, pattern, replacement, limit)
    end
    local is_anchored = sub(pattern, 1, 1) == '^'
    local items, count = compile(pattern, is_anchored and 2 or 1)
    local attempt, capture = matcher(s, items)
    local parts, at, done = {}, 1, 0
    while done < (limit or math.huge) do
        local stop = attempt(at)
        if stop then
            done = done + 1
            parts[#parts + 1] = replaced(replacement, sub(s, at, stop - 1), capture, count)
        end
        if stop and stop > at then
            at = stop
        elseif at <= #s then
            parts[#parts + 1] = sub(s, at, at)
            at = at + 1
        else
            break
        end
        if is_anchored then
            break
        end
    end
    parts[#parts + 1] = sub(s, at)
    return concat(parts), done
end
