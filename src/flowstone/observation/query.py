"""Queries servers about themselves over IPROTO: all of them at once, each with a timeout of its own.

Connections are kept, so that polling every second does not authenticate every second. `box.info` is queried by CALL,
which nodes and every real version support. Only EVAL shows the options of a real server; they are missing from the
report if the user may not run it. `ask` only reads; `call`, `evaluate` and `delete` also serve commands that change a
server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from flowstone.client import rights
from flowstone.client.connection import HINT_OF_SILENCE, REQUEST_SECONDS, Connection
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import AccessDenied, CredsMismatch, NoSuchUser, TarantoolError
from flowstone.iproto.greeting import Greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import Uri
from flowstone.node.disk_query import NO_ANSWER
from flowstone.observation.places import place_of
from flowstone.observation.report import Report, Unreachable, printable, report_of
from flowstone.outside import Outside

ASK_SECONDS: Final = 3.0
"""Timeout of a query. A healthy server answers within milliseconds."""

_SHOWN_OPTIONS: Final = (
    "read_only",
    "wal_mode",
    "election_mode",
    "replication_timeout",
    "replication_anon",
    "replication_skip_conflict",
    "replication_synchro_quorum",
    "replication_synchro_timeout",
    "replication_connect_quorum",
    "checkpoint_interval",
    "checkpoint_count",
)
"""Options that define the role of a member and cannot contain a secret (`replication` and `listen` can)."""

DISK_USAGE: Final = "flowstone.disk_usage"
"""Function of nodes that returns the free space of their file systems."""

_OPTIONS_LUA: Final = """
local found, given = {}, box.cfg.replication
for _, name in ipairs({...}) do found[name] = box.cfg[name] end
if given == nil or given == '' then
    found.replication = 0
else
    found.replication = type(given) == 'table' and given.uri == nil and #given or 1
end
return found
"""
"""Returns the named options and the number of entries in `replication`, whose values may contain passwords and so
never leave the server."""

_NO_LOGIN: Final = (AccessDenied, NoSuchUser, CredsMismatch)


class Asking:
    """A server and the connection to it, opened by the first query and reopened when it was lost."""

    def __init__(
        self, outside: Outside, uri: Uri, *, timeout: float = ASK_SECONDS, instance: str | None = None
    ) -> None:
        """`instance` is the UUID of the expected server, if known: no other server receives the login."""
        self.uri = uri
        self._instance = instance
        self._seen = instance
        """UUID of the server at this address, which it keeps in reports while it does not answer. The greeting of
        another instance replaces it."""
        self._outside = outside
        self._timeout = timeout
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    async def ask(self) -> Report | Unreachable:
        """Return the server's report; errors are returned as `Unreachable`, never raised."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._ask()
        except _NO_LOGIN as error:
            return Unreachable(
                address=self.uri.address,
                reason=printable(error.message),
                hint=_grant_hint(self.uri, error),
                is_denied=True,
                uuid=self._seen,
            )
        except TimeoutError:
            await self.close()
            reason = f"{self.uri.address} did not answer within {self._timeout:g} s"
            return Unreachable(address=self.uri.address, reason=reason, hint=HINT_OF_SILENCE, uuid=self._seen)
        except FlowstoneError as error:
            await self.close()
            reason = printable(error.message)
            return Unreachable(address=self.uri.address, reason=reason, hint=error.hint, uuid=self._seen)

    async def report(self) -> Report:
        """Return the server's report; raise FlowstoneError if it cannot be queried."""
        answer = await self.ask()
        if isinstance(answer, Unreachable):
            raise FlowstoneError(answer.reason, hint=answer.hint)
        return answer

    async def _ask(self) -> Report:
        info = await self.call("box.info")
        if not isinstance(info, Mapping):
            raise FlowstoneError(
                f"unexpected answer from {self.uri.address}: box.info is not a table",
                hint="check that the address belongs to a Tarantool server",
            )
        gc = await _if_allowed(self.call("box.info.gc"))
        anonymous = await _if_allowed(self.call("box.info.replication_anon"))
        options = await self._options(is_flowstone=info.get("package") == "Flowstone")
        cfg = shown_options(options) if options is not None else None
        upstreams = upstreams_configured(options) if options is not None else None
        disk = await self._disk() if info.get("package") == "Flowstone" else None
        return report_of(
            self.uri.address, info, gc=gc, anonymous=anonymous, cfg=cfg, upstreams_configured=upstreams, disk=disk
        )

    async def _options(self, *, is_flowstone: bool) -> Mapping[str, Any] | None:
        asked = self.call("box.cfg") if is_flowstone else self.evaluate(_OPTIONS_LUA, *_SHOWN_OPTIONS)
        found = await _if_allowed(asked)
        return found if isinstance(found, Mapping) else None

    async def _disk(self) -> Any:
        """Return the node's disk usage; a disk that does not answer does not make the node unreachable."""
        try:
            async with asyncio.timeout(self._timeout / 2):
                return await _if_allowed(self.call(DISK_USAGE))
        except TimeoutError:
            return {"failure": NO_ANSWER}

    async def call(self, function: str, *arguments: Any, timeout: float = REQUEST_SECONDS) -> Any:
        """Call a function on the server and return its first result; raise the server's error."""
        body = pack({Key.FUNCTION_NAME: function, Key.TUPLE: list(arguments)})
        return await self._first(RequestType.CALL, body, timeout)

    async def evaluate(self, expression: str, *arguments: Any, timeout: float = REQUEST_SECONDS) -> Any:
        """Evaluate a Lua expression and return its first result. Only real servers support it."""
        body = pack({Key.EXPR: expression, Key.TUPLE: list(arguments)})
        return await self._first(RequestType.EVAL, body, timeout)

    async def get(self, space_id: int, index_id: int, key: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the first tuple with this key in an index; None if there is none."""
        body = {Key.SPACE_ID: space_id, Key.INDEX_ID: index_id, Key.LIMIT: 1, Key.OFFSET: 0, Key.ITERATOR: 0}
        found = await self._first(RequestType.SELECT, pack(body | {Key.KEY: list(key)}))
        return tuple(found) if isinstance(found, list | tuple) else None

    async def delete(self, space_id: int, index_id: int, key: Sequence[Any]) -> Any:
        """Delete the tuple with this key from a unique index and return it; None if there was none."""
        body = pack({Key.SPACE_ID: space_id, Key.INDEX_ID: index_id, Key.KEY: list(key)})
        return await self._first(RequestType.DELETE, body)

    async def _first(self, kind: RequestType, body: bytes, timeout: float = REQUEST_SECONDS) -> Any:
        connection = await self._connected()
        data = (await connection.request(kind, body, timeout=timeout)).get(Key.DATA)
        return data[0] if isinstance(data, list | tuple) and data else None

    async def _connected(self) -> Connection:
        async with self._turn:
            if self._connection is None or self._connection.is_lost:
                self._connection = await Connection.open(
                    self._outside,
                    self.uri,
                    timeout=self._timeout,
                    instance=self._instance,
                    on_greeting=self._greeted,
                )
            return self._connection

    def _greeted(self, greeting: Greeting) -> None:
        """Note which instance answers. A server that has no data yet greets with a nil UUID."""
        if self._instance is None:
            self._seen = str(greeting.uuid) if greeting.uuid.int else None

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                await connection.close()


async def ask_all(servers: Sequence[Asking]) -> list[Report | Unreachable]:
    """Query all servers at once and return their answers in the order of `servers`."""
    return list(await asyncio.gather(*(server.ask() for server in servers)))


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `box.cfg` that a report contains."""
    return {name: options[name] for name in _SHOWN_OPTIONS if name in options}


def upstreams_configured(options: Mapping[str, Any]) -> int | None:
    """Return how many servers `replication` lists, without the server itself if `listen` identifies it.

    A node omits an empty list; a real server returns only the length of the list.
    """
    listed, listen = options.get("replication", []), options.get("listen")
    if isinstance(listed, list | tuple):
        return sum(not (isinstance(each, str) and isinstance(listen, str) and _is_own(each, listen)) for each in listed)
    return listed if isinstance(listed, int) else None


def _is_own(uri: str, listen: str) -> bool:
    """Return True if a URI of `replication` is the address at which the server itself listens."""
    address = uri.rpartition("@")[2]
    if address.startswith("127.") and listen.startswith("127."):
        return address == listen  # several servers of one machine may each have a loopback address
    return place_of(address) == place_of(listen)


async def _if_allowed(answer: Awaitable[Any]) -> Any:
    """Return the answer; None if the server refuses it, because some users may call only `box.info`."""
    try:
        return await answer
    except TarantoolError:
        return None


def _grant_hint(uri: Uri, error: TarantoolError) -> str:
    return rights.to_watch(uri.user) if isinstance(error, AccessDenied) else "check user and password in the URI"
