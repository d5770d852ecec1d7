"""asynctnt on a node, and on the real server, which validates the tests. Streams: `test_client_asynctnt_streams.py`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import asynctnt
import pytest
from asynctnt import Iterator as Order
from asynctnt.exceptions import TarantoolDatabaseError, TarantoolSchemaError

from tests.conformance.case import create_index, create_space, drop_index, drop_space, truncate
from tests.conformance.library import LOANS, READER, READER_PASSWORD, ROWS, Library

pytestmark = pytest.mark.real


async def connect(library: Library, **options: Any) -> Any:
    login = {"username": library.user, "password": library.password} | options
    return await asynctnt.connect(host="127.0.0.1", port=library.port, reconnect_timeout=0, **login)


@pytest.fixture
async def connection(library: Library) -> AsyncIterator[Any]:
    opened = await connect(library)
    yield opened
    await opened.disconnect()


@pytest.fixture
async def loans(library: Library, connection: Any) -> Any:
    """Yield a connection; the space `loans` is empty."""
    library.run(truncate(LOANS))
    return connection


def rows(response: Any) -> list[list[Any]]:
    return [list(row) for row in response.body]


async def test_client_connects_and_reads_the_version(library: Library, connection: Any) -> None:
    assert connection.version == library.version
    assert connection.is_fully_connected
    assert (await connection.ping()).code == 0
    assert connection.features.streams is library.has_streams
    assert connection.features.transactions is library.has_streams


async def test_wrong_password_is_rejected(library: Library) -> None:
    with pytest.raises(TarantoolDatabaseError) as caught:
        await connect(library, password="wrong")
    assert (caught.value.code, caught.value.message) == (47, "Incorrect password supplied for user 'first'")


async def test_client_loads_the_schema_and_names_the_fields(connection: Any) -> None:
    space = connection.schema.spaces["books"]
    assert (space.sid, space.name) == (512, "books")
    assert [space.indexes[number].name for number in range(3)] == ["primary", "title", "year"]
    row = (await connection.select("books", ["Emma"], index="title")).body[0]
    assert (row["id"], row["title"], row["year"]) == (1, "Emma", 1815)
    with pytest.raises(TarantoolSchemaError):
        await connection.select("nothing")


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ([[2]], {}, [2]),
        ([["Walden"]], {"index": "title"}, [3]),
        ([[1900]], {"index": "year", "iterator": Order.GE}, [4, 2]),
        ([[1900]], {"index": 2, "iterator": Order.LT, "limit": 1}, [3]),
        ([[]], {"iterator": Order.ALL, "offset": 2}, [3, 4]),
        ([[4]], {"iterator": Order.LE, "limit": 3}, [4, 3, 2]),
    ],
)
async def test_select_returns_matching_tuples(
    connection: Any, arguments: list[Any], options: dict[str, Any], expected: list[int]
) -> None:
    assert [row[0] for row in rows(await connection.select("books", *arguments, **options))] == expected


async def test_every_kind_of_write(loans: Any) -> None:
    assert rows(await loans.insert("loans", [1, "ann", 3])) == [[1, "ann", 3]]
    assert rows(await loans.replace("loans", [1, "bob", 4])) == [[1, "bob", 4]]
    assert rows(await loans.update("loans", [1], [["+", 2, 10], ["=", 1, "cid"]])) == [[1, "cid", 14]]
    assert rows(await loans.upsert("loans", [1, "", 0], [["-", 2, 4]])) == []
    assert rows(await loans.upsert("loans", [2, "dot", 0], [["-", 2, 4]])) == []
    assert rows(await loans.select("loans")) == [[1, "cid", 10], [2, "dot", 0]]
    assert rows(await loans.delete("loans", [1])) == [[1, "cid", 10]]
    assert rows(await loans.delete("loans", [1])) == []


async def test_writes_by_field_name(library: Library, connection: Any) -> None:
    written = await connection.replace("books", {"id": 7, "title": "Middlemarch", "year": 1871})
    assert rows(written) == [[7, "Middlemarch", 1871, None]]
    assert rows(await connection.update("books", [7], [["+", "year", 1]])) == [[7, "Middlemarch", 1872, None]]
    assert rows(await connection.delete("books", [7])) == [[7, "Middlemarch", 1872, None]]


async def test_values_of_every_type_round_trip(loans: Any) -> None:
    row: list[Any] = [
        1,
        -(2**63),
        2**64 - 1,
        1.5,
        True,
        None,
        "é\0",
        Decimal("12.50"),
        uuid.UUID(int=5),
        [1, [2]],
        {"a": {}},
    ]
    await loans.insert("loans", row)
    assert rows(await loans.select("loans", [1])) == [row]


async def test_thousand_requests_in_flight_are_all_answered(loans: Any) -> None:
    await asyncio.gather(*(loans.insert("loans", [number, "x" * number]) for number in range(1000)))
    found = await asyncio.gather(*(loans.select("loans", [number]) for number in range(1000)))
    assert [rows(response)[0][0] for response in found] == list(range(1000))
    assert len(rows(await loans.select("loans"))) == 1000


@pytest.mark.parametrize(
    ("method", "arguments", "code", "text"),
    [
        ("insert", ["books", [1, "x", 1]], 3, "Duplicate key exists in unique index 'primary' in space 'books'"),
        ("insert", ["books", [9]], 39, "Tuple field 2 required by space format is missing"),
        ("update", ["books", [1], [["+", 9, 1]]], 37, "Field 10 was not found in the tuple"),
        ("delete", ["books", [1, 2]], 19, "Invalid key part count in an exact match (expected 1, got 2)"),
        ("call", ["nothing", []], 33, "Procedure 'nothing' is not defined"),
    ],
)
async def test_errors_have_code_text_and_class(
    connection: Any, method: str, arguments: list[Any], code: int, text: str
) -> None:
    with pytest.raises(TarantoolDatabaseError) as caught:
        await getattr(connection, method)(*arguments)
    assert (caught.value.code, caught.value.message) == (code, text)
    frame = caught.value.error.trace[0]
    assert (frame.error_type, frame.code, frame.message, frame.err_no) == ("ClientError", code, text, 0)


async def test_error_names_the_cause(library: Library) -> None:
    reader = await connect(library, username=READER, password=READER_PASSWORD)
    assert rows(await reader.select("books", [1])) == [[*ROWS[0]]]
    with pytest.raises(TarantoolDatabaseError) as caught:
        await reader.delete("books", [1])
    frame = caught.value.error.trace[0]
    assert (caught.value.code, frame.error_type) == (42, "AccessDeniedError")
    assert frame.fields == {"object_type": "space", "object_name": "books", "access_type": "Write"}
    await reader.disconnect()


async def test_client_reads_the_schema_again_after_a_change(library: Library, connection: Any) -> None:
    before = connection.schema_id
    library.run(create_space(600, "later"), create_index([[0, "string"]], space=600, name="primary"))
    await connection.ping()
    await connection.refetch_schema()
    assert connection.schema_id > before
    assert rows(await connection.insert("later", ["a"])) == [["a"]]
    library.run(drop_index(0, space=600), drop_space(600))


async def test_client_calls_built_in_functions(connection: Any) -> None:
    info = (await connection.call("box.info")).body[0]
    assert (info["status"], info["ro"]) == ("running", False)
    assert (await connection.call("box.space.books:count")).body[0] == 4
