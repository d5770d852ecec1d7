"""A small library of books on a server, for client tests: spaces, an administrator, and a restricted reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.conformance.case import Request, column, create_index, create_space, create_user, grant, insert
from tests.conformance.reply import read_reply
from tests.conformance.target import PASSWORDS, password_hash
from tests.conformance.wire import Client
from tests.served_node import PASSWORD, USER

BOOKS, LOANS = 512, 513
READER = "alice"
READER_PASSWORD = PASSWORDS[READER]
READ, WRITE, EXECUTE, SESSION, USAGE = 1, 2, 4, 8, 16

ROWS = ([1, "Emma", 1815], [2, "Ulysses", 1922], [3, "Walden", 1854], [4, "Dubliners", 1914])

BOOKS_FORMAT = [
    column("id", "unsigned"),
    column("title", "string"),
    column("year", "unsigned"),
    column("notes", "any", is_nullable=True),
]

SETUP: tuple[Request, ...] = (
    create_space(BOOKS, "books", format=BOOKS_FORMAT),
    create_index([[0, "unsigned"]], space=BOOKS, name="primary"),
    create_index([[1, "string"]], space=BOOKS, id=1, name="title"),
    create_index([[2, "unsigned"]], space=BOOKS, id=2, name="year", options={"unique": False}),
    create_space(LOANS, "loans"),
    create_index([[0, "unsigned"]], space=LOANS, name="primary"),
    *(insert(row, space=BOOKS) for row in ROWS),
)
RIGHTS = (
    grant(40, "universe", 0, SESSION | USAGE),
    grant(40, "role", 2, EXECUTE),
    grant(40, "space", BOOKS, READ),
)


@dataclass(frozen=True)
class Library:
    """A server with the books; `version` is that of its greeting."""

    port: int
    version: tuple[int, int, int]
    is_node: bool
    user: str = USER
    password: str = PASSWORD

    @property
    def has_streams(self) -> bool:
        return self.version >= (2, 11, 0)

    def run(self, *requests: Request) -> list[Any]:
        """Run requests as the super user; each must succeed."""
        client = Client(self.port)
        try:
            client.authenticate(self.user, self.password)
            replies = [read_reply(client.request(request.type, request.body)) for request in requests]
        finally:
            client.close()
        for request, reply in zip(requests, replies, strict=True):
            assert not reply.code, f"{request}: {reply}"
        return [reply.data for reply in replies]


def open_library(port: int, *, is_node: bool) -> Library:
    """Create the spaces, users and books on the server."""
    client = Client(port)
    version = client.greeting.version
    client.close()
    library = Library(port, version, is_node)
    more = [[], 0] if library.version >= (2, 11, 0) else []  # earlier passwords, and the time of the last change
    library.run(*SETUP, create_user(40, READER, password_hash(READER), more=more), *RIGHTS)
    return library
