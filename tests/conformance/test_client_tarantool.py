"""The official connector `tarantool` on a node, and on the real server, which validates the tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
import tarantool as connector
from tarantool.const import (
    ITERATOR_ALL,
    ITERATOR_GE,
    ITERATOR_GT,
    ITERATOR_LE,
    ITERATOR_LT,
    ITERATOR_REQ,
)
from tarantool.error import DatabaseError, SchemaError

from tests.conformance.case import alter_space, create_index, create_space, drop_index, drop_space, truncate
from tests.conformance.library import BOOKS_FORMAT, LOANS, READER, READER_PASSWORD, ROWS, Library

pytestmark = pytest.mark.real


def connect(library: Library, **options: Any) -> Any:
    login = {"user": library.user, "password": library.password} | options
    return connector.Connection("127.0.0.1", library.port, **login)


@pytest.fixture
def connection(library: Library) -> Iterator[Any]:
    opened = connect(library)
    yield opened
    opened.close()


@pytest.fixture
def loans(library: Library, connection: Any) -> Any:
    """Yield a connection; the space `loans` is empty."""
    library.run(truncate(LOANS))
    return connection


def test_connection_reports_the_server_version(library: Library, connection: Any) -> None:
    assert connection.ping() > 0
    assert connection.version_id == (library.version[0] << 16 | library.version[1] << 8 | library.version[2])
    assert isinstance(connection.uuid, uuid.UUID)


def test_client_connects_as_guest(library: Library) -> None:
    guest = connect(library, user=None, password=None)
    assert guest.ping() > 0
    with pytest.raises(DatabaseError, match="Read access to space 'books' is denied for user 'guest'"):
        guest.select(512)
    guest.close()


def test_server_has_the_features_of_the_dialect(library: Library, connection: Any) -> None:
    if library.has_streams:
        assert connection._server_protocol_version == 6
        assert connection._server_features == [0, 1, 2, 3, 4, 5, 6]
    else:
        assert not connection._server_features


@pytest.mark.parametrize("password", ["wrong", ""])
def test_wrong_password_is_rejected(library: Library, password: str) -> None:
    stranger = connect(library, password=password, connect_now=False)
    with pytest.raises(DatabaseError) as caught:
        stranger.connect()
    stranger.close()
    assert "Incorrect password supplied for user 'first'" in str(caught.value)
    assert "47" in str(caught.value)


def test_client_loads_the_schema(library: Library, connection: Any) -> None:
    space = connection.schema.get_space("books")
    assert (space.sid, space.name) == (512, "books")
    assert connection.schema.get_index("books", "year").iid == 2
    assert connection.schema.get_index("books", 1).name == "title"
    with pytest.raises(SchemaError):
        connection.schema.get_space("nothing")
    with pytest.raises(SchemaError):
        connection.schema.get_index("books", "nothing")


def test_user_with_few_privileges_sees_only_granted_spaces(library: Library) -> None:
    reader = connect(library, user=READER, password=READER_PASSWORD)
    assert reader.select("books", 1).data == [ROWS[0]]
    with pytest.raises(SchemaError):
        reader.select("loans")
    with pytest.raises(DatabaseError) as caught:
        reader.insert("books", (9, "Mine", 2000))
    assert caught.value.args == (42, "Write access to space 'books' is denied for user 'alice'")
    error = caught.value.extra_info
    assert (error.type, error.errcode) == ("AccessDeniedError", 42)
    assert error.fields == {"object_type": "space", "object_name": "books", "access_type": "Write"}
    reader.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"key": 2}, [2]),
        ({"key": "Emma", "index": "title"}, [1]),
        ({"key": 1900, "index": "year", "iterator": ITERATOR_GE}, [4, 2]),
        ({"key": 1900, "index": "year", "iterator": ITERATOR_LT}, [3, 1]),
        ({"key": 2, "iterator": ITERATOR_GT}, [3, 4]),
        ({"key": 2, "iterator": ITERATOR_LE}, [2, 1]),
        ({"iterator": ITERATOR_ALL, "offset": 1, "limit": 2}, [2, 3]),
        ({"key": 1922, "index": "year", "iterator": ITERATOR_REQ}, [2]),
        ({"key": 99}, []),
        ({}, [1, 2, 3, 4]),
    ],
)
def test_select_returns_matching_tuples(connection: Any, options: dict[str, Any], expected: list[int]) -> None:
    assert [row[0] for row in connection.select("books", **options)] == expected


def test_every_kind_of_write(loans: Any) -> None:
    assert loans.insert("loans", (1, "ann", 3)).data == [[1, "ann", 3]]
    assert loans.replace("loans", (1, "bob", 4)).data == [[1, "bob", 4]]
    assert loans.update("loans", 1, [("+", 2, 10), ("=", 1, "cid"), ("!", 3, "new")]).data == [[1, "cid", 14, "new"]]
    assert loans.upsert("loans", (1, "", 0), [("-", 2, 4)]).data == []
    assert loans.upsert("loans", (2, "dot", 0), [("-", 2, 4)]).data == []
    assert loans.select("loans").data == [[1, "cid", 10, "new"], [2, "dot", 0]]
    assert loans.delete("loans", 1).data == [[1, "cid", 10, "new"]]
    assert loans.delete("loans", 1).data == []
    assert loans.space("loans").select().data == [[2, "dot", 0]]


def test_values_of_every_type_round_trip(loans: Any) -> None:
    row: list[Any] = [
        1,
        -(2**63),
        2**64 - 1,
        1.5,
        True,
        None,
        "é\0",
        b"\xff",
        Decimal("12.50"),
        uuid.UUID(int=5),
        [1, [2]],
        {"a": {}},
    ]
    loans.insert("loans", row)
    assert loans.select("loans", 1).data == [row]


NOT_A_STRING = "Tuple field 2 type does not match one required by operation: expected string"
NOT_A_NUMBER = "Argument type in operation '+' on field 2 does not match field type: expected a number"
NOT_UNSIGNED = "Supplied key type of part 0 does not match index part type: expected unsigned"


@pytest.mark.parametrize(
    ("method", "arguments", "code", "text"),
    [
        ("insert", ["books", (1, "x", 1)], 3, "Duplicate key exists in unique index 'primary' in space 'books'"),
        ("insert", ["books", (9, 5, 1)], 23, NOT_A_STRING),
        ("insert", ["books", (9,)], 39, "Tuple field 2 required by space format is missing"),
        ("select", ["books", "x"], 18, NOT_UNSIGNED),
        ("select", ["books", (1, 2)], 31, "Invalid key part count (expected [0..1], got 2)"),
        ("update", ["books", 1, [("+", 1, 1)]], 26, NOT_A_NUMBER),
        ("delete", ["books", (1, 2)], 19, "Invalid key part count in an exact match (expected 1, got 2)"),
        ("select", [999, 1], 36, "Space '999' does not exist"),
        ("call", ["nothing"], 33, "Procedure 'nothing' is not defined"),
    ],
)
def test_errors_have_code_text_and_class(
    connection: Any, method: str, arguments: list[Any], code: int, text: str
) -> None:
    with pytest.raises(DatabaseError) as caught:
        getattr(connection, method)(*arguments)
    assert caught.value.args == (code, text)
    error = caught.value.extra_info
    assert (error.type, error.errcode, error.message, error.errno) == ("ClientError", code, text, 0)
    assert error.prev is None


def test_client_reads_the_schema_again_after_a_change(library: Library, connection: Any) -> None:
    library.run(create_space(600, "later"), create_index([[0, "string"]], space=600, name="primary"))
    assert connection.insert("later", ("a",)).data == [["a"]]
    library.run(alter_space(512, "tomes", format=BOOKS_FORMAT))
    assert connection.select("tomes", 1).data == [ROWS[0]]
    library.run(alter_space(512, "books", format=BOOKS_FORMAT), drop_index(0, space=600), drop_space(600))
    with pytest.raises(DatabaseError):
        connection.insert("later", ("b",))


def test_client_calls_built_in_functions(connection: Any) -> None:
    info = connection.call("box.info").data[0]
    assert info["status"] == "running"
    assert info["ro"] is False
    assert info["uuid"] == str(connection.uuid)
    assert connection.call("box.space.books:len").data == [4]
    assert connection.call("box.space.books.index.year:max").data == [ROWS[1]]


def test_lua_is_executed(connection: Any) -> None:
    assert connection.eval("return 1").data == [1]


def test_node_rejects_sql_with_one_sentence(library: Library, connection: Any) -> None:
    if not library.is_node:
        assert connection.execute("SELECT 1").data == [[1]]
        return
    with pytest.raises(DatabaseError) as caught:
        connection.execute("SELECT 1")
    assert caught.value.args[0] == 5
    assert "not support" in caught.value.args[1]
    assert connection.ping() > 0


def test_client_accepts_a_mesh_of_one_server(library: Library) -> None:
    mesh = connector.MeshConnection("127.0.0.1", library.port, user=library.user, password=library.password)
    assert mesh.select("books", 1).data == [ROWS[0]]
    mesh.close()


def test_db_api_connects(library: Library) -> None:
    opened = connector.connect("127.0.0.1", library.port, user=library.user, password=library.password)
    assert opened.ping() > 0
    opened.close()


def test_hash_index_is_read_in_pages(library: Library, connection: Any) -> None:
    """Each page begins after the last key of the previous one, in the order of the server."""
    shelves = 601
    library.run(create_space(shelves, "shelves"), create_index([[0, "unsigned"]], space=shelves, type="hash"))
    try:
        rows = [(number * 37, f"shelf {number}") for number in range(50)]
        for row in rows:
            connection.insert(shelves, row)
        found: list[Any] = []
        piece = connection.select(shelves, limit=7, iterator=ITERATOR_GT).data
        while piece:
            found += piece
            assert len(found) <= len(rows)
            piece = connection.select(shelves, piece[-1][0], limit=7, iterator=ITERATOR_GT).data
        assert sorted(map(tuple, found)) == rows
    finally:
        library.run(drop_index(0, space=shelves), drop_space(shelves))
