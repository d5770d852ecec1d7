"""The same Lua on the real Tarantool 2.6 and on a node: the same results, and the same texts of errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from flowstone.iproto.constants import RequestType
from tests.conformance.case import PRIMARY, Case, Request, Space, call, column, request, tree
from tests.conformance.servers import node_target, real_target
from tests.conformance.target import Target

pytestmark = pytest.mark.real

SPACES: Final = (
    Space(
        (PRIMARY, tree((1, "string"), name="by_name", unique=False)),
        ((1, "ann", 10), (2, "bob", None), (3, "bob", 2**40)),
        format=(column("id", "unsigned"), column("name", "string"), column("count", "integer", is_nullable=True)),
    ),
)

EXPRESSIONS: Final = """
return
return nil
return 1, 'two', true, nil, 2.5
return ...
return {1, 2, 3}, {a = 1}, {}, {[1] = 1, [3] = 3}, {1, a = 2}
return {[1] = 1, [100] = 2}
return setmetatable({}, {__serialize = 'map'}), setmetatable({1}, {__serialize = 'seq'})
return 2^53, 2^63, 2^64, -2^63, 1e300, -1, 1/3
return 18446744073709551615ULL, -9223372036854775808LL, 5ULL
return box.NULL, {box.NULL}, {1, box.NULL, 3}
return error('text')
return error('text', 0)
return error()
return nosuch.field
return 1 +
return pcall(error, 'text', 0)
return pcall(error, {1, 2})
return select('#', pcall(error))
return tostring(nil), tostring(1.5), tostring('x'), tostring(1e15)
return type(box.space.test), type(box.space.test:get(1)), type(box.NULL)
return box.space.test:get(1)
return box.space.test:get{1}
return box.space.test:get(99)
return (box.space.test:get(99))
return box.space.test:get('x')
return box.space.test:get()
return box.space.nosuch
return box.space.test.id, box.space.test.name, box.space.test.engine, box.space.test.field_count
return box.space.test.index.by_name.id, box.space.test.index[0].name, box.space.test.index.pk.unique
return box.space.test:select()
return box.space.test:select({2}, {iterator = 'GE'})
return box.space.test:select(2, {iterator = 'GT', limit = 1})
return box.space.test:select({}, {offset = 1, limit = 1})
return box.space.test:select({}, {iterator = 'nosuch'})
return box.space.test.index.by_name:select('bob')
return box.space.test.index.by_name:get('bob')
return box.space.test.index.by_name:min('bob'), box.space.test.index.by_name:max(), box.space.test.index.pk:min()
return box.space.test:count(), box.space.test:len(), box.space.test.index.by_name:count('bob')
return box.space.test:insert{4, 'eve'}
return box.space.test:insert{1, 'dup', 1}
return box.space.test:insert{'x'}
return box.space.test:insert(5)
return box.space.test:insert{5, 'a', 'b'}
return box.space.test:replace{1, 'ann', 11}
return box.space.test:update(1, {{'=', 2, 'anna'}, {'+', 3, 5}})
return box.space.test:update(1, {{'+', 'count', 1}})
return box.space.test:update(99, {{'=', 2, 'x'}})
return box.space.test:update(1, {{'?', 2, 'x'}})
return box.space.test:update(1, {{'=', 'nosuch', 'x'}})
return box.space.test:upsert({1, 'x', 1}, {{'+', 3, 1}}), box.space.test:get(1)
return box.space.test:upsert({9, 'x', 1}, {{'+', 3, 1}}), box.space.test:get(9)
return box.space.test:delete(1), box.space.test:delete(1)
return box.space.test:get(1).name, box.space.test:get(1)[2], box.space.test:get(1).nosuch, #box.space.test:get(1)
return box.space.test:get(1):unpack()
return box.space.test:get(1):totable(), box.space.test:get(1):tomap({names_only = true}).name
return box.space.test:get(1):update({{'=', 2, 'new'}}), box.space.test:get(1)
return box.space.test:get(1):transform(2, 1, 'x', 'y'), box.space.test:get(1):slice(1)
return box.space.test:get(1):find('ann')
return box.space.test:get(2).count == nil, box.space.test:get(3).count
return tostring(box.space.test:get(1)), tostring(box.tuple.new{1, 'a', {2}})
return box.tuple.new{1, 2}, box.tuple.new(1, 2), box.tuple.is(box.tuple.new{}), box.tuple.is({})
return box.tuple.new{1, 2} == box.tuple.new{1, 2}, box.tuple.new{1} == box.tuple.new{2}
local n = 0 for _, t in box.space.test:pairs() do n = n + t[1] end return n
local n = 0 for k, v in box.space.test:get(1):pairs() do n = n + k end return n
local n = 0 for k, v in pairs(box.space.test:get(1)) do n = n + k end return n
return box.space.test:pairs(2, {iterator = 'GE'}):map(function(t) return t[1] end):totable()
return box.space.test:pairs():take(2):length(), box.space.test:pairs():filter(function(t) return t[1] > 1 end):length()
box.begin() box.space.test:delete(1) box.rollback() return box.space.test:get(1)
box.begin() box.space.test:delete(1) box.commit() return box.space.test:get(1)
box.begin() box.begin()
box.begin() return 1
box.commit() return box.is_in_txn()
box.begin() return box.is_in_txn(), box.rollback()
box.begin() box.space.test:delete(1) require('fiber').yield() box.commit()
box.begin() box.space.test:delete(1) require('fiber').yield() box.rollback() return box.space.test:get(1)
return box.atomic(function(x) box.space.test:delete(1) return x end, 5)
return pcall(box.atomic, function() box.space.test:delete(1) error('no', 0) end)
box.begin() local s = box.savepoint() box.space.test:delete(1) box.rollback_to_savepoint(s) box.commit()
return box.error(box.error.PROC_LUA, 'text')
return box.error{code = 5, reason = 'because'}
return pcall(box.error, box.error.PROC_LUA, 'text')
local ok, e = pcall(box.error, {code = 5, reason = 'because'}) return e.code, e.message, e.type, tostring(e)
local ok, e = pcall(box.space.test.insert, box.space.test, {1, 'dup', 1}) return e.code, e.type, e.message
local ok, e = pcall(box.space.test.insert, box.space.test, {1, 'dup', 1}) error(e)
return box.session.user(), box.session.type(), box.session.uid(), box.session.euid()
return box.session.su('guest', box.session.effective_user), box.session.effective_user()
return pcall(box.session.su, 'nobody')
return box.info.ro, box.info.status, type(box.info.lsn), type(box.info()), box.info.nosuch
return box.cfg.read_only, type(box.cfg.listen)
return require('json').encode({a = 1}), require('json').encode({1, 2, {3}}), require('json').encode(box.NULL)
return require('json').decode('{"a": [1, 2.5, null, "x", true]}')
return require('msgpack').decode(require('msgpack').encode({1, 'a', {b = 2}}))
return #require('msgpack').encode({1, 2, 3})
return require('decimal').new('1.10') + 1, tostring(require('decimal').new('1.10')), require('decimal').new(1) < 2
return require('uuid').fromstr('ba90d815-14e0-431d-80c0-ce587885bb78'), require('uuid').fromstr('x')
return require('uuid').fromstr('ba90d815-14e0-431d-80c0-ce587885bb78'):str(), #require('uuid').bin()
return require('digest').md5_hex('x'), require('digest').sha256_hex('x'), require('digest').base64_encode('xyz')
return require('digest').base64_decode('eHl6'), #require('digest').sha1('x'), require('digest').crc32('x')
return type(require('clock').time()), type(require('clock').monotonic64()), require('clock').time() > 1e9
return require('fun').range(5):sum(), require('fun').iter({1, 2, 3}):map(function(x) return x * 2 end):totable()
return require('fun').range(3):reduce(function(a, x) return a + x end, 0), require('fun').range(1, 10, 3):totable()
return require('fiber').time() > 1e9, type(require('fiber').self():id()), require('fiber').sleep(0)
return ('a,b,c'):split(','), ('  x '):strip(), ('abc'):startswith('ab'), ('abc'):endswith('bc'), ('a b'):split()
return table.copy({1, {2}}), table.deepcopy({1, {2}})
return ('abc'):rep(2), ('abc'):sub(2), ('abc'):upper(), ('abc'):byte(1), ('abc'):find('b', 1, true), #('abc')
return ('key = value'):match('(%w+)%s*=%s*(%w+)'), ('hello world'):gsub('o', '0')
return ('x1y2'):gsub('%d', function(d) return d * 2 end)
local t = {} for w in ('one two'):gmatch('%a+') do t[#t + 1] = w end return t
return string.format('%5.2f|%d|%s|%q|%x', 3.14159, 42, 'x', 'y', 255)
return bit.band(6, 3), math.floor(2.7), math.max(1, 5), tonumber('0x10'), tonumber('z', 36)
local co = coroutine.wrap(function(a) local b = coroutine.yield(a + 1) return b * 2 end) return co(1), co(5)
return coroutine.resume(coroutine.create(function() error('x', 0) end))
return pcall(function() return box.space.test:get(1) end)
return xpcall(function() error('x', 0) end, function(e) return e .. '!' end)
return unpack({1, 2, 3}, 2), select(2, 'a', 'b'), next({5}), rawget({7}, 1), rawequal(1, 1)
return load('return 1 + 1')(), loadstring('return ...')(7), load('x x')
local t = setmetatable({}, {__index = function(_, k) return k .. '!' end}) return t.x
x_global = 7 return x_global
return require('console').eval('1 + 1'), require('console').eval('y_global = 5'), require('console').eval('nil')
return require('console').eval("error('x', 0)"), require('console').eval('1, 2, nil'), require('console').eval('x x')
return require('utf8') ~= nil, type(utf8.len), utf8.len('äöü')
return function() end
""".strip().splitlines()

FUNCTIONS: Final = {
    "plain": ("function(a, b) return a + b end", {}),
    "sandboxed": ("function(a) return type(box), type(require), type(string.rep), a end", {"is_sandboxed": True}),
    "space": ("function(key) return box.space.test:get(key) end", {}),
    "failing": ("function() error('no') end", {}),
    "missing": ("function() return nosuch.x end", {}),
    "several": ("function(...) return select('#', ...), ... end", {}),
}


@pytest.fixture(scope="module")
def real(tarantool: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with real_target(tmp_path_factory.mktemp("real")) as target:
        yield target


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with node_target(tmp_path_factory.mktemp("node"), dialect="2.6") as target:
        yield target


def eval_request(expression: str, *arguments: Any) -> Request:
    return request(RequestType.EVAL, expr=expression, tuple=list(arguments))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_has_the_results_of_the_real_server(expression: str, real: Target, node: Target) -> None:
    case = Case(expression, (eval_request(expression, 7, "seven", [1], {"a": None}),), SPACES)
    theirs, ours = (repr(target.run(case)) for target in (real, node))
    assert ours == theirs


@pytest.mark.parametrize("name", FUNCTIONS)
def test_stored_function_has_the_results_of_the_real_server(name: str, real: Target, node: Target) -> None:
    body, options = FUNCTIONS[name]
    create = call("box.schema.func.create", "stored", {"body": body, **options})
    drop = call("box.schema.func.drop", "stored")
    calls = (create, call("stored", 1, 2), call("stored", "x"), drop, call("stored"))
    case = Case(name, calls, SPACES)
    theirs, ours = (repr(target.run(case)) for target in (real, node))
    assert ours == theirs
