"""`flowstone.connect`: a client of a replica set inside a program, with or without an event loop.

Only checks the options and opens the client; `client.py` and `blocking_client.py` are the clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from flowstone.client.blocking_client import BlockingClient
from flowstone.client.client import Client
from flowstone.client.pool import ReadFrom, checked_place
from flowstone.errors import LocalProtocolError
from flowstone.iproto.uri import Uri, parse_members, with_login
from flowstone.outside import Outside, production
from flowstone.outside.loop_thread import LoopThread


def connect(
    uri: str | Iterable[str],
    *,
    user: str | None = None,
    password: str | None = None,
    read_from: ReadFrom = "leader",
    connect_timeout: float = 5.0,
    request_timeout: float = 30.0,
    outside: Outside | None = None,
) -> Connecting:
    """Connect to a server or a replica set: Flowstone nodes, and Tarantool from 2.6 on.

    The client is connected to all members, and finds the leader among them. A program without an event loop uses `with`
    instead of `async with`: that client has the same methods as plain calls, which may be called from any thread.

    Args:
        uri: Address of the server, or the addresses of several members of one replica set: a list, or one string with
            commas between them. Parameters as `?transport=ssl&ssl_ca_file=…` select TLS.
        user: Login for addresses without one. By default, the guest.
        password: Its password.
        read_from: Where reads go: `"leader"`; `"any"`, any connected member; or a number of seconds, any member that
            lacks no change that is older. Members report their positions twice per second: give at least 1.
        connect_timeout: Seconds in which a member must accept a connection, and answer that it is alive.
        request_timeout: Seconds in which a request must be answered, including the search for a leader.
        outside: The door to network and clock; for tests.

    Returns:
        A context manager. `async with` yields a `Client`, `with` yields a `BlockingClient`. Entering it raises
        NoMember, or the error of the only member, if no member can be connected.

    Raises:
        UriError: `uri` is not a valid address, or list of addresses, or a password is given without a user.
        LocalProtocolError: Another argument is not valid, as a password that is not a `str`.

    Example:
        members = "app:secret@db1:3301,app:secret@db2:3301,app:secret@db3:3301"
        async with flowstone.connect(members, read_from=2.0) as client:
            orders = client.space("orders")
            await orders.insert({"id": 42, "status": "new"})           # through the leader, whichever it is
            print(await orders.get(42), await orders.select(limit=10))
            async with client.transaction() as transaction:            # servers from 2.10 on
                await transaction.space("orders").update(42, {"status": "paid"})
    """
    members = tuple(with_login(member, user, password) for member in parse_members(uri))
    for member in members:
        _check_text("user", member.user)
        _check_text("password", member.password)
    checked_place(read_from)
    _check_seconds("connect_timeout", connect_timeout)
    _check_seconds("request_timeout", request_timeout)
    return Connecting(
        outside if outside is not None else production(), members, read_from, connect_timeout, request_timeout
    )


def _check_text(name: str, text: object) -> None:
    """Raise LocalProtocolError if `text` cannot be sent; the error does not show it."""
    if text is None:
        return
    try:
        if isinstance(text, str):
            text.encode("utf-8", "surrogateescape")
            return
    except UnicodeEncodeError:
        pass
    raise LocalProtocolError(f"{name} is not a text", hint="use a str without lone surrogates")


def _check_seconds(name: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise LocalProtocolError(f"{name} is {seconds!r}", hint="use a number of seconds greater than 0")


class Connecting:
    """The context manager that `connect` returns: the client is open until the `async with` or `with` block ends."""

    def __init__(
        self, outside: Outside, members: tuple[Uri, ...], read_from: ReadFrom, connect_timeout: float, timeout: float
    ) -> None:
        self._arguments = outside, members
        self._read_from = read_from
        self._connect_timeout = connect_timeout
        self._timeout = timeout
        self._client: Client | None = None
        self._thread: LoopThread | None = None

    async def __aenter__(self) -> Client:
        """Connect, and return the client.

        Raises:
            NoMember: No member can be connected. For a single one, its error is raised.
            LocalProtocolError: This result of `connect` was already used.
        """
        self._check_unused()
        return await self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()

    def __enter__(self) -> BlockingClient:
        """Connect, with an event loop in a new thread, and return the client.

        Raises:
            NoMember: No member can be connected. For a single one, its error is raised.
            LocalProtocolError: This result of `connect` was already used.
        """
        self._check_unused()
        thread = self._thread = LoopThread("flowstone-client")
        try:
            return BlockingClient(thread.run(self._open()), thread)
        except BaseException:
            thread.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        assert self._thread is not None
        try:
            self._thread.run(self._client.close())
        finally:
            self._thread.close()

    async def _open(self) -> Client:
        client = self._client = Client(
            *self._arguments,
            read_from=self._read_from,
            connect_timeout=self._connect_timeout,
            request_timeout=self._timeout,
        )
        await client.open()
        return client

    def _check_unused(self) -> None:
        if self._client is not None:
            raise LocalProtocolError("result of connect was already used", hint="call connect again")
