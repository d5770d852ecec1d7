"""DDL on a node and on a real server gives the same errors, rows and log."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from flowstone.box.ddl import functions as ddl
from flowstone.box.ddl.alter_replica_set import FORMER_MEMBER
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from tests.box.bootstrapped import bootstrapped
from tests.box.ddl_steps import TABLES, Call, Outcome, call, differences, our_outcome, real_outcome

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

STEPS: tuple[Call, ...] = (
    # spaces
    call("create_space", "plain"),
    call("create_space", "plain"),
    call("create_space", "plain", if_not_exists=True),
    call("create_space", "numbered", id=600, field_count=3),
    call("create_space", "local", is_local=True),
    call("create_space", "temporary", temporary=True),
    call("create_space", "sync", is_sync=True),
    call("create_space", "lsync", is_sync=True, is_local=True),
    call("create_space", "with_engine", engine="vinyl"),
    call("create_space", "no_engine", engine="paper"),
    call("create_space", "vtemp", engine="vinyl", temporary=True),
    call("create_space", "bad option", colour="red"),
    call("create_space", "bad type", field_count="three"),
    call("create_space", ""),
    call("create_space", "new\nline"),
    call("create_space", "of guest", user="guest"),
    call("create_space", "of nobody", user="nobody"),
    call("create_space", "big", id=2**31),
    call("create_space", "zero", id=0),
    call("create_space", "taken", id=512),
    call(
        "create_space",
        "formatted",
        format=[["id", "unsigned"], {"name": "note", "type": "string", "is_nullable": True}, "rest", ["any"]],
    ),
    call("create_space", "twice", format=["a", "a"]),
    call("create_space", "odd type", format=[["a", "colour"]]),
    call("create_space", "no name", format=[{"type": "string"}]),
    call("create_space", "collated", format=[{"name": "s", "type": "string", "collation": "unicode"}]),
    call("create_space", "no collation", format=[{"name": "s", "type": "string", "collation": "klingon"}]),
    call("create_space", "number collated", format=[{"name": "s", "type": "unsigned", "collation": "unicode"}]),
    call("create_space", "short", format=["a", "b"], field_count=1),
    call("create_space", "nulls", format=[{"name": "a", "type": "string", "nullable_action": "none"}]),
    call("create_space", "nulls2", format=[{"name": "a", "type": "string", "nullable_action": "sometimes"}]),
    call("create_space", "notbool", format=[{"name": "a", "type": "string", "is_nullable": 1}]),
    call("create_space", "extra", format=[{"name": "a", "type": "string", "colour": "red"}]),
    call("create_space", "case", format=[{"name": "a", "type": "STRING"}]),
    call("rename_space", "numbered", "renamed"),
    call("rename_space", "renamed", "plain"),
    # indexes
    call("create_index", "plain", "second", id=1),
    call("create_index", "plain", "pk", unique=False),
    call("create_index", "plain", "pk", parts=[[1, "unsigned"]], type="rope"),
    call("create_index", "plain", "pk", parts=[[1, "colour"]]),
    call("create_index", "plain", "pk", parts=[]),
    call("create_index", "plain", "pk", parts=[[0, "unsigned"]]),
    call("create_index", "plain", "pk", parts=[["name", "unsigned"]]),
    call("create_index", "plain", "pk", parts=[[1, "unsigned"], [1, "unsigned"]]),
    call("create_index", "plain", "pk", parts=[{"field": 1, "type": "unsigned", "is_nullable": True}]),
    call("create_index", "plain", "pk", parts=[[1, "any"]]),
    call("create_index", "plain", "pk", parts=[[1, "array"]]),
    call("create_index", "plain", "pk", parts=[[1, "unsigned"]], colour="red"),
    call("create_index", "plain", "pk", parts=[[1, "unsigned"]], unique="yes"),
    call("create_index", "plain", "pk", parts=[{"field": 1, "type": "unsigned", "colour": 1}]),
    call("create_index", "plain", "pk", parts=[{"field": 1, "type": "unsigned", "path": "a..b"}]),
    call("create_index", "plain", "pk", parts=[{"field": 1, "type": "string", "path": "[*]"}]),
    call("create_index", "plain", "pk", id=128),
    call("create_index", "plain", "pk"),
    call("create_index", "plain", "pk"),
    call("create_index", "plain", "pk", if_not_exists=True),
    call("create_index", "plain", "hash", type="hash", unique=False, parts=[[2, "string"]]),
    call("create_index", "plain", "hash", type="hash", parts=[{"field": 2, "type": "string", "is_nullable": True}]),
    call("create_index", "plain", "hash", type="HASH", parts=[[2, "string"]]),
    call("create_index", "plain", "rtree", type="rtree", unique=True),
    call("create_index", "plain", "bitset", type="bitset", parts=[[2, "array"]]),
    call("create_index", "plain", "two", parts=[[2, "string"], [1, "unsigned"]], unique=False),
    call("create_index", "plain", "other type", parts=[[2, "unsigned"]]),
    call("create_index", "plain", "wider", parts=[[1, "integer"]]),
    call("create_index", "plain", "path", parts=[{"field": 3, "type": "string", "path": "a.b", "is_nullable": True}]),
    call("create_index", "plain", "path array", parts=[{"field": 3, "type": "string", "path": "[1]"}]),
    call("create_index", "plain", "multikey", parts=[{"field": 4, "type": "string", "path": "[*].c"}], unique=False),
    call("create_index", "plain", "single", parts=[{"field": 4, "type": "string", "path": "[1].c"}]),
    call("create_index", "plain", "stars", parts=[{"field": 5, "type": "string", "path": "[*][*]"}]),
    call("create_index", "plain", "coll", parts=[{"field": 6, "type": "string", "collation": "unicode_ci"}]),
    call("create_index", "plain", "num coll", parts=[{"field": 7, "type": "unsigned", "collation": "unicode_ci"}]),
    call("create_index", "plain", "aliases", parts=[[8, "str"], [9, "NUM"], [10, "int"]]),
    call("create_index", "plain", "old form", parts=[8, "string", 9, "unsigned"]),
    call("create_index", "plain", "odd form", parts=[8, "string", 9]),
    call("create_index", "plain", "far", parts=[[40000, "unsigned"]]),
    call("create_index", "formatted", "primary", sequence=True),
    call("create_index", "formatted", "by note", parts=["note"]),
    call("create_index", "formatted", "by number", parts=[2]),
    call("create_index", "formatted", "mismatch", parts=[["note", "unsigned"]]),
    call("create_index", "formatted", "by rest", parts=["rest"]),
    call("create_index", "formatted", "in rest", parts=[{"field": "rest.deep", "type": "string"}]),
    call("create_index", "formatted", "numbered", parts=[[1, "unsigned"]], sequence=True),
    call("create_index", "with_engine", "pk", type="hash"),
    call("create_index", "with_engine", "pk"),
    call("create_index", "collated", "pk"),
    call("create_index", "sync", "pk", parts=[[1, "string"]], sequence=True),
    call("create_index", "sync", "pk", parts=[[1, "unsigned"]], sequence="nothing"),
    call("create_index", "nowhere", "pk"),
    call("rename_index", "plain", "two", "pair"),
    call("rename_index", "plain", "pair", "pk"),
    call("drop_index", "plain", "pk"),
    call("insert", "plain", [1, "x", {"a": {"b": "y"}}, [{"c": "z"}], [], "s", 7, "s", 9, 10]),
    call("create_index", "plain", "broken by data", parts=[[2, "string"], [11, "unsigned"]]),
    call("alter_index", "plain", "pair", unique=True),
    call("alter_index", "plain", "pair", parts=[[2, "string"]]),
    call("alter_index", "plain", "pk", parts=[[1, "integer"]]),
    call("alter_index", "plain", "pk", unique=False),
    call("alter_index", "plain", "pair", id=77, name="renumbered"),
    call("drop_index", "plain", "coll"),
    call("format_space", "plain", [["first", "unsigned"]]),
    call("format_space", "plain", [["first", "string"]]),
    call("format_space", "plain", [["first", "any"], ["second", "string"], {"name": "m", "type": "map"}]),
    call("format_space", "plain", [*[f"f{n}" for n in range(11)], "missing"]),
    call("truncate", "plain"),
    call("truncate", "plain"),
    call("truncate", "_space"),
    call("insert", "formatted", [None, "a", "b", "c"]),
    call("insert", "formatted", [100, "b", "b", "c"]),
    # sequences
    call("create_sequence", "s"),
    call("create_sequence", "s"),
    call("create_sequence", "s", if_not_exists=True),
    call("create_sequence", "down", step=-2, min=-100, max=-1),
    call("create_sequence", "none", step=0),
    call("create_sequence", "upside", min=10, max=1),
    call("create_sequence", "outside", start=0),
    call("next_value", "s"),
    call("next_value", "s"),
    call("next_value", "down"),
    call("set_value", "down", -50),
    call("alter_sequence", "s", step=10, name="tens"),
    call("next_value", "tens"),
    call("alter_sequence", "tens", min=5000),
    call("create_index", "sync", "pk", parts=[[1, "unsigned"]], sequence="tens"),
    call("drop_sequence", "tens"),
    call("drop_sequence", "formatted_seq"),
    call("create_index", "local", "pk", sequence="formatted_seq"),
    call("alter_index", "sync", "pk", sequence=False),
    call("drop_sequence", "tens"),
    call("reset_sequence", "down"),
    call("drop_sequence", "gone"),
    call("drop_index", "formatted", "primary"),
    # users, roles, privileges
    call("create_user", "bob", password="secret"),
    call("create_user", "bob"),
    call("create_user", "bob", if_not_exists=True),
    call("create_user", "alice"),
    call("create_user", "super"),
    call("create_user", ""),
    call("create_role", "clerks"),
    call("create_role", "chiefs"),
    call("create_role", "clerks"),
    call("create_role", "bob"),
    call("grant", "bob", "read,write", "space", "plain"),
    call("grant", "bob", "read", "space", "plain"),
    call("grant", "bob", "execute", "space", "plain"),
    call("grant", "bob", "session", "space", "plain"),
    call("grant", "bob", "read", "space"),
    call("grant", "bob", "read", "space", "nowhere"),
    call("grant", "bob", "read", "sequence", "down"),
    call("grant", "bob", "execute", "function", "nothing"),
    call("grant", "bob", "execute", "universe"),
    call("grant", "bob", "execute", "universe"),
    call("grant", "bob", "execute", "universe", None, if_not_exists=True),
    call("grant", "bob", "dance", "universe"),
    call("grant", "bob", "read", "planet"),
    call("grant", "nobody", "read", "universe"),
    call("grant", "clerks", "read", "universe"),
    call("grant", "bob", "clerks"),
    call("grant", "bob", "clerks"),
    call("grant", "bob", "strangers"),
    call("grant_role", "clerks", "read", "space", "formatted"),
    call("grant_role", "clerks", "session", "universe"),
    call("grant_role", "chiefs", "clerks"),
    call("grant_role", "clerks", "chiefs"),
    call("grant_role", "clerks", "clerks"),
    call("revoke", "bob", "write", "space", "plain"),
    call("revoke", "bob", "write", "space", "plain"),
    call("revoke", "bob", "read", "space", "plain"),
    call("revoke", "bob", "read", "space", "plain"),
    call("revoke", "bob", "read", "space", "plain", if_exists=True),
    call("revoke", "bob", "chiefs"),
    call("revoke", "admin", "read", "universe"),
    call("revoke_role", "chiefs", "clerks"),
    call("drop_role", "public"),
    call("drop_role", "super"),
    call("drop_user", "guest"),
    call("drop_user", "admin"),
    call("drop_user", "nobody"),
    call("drop_user", "nobody", if_exists=True),
    call("drop_role", "clerks"),
    # functions
    call("create_function", "f"),
    call("create_function", "f"),
    call("create_function", "f", if_not_exists=True),
    call("create_function", "g", language="C", setuid=True, comment="about"),
    call("create_function", "h", language="COBOL"),
    call("create_function", "h", is_sandboxed=True),
    call("create_function", "h", returns="colour"),
    call("create_function", "h", exports=["COBOL"]),
    call("create_function", "h", language="C", body="x"),
    call("grant", "bob", "execute", "function", "f"),
    call("drop_function", "f"),
    call("drop_function", "TRIM"),
    call("drop_function", "gone"),
    # rows of system spaces, written directly
    call("insert", "_space", [700, 1, "raw", "memtx", 0, {}, []]),
    call("insert", "_space", [701, 1, "raw", "memtx", 0, {}, []]),
    call("insert", "_space", [702, 1, "flagged", "memtx", 0, {"colour": "red"}, []]),
    call("insert", "_space", [703, 1, "grouped", "memtx", 0, {"group_id": 7}, []]),
    call("insert", "_space", [704, 1, "viewed", "memtx", 0, {"view": True}, []]),
    call("insert", "_space", [705, 1, "unmapped", "memtx", 0, {}, ["a"]]),
    call("replace", "_space", [700, 1, "raw", "vinyl", 0, {}, []]),
    call("replace", "_space", [700, 1, "raw", "memtx", 0, {"group_id": 1}, []]),
    call("replace", "_space", [700, 1, "raw", "memtx", 3, {"is_sync": True}, []]),
    call("insert", "_index", [700, 0, "i", "tree", {"unique": True}, [[0, "unsigned"]], "more"]),
    call("insert", "_index", [700, 0, "i", "tree", {"colour": True}, [[0, "unsigned"]]]),
    call("insert", "_index", [700, 0, "i", "tree", {"unique": 1}, [[0, "unsigned"]]]),
    call("insert", "_index", [700, 0, "i", "tree", {"bloom_fpr": 2}, [[0, "unsigned"]]]),
    call("insert", "_index", [700, 0, "i", "tree", {"page_size": 0}, [[0, "unsigned"]]]),
    call("insert", "_index", [700, 0, "i", "tree", {}, []]),
    call("insert", "_index", [700, 0, "i", "tree", {}, [[0]]]),
    call("insert", "_index", [700, 0, "i", "tree", {}, [["a", "unsigned"]]]),
    call("insert", "_index", [700, 0, "i", "tree", {}, [{"field": 0, "type": "unsigned", "sort_order": "up"}]]),
    call("insert", "_index", [700, 0, "i", "tree", {}, [{"field": 0, "type": "unsigned", "collation": 9999}]]),
    call("insert", "_index", [700, 0, "i", "tree", {}, [{"field": 0, "type": "string", "collation": 9999}]]),
    call("insert", "_index", [699, 0, "i", "tree", {}, [[0, "unsigned"]]]),
    call("insert", "_index", [700, 0, "i", "tree", {}, [[0, "unsigned"]]]),
    call("delete", "_space", [700]),
    call("delete", "_index", [280, 0]),
    call("insert", "_user", [40, 1, "raw user", "user", "secret"]),
    call("insert", "_user", [40, 1, "raw user", "user", {"chap-sha1": "secret"}]),
    call("insert", "_user", [40, 1, "raw user", "robot", {}]),
    call("insert", "_user", [40, 1, "raw role", "role", {"chap-sha1": "vhvewKp0tNyweZQ+cFKAlsyphfg="}]),
    call("replace", "_user", [0, 1, "guest", "user", {"chap-sha1": "FOZVZ6vbUTXQz9pnXS0gkfdjdNM="}]),
    call("delete", "_user", [1]),
    call("delete", "_user", [33]),
    call("insert", "_priv", [1, 33, "universe", 0, 0]),
    call("insert", "_priv", [1, 99, "universe", 0, 1]),
    call("insert", "_priv", [99, 33, "universe", 0, 1]),
    call("insert", "_priv", [33, 32, "universe", 0, 1]),
    call("insert", "_priv", [1, 33, "planet", 0, 1]),
    call("insert", "_priv", [1, 33, "function", 9999, 4]),
    call("insert", "_priv", [1, 33, "sequence", 9999, 1]),
    call("insert", "_priv", [1, 33, "role", 32, 4]),
    call("insert", "_priv", [1, 33, "user", 2, 128]),
    call("replace", "_priv", [1, 1, "universe", 0, 1]),
    call("insert", "_cluster", [0, "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa"]),
    call("insert", "_cluster", [32, "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa"]),
    call("insert", "_cluster", [2, "no uuid"]),
    call("insert", "_cluster", [2, "00000000-0000-0000-0000-000000000000"]),
    call("insert", "_cluster", [2, "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa"]),
    call("replace", "_cluster", [2, "bbbbbbbb-aaaa-4aaa-8aaa-aaaaaaaaaaaa"]),
    call("delete", "_cluster", [2]),
    call("insert", "_collation", [1000, "mine", 1, "ICU", "de_DE", {"strength": "primary"}]),
    call("insert", "_collation", [1001, "odd", 1, "ABACUS", "", {}]),
    call("insert", "_collation", [1001, "odd", 1, "ICU", "", {"strength": "weak"}]),
    call("insert", "_collation", [1001, "odd", 1, "ICU", "", {"colour": "red"}]),
    call("replace", "_collation", [1000, "other", 1, "ICU", "de_DE", {"strength": "primary"}]),
    call("delete", "_collation", [0]),
    call("delete", "_collation", [1000]),
    call("delete", "_schema", ["cluster"]),
    call("insert", "_sequence_data", [9999, 1]),
    call("insert", "_space_sequence", [600, 9999, False, 0, ""]),
    call("insert", "_vspace", [1, 2]),
    # drops
    call("drop_user", "bob"),
    call("drop_space", "formatted"),
    call("drop_space", "plain"),
    call("drop_space", "nowhere"),
)


DIFFERENT = {
    # The server's bit operations turn 4294967295 without read into -2.
    'box.schema.user.revoke("admin", "read", "universe")': 88,
}
"""Places where our error is better than the real one, and its code."""


@pytest.fixture(scope="module")
def real(tarantool: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return real_outcome(tarantool, tmp_path_factory.mktemp("real"), STEPS)


@pytest.fixture(scope="module")
def ours() -> Outcome:
    return our_outcome(STEPS)


def test_every_step_has_the_result_of_the_real_server(real: Outcome, ours: Outcome) -> None:
    found = differences(STEPS, real, ours, DIFFERENT)
    assert not found, f"{len(found)} of {len(STEPS)}\n" + "\n".join(found)


OWN_KEYS = "cluster", FORMER_MEMBER
"""Prefixes of keys of `_schema` that differ: the UUID of the replica set, and records that real servers do not have."""


@pytest.mark.parametrize("table", [*TABLES, "_func"])
def test_rows_equal_those_of_the_real_server(real: Outcome, ours: Outcome, table: str) -> None:
    mine, theirs = ours.tables[table], real.tables[table]
    if table == "_func":
        mine, theirs = ([without_times(row) for row in found if row[0] > 67] for found in (mine, theirs))
    if table == "_schema":
        mine, theirs = ([row for row in found if not row[0].startswith(OWN_KEYS)] for found in (mine, theirs))
    assert mine == theirs


def without_times(row: Any) -> Any:
    """Return a row of `_func` up to its creation time."""
    return row[:17]


def test_log_equals_that_of_the_real_server(real: Outcome, ours: Outcome) -> None:
    def comparable(log: list[tuple[int, dict[int, Any]]]) -> list[Any]:
        return [
            (
                type,
                body | {Key.TUPLE: without_times(body[Key.TUPLE])}
                if body[Key.SPACE_ID] == 296 and type == RequestType.INSERT
                else body,
            )
            for type, body in log
            if not str(body.get(Key.TUPLE, (None,))[0]).startswith(FORMER_MEMBER)
        ]

    mine, theirs = comparable(ours.log), comparable(real.log)
    for number, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        assert left == right, f"row {number}"
    assert len(mine) == len(theirs)


def test_every_function_is_in_the_registry() -> None:
    assert sorted(ddl.__all__) == ddl.__all__
    assert all(callable(getattr(ddl, name)) for name in ddl.__all__)


@pytest.mark.parametrize(
    "junk", [None, 0, -1, 1.5, True, "", "t", b"x", (), ("a",), {}, {"name": "a"}, {1: {}}, 10**19]
)
def test_arguments_of_any_type_raise_an_error_with_a_code(junk: Any) -> None:
    box = bootstrapped()
    for name in ddl.__all__:
        function = getattr(ddl, name)
        wanted = [
            parameter
            for parameter in list(inspect.signature(function).parameters.values())[1:]
            if parameter.default is parameter.empty and parameter.kind in POSITIONAL
        ]
        transaction = box.begin()
        try:
            function(transaction, *[junk for _ in wanted])
        except FlowstoneError:
            pass
        finally:
            transaction.rollback()
