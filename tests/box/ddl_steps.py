"""The same schema changes on a real server and on a node: errors, rows of system spaces and of the log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack, unpack, unpack_body
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.reader import LogFile
from tests.box.bootstrapped import bootstrapped, delete, insert, replace, rows


class Call(NamedTuple):
    """A function of `ddl.py`, or a statement; executed by `user`."""

    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    user: str = "admin"

    @property
    def lua(self) -> str:
        text = as_lua(self.function, self.arguments, self.options)
        return text if self.user == "admin" else f"box.session.su('{self.user}', function() {text} end)"


def call(function: str, /, *arguments: Any, **options: Any) -> Call:
    return Call(function, arguments, options)


def by(user: str, /, *calls: Call) -> tuple[Call, ...]:
    """Return the calls as executed by `user`."""
    return tuple(one._replace(user=user) for one in calls)


LUA = {
    "create_space": "box.schema.space.create({args})",
    "drop_space": "box.space[{0}]:drop()",
    "rename_space": "box.space[{0}]:rename({1})",
    "format_space": "box.space[{0}]:format({1})",
    "truncate": "box.space[{0}]:truncate()",
    "create_index": "box.space[{0}]:create_index({rest})",
    "alter_index": "box.space[{0}].index[{1}]:alter({options})",
    "rename_index": "box.space[{0}].index[{1}]:rename({2})",
    "drop_index": "box.space[{0}].index[{1}]:drop()",
    "create_user": "box.schema.user.create({args})",
    "drop_user": "box.schema.user.drop({args})",
    "grant": "box.schema.user.grant({padded})",
    "revoke": "box.schema.user.revoke({padded})",
    "create_role": "box.schema.role.create({args})",
    "drop_role": "box.schema.role.drop({args})",
    "grant_role": "box.schema.role.grant({padded})",
    "revoke_role": "box.schema.role.revoke({padded})",
    "create_sequence": "box.schema.sequence.create({args})",
    "alter_sequence": "box.schema.sequence.alter({args})",
    "drop_sequence": "box.schema.sequence.drop({args})",
    "next_value": "box.sequence[{0}]:next()",
    "set_value": "box.sequence[{0}]:set({1})",
    "reset_sequence": "box.sequence[{0}]:reset()",
    "create_function": "box.schema.func.create({args})",
    "drop_function": "box.schema.func.drop({args})",
    "insert": "box.space[{0}]:insert({1})",
    "replace": "box.space[{0}]:replace({1})",
    "delete": "box.space[{0}]:delete({1})",
}


def lua(value: Any) -> str:
    if value is None:
        return "box.NULL"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "setmetatable({" + ", ".join(f"[{lua(k)}] = {lua(v)}" for k, v in value.items()) + "}, map)"
    if isinstance(value, list | tuple):
        return "{" + ", ".join(map(lua, value)) + "}"
    return str(value)


def as_lua(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    texts = [lua(argument) for argument in arguments]
    table = [lua(options)] if options else []
    padded = [*texts, *["nil"] * (4 - len(texts)), *table] if options else texts
    return LUA[name].format(
        *texts,
        args=", ".join([*texts, *table]),
        rest=", ".join([*texts[1:], *table]),
        padded=", ".join(padded),
        options=lua(options),
    )


TABLES = (
    "_schema",
    "_space",
    "_index",
    "_sequence",
    "_sequence_data",
    "_space_sequence",
    "_user",
    "_priv",
    "_truncate",
)

SCRIPT = """
box.cfg{{log='tarantool.log'}}
local json = require('json')
local map = {{__serialize = 'map'}}
local results = {{}}
local function try(f)
    local ok, e = pcall(f)
    if ok then table.insert(results, {{}})
    elseif type(e) == 'cdata' then table.insert(results, {{e.code, e.message}})
    else table.insert(results, {{-1, tostring(e)}}) end
end
{steps}
local tables = {{}}
for _, name in ipairs({{{tables}}}) do tables[name] = box.space[name]:select() end
tables._func = box.space._func.index.primary:select({{67}}, {{iterator = 'GT'}})
print(json.encode({{results, tables}}))
os.exit(0)
"""


@dataclass
class Outcome:
    """The error of each step, or None; then the rows of system spaces and of the log."""

    results: list[list[Any]]
    tables: dict[str, list[Any]]
    log: list[tuple[int, dict[int, Any]]]


def real_outcome(tarantool: Any, directory: Path, steps: tuple[Call, ...]) -> Outcome:
    text = "\n".join(f"try(function() {step.lua} end)" for step in steps)
    tables = ", ".join(f"'{table}'" for table in TABLES)
    results, found = json.loads(tarantool.run(SCRIPT.format(steps=text, tables=tables), directory))
    with LogFile.open(SystemDisk(), str(directory / f"{0:020}.xlog")) as file:
        log = [(row.type, unpack_body(row.body)) for row in file.rows()]
    return Outcome(results, {name: [unpack(pack(row)) for row in table] for name, table in found.items()}, log)


def our_outcome(steps: tuple[Call, ...]) -> Outcome:
    """Effects of earlier statements are kept after a failed one, as on a real server, where each is a transaction of
    its own.
    """
    box = bootstrapped(Dialect.V2_6)
    straight = {"insert": insert, "replace": replace, "delete": delete}
    outcome = Outcome([], {}, [])
    for step in steps:
        transaction = box.begin(box.access.user(step.user).id)
        try:
            if step.function in straight:
                straight[step.function](transaction, step.arguments[0], *step.arguments[1])
            else:
                getattr(ddl, step.function)(transaction, *step.arguments, **step.options)
            outcome.results.append([])
        except TarantoolError as error:
            outcome.results.append([error.code, error.message])
        outcome.log += [(statement.type, unpack_body(statement.body)) for statement in transaction.statements]
    outcome.tables = {table: rows(box, table) for table in (*TABLES, "_func")}
    return outcome


LUA_ONLY = -1
"""A Lua error without a code, such as `attempt to index a nil value`, for which a node has a better one."""


def differences(steps: tuple[Call, ...], real: Outcome, ours: Outcome, expected: dict[str, int]) -> list[str]:
    """Return the steps with unintended differences; `expected` has the codes of errors that differ intentionally."""
    found = []
    for step, theirs, mine in zip(steps, real.results, ours.results, strict=True):
        wanted = [expected[step.lua]] if step.lua in expected else theirs
        if mine[: len(wanted) or None] != wanted and not (mine and theirs and theirs[0] == LUA_ONLY):
            found.append(f"{step.lua}\n  real: {theirs}\n  here: {mine}")
    return found
