"""Logs for the commands to read: one written by the real Tarantool 2.6, and the shop of the demonstration.

Live members come from the interoperability tests.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from flowstone.cli import run
from flowstone.cli.demo.shop import write_shop
from flowstone.outside import production
from tests.interop.conftest import cluster, nodes, pytest_generate_tests, pytest_runtest_makereport

__all__ = ["cluster", "nodes", "pytest_generate_tests", "pytest_runtest_makereport"]

REAL_LOG = r"""
local decimal, uuid, ffi = require('decimal'), require('uuid'), require('ffi')
box.cfg{log='server.log', replication_synchro_timeout=0.05}
box.schema.user.create('clerk', {password='secret'})
box.schema.user.passwd('clerk', 'other')
local format = {{'id', 'unsigned'}, {'text', 'string'}, {'price', 'decimal', is_nullable=true},
    {'u', 'uuid', is_nullable=true}, {'m', 'any', is_nullable=true}, {'d', 'double', is_nullable=true},
    {'flag', 'boolean', is_nullable=true}}
local all = box.schema.space.create('all', {format=format})
all:create_index('pk')
all:create_index('by_text', {parts={{'text'}}})
local function map(value) return setmetatable(value, {__serialize='map'}) end
all:insert{1, 'plain', decimal.new('1.50'), uuid.fromstr('5313b8d5-82a0-4fb4-a280-9e8bf79e1cac'),
    {a=1, b={1, 2, {}}}, 1.5, true}
all:insert{2, "quote's\"\\/\n\t\1\127é☃😀", box.NULL, box.NULL, map{}, 0.1, false}
all:insert{3, '\xff\xfea', decimal.new('-123456789012345678901234567890.12345678'), uuid.new(), {}, 1e300, true,
    'extra', -1, 2^53, {deep={{{1}}}}}
all:insert{4, 'numbers', decimal.new(0), box.NULL,
    {18446744073709551615ULL, -9223372036854775807LL - 1LL, 9007199254740993LL, -5, 0, 65536}, ffi.cast('double', 3)}
all:insert{5, 'floats', box.NULL, box.NULL, {0/0, 1/0, -1/0, 1e-7, 123456789.125, 0.30000000000000004}, -0.5}
all:insert{6, '', box.NULL, box.NULL, map{[1]=1, [10]=2}}
all:insert{7, string.rep('long ', 500)}
all:replace{1, 'plain again', decimal.new('2'), box.NULL, box.NULL, 1.25}
all:update(1, {{'=', 2, 'changed'}, {'=', 'd', 2.5}, {'!', -1, false}})
all:update(1, {{':', 2, 1, 2, 'XX'}})
all.index.by_text:update('numbers', {{'=', 7, false}})
all:upsert({8, 'new'}, {{'=', 2, 'never'}})
all:upsert({8, 'new'}, {{'=', 2, 'twice'}})
all.index.by_text:delete('twice')
all:delete(7)
box.begin() all:insert{20, 't1'} all:insert{21, 't2'} all:delete(20) box.commit()
local mine = box.schema.space.create('mine', {is_local=true})
mine:create_index('pk')
mine:insert{1}
box.begin() all:insert{22, 'mixed'} mine:insert{2} box.commit()
local sync = box.schema.space.create('sync', {is_sync=true})
sync:create_index('pk')
sync:insert{1, 'kept'}
box.cfg{replication_synchro_quorum=2}
pcall(sync.insert, sync, {2, 'rolled back'})
box.cfg{replication_synchro_quorum=1}
sync:insert{3, 'kept too'}
local gone = box.schema.space.create('gone')
gone:create_index('pk')
gone:insert{1} gone:truncate() gone:insert{2} gone:drop()
box.schema.sequence.create('numbers')
box.sequence.numbers:next()
box.execute([[CREATE TABLE bin (id INT PRIMARY KEY, b VARBINARY, n NUMBER)]])
box.execute([[INSERT INTO bin VALUES (1, X'00FF61', 1.25)]])
box.snapshot()
format[8] = {'note', 'any', is_nullable=true}
all:format(format)
all:insert{30, 'later', box.NULL, box.NULL, box.NULL, box.NULL, box.NULL, 'n'}
all:insert{31, 'after the snapshot'}
"""

DUMP = """
local msgpack, digest = require('msgpack'), require('digest')
for _, name in ipairs{'all', 'mine', 'sync'} do
    for _, t in box.space[name]:pairs() do
        print(name, digest.base64_encode(msgpack.encode(t), {nowrap=true}))
    end
end
os.exit(0)
"""
"""Prints the contents of the spaces as MessagePack."""


@pytest.fixture(scope="session")
def real_log(tarantool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with all kinds of rows and values, written by a real server, and `data.txt`, its final
    contents.

    Tests must not write to it.
    """
    directory = tmp_path_factory.mktemp("real")
    (directory / "data.txt").write_text(tarantool.run(REAL_LOG + DUMP, directory))
    return directory


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shop: a snapshot and two logs with an election, a confirmed and a rolled-back transaction."""
    directory = tmp_path_factory.mktemp("demo") / "shop"
    write_shop(production(), str(directory))
    return directory


@dataclass(frozen=True)
class Result:
    """The result of a command line."""

    code: int
    out: bytes
    errors: list[str]

    @property
    def text(self) -> str:
        return self.out.decode()


Command = Callable[..., Result]


@pytest.fixture
def flowstone(capfdbinary: pytest.CaptureFixture[bytes]) -> Command:
    """Return a function that runs a command line in this process."""

    def command(*arguments: str | os.PathLike[str] | Sequence[str]) -> Result:
        capfdbinary.readouterr()
        code = run([str(argument) for argument in arguments])
        out, errors = capfdbinary.readouterr()
        return Result(code, out, errors.decode().splitlines())

    return command


class Terminal(io.StringIO):
    """A user who answers questions."""

    def isatty(self) -> bool:
        return True
