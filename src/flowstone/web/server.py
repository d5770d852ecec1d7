"""An HTTP server for an ASGI application, in the running event loop.

Uses uvicorn without its signal handlers, access log and logging configuration. Every request passes `request_log.py`
and `guard.py`. There is no ASGI lifespan: the caller runs an application's background tasks. The resources of a client
are bounded: header size, connections, the time to send a request and to read the response. At the connection limit the
server closes an old connection instead of rejecting the new one, so that probes are always answered.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from flowstone.errors import CannotListen
from flowstone.iproto.uri import Uri
from flowstone.web.address import check_token, http_address
from flowstone.web.guard import Guard
from flowstone.web.request_log import RequestLog

HEADER_SIZE_MAX: Final = 16 * 1024
CONNECTIONS_MAX: Final = 256
"""Connection limit. A further connection closes another one: an idle one first, of the address that has the most."""

REQUEST_SECONDS: Final = 30.0
"""Timeout until the first request is complete, between two requests, and for a client that does not read."""

STOP_SECONDS: Final = 1
"""Grace period for responses in progress when the server stops; event streams never end by themselves."""


class WebServer:
    """Serves `application` at `listen` (`HOST:PORT`, or a loopback port; port 0 for any free one).

    Use it as `async with WebServer(…) as server`. An address other than loopback requires a `token`
    (`address.new_token`). If there is a token, every request must send it, except requests to `open_paths`. `hosts` are
    further host names accepted without a token, for a proxy in front of loopback. `option` is the name of the option
    that sets the address, for the hint of CannotListen.
    """

    def __init__(
        self,
        application: ASGIApp,
        listen: str,
        *,
        token: str | None = None,
        hosts: Iterable[str] = (),
        open_paths: Collection[str] = (),
        option: str = "listen",
    ) -> None:
        self._place = http_address(listen)
        self._option = option
        check_token(self._place, token)
        guarded = RequestLog(Guard(application, token=token, hosts=hosts, open_paths=open_paths))
        self._server = _Server(
            uvicorn.Config(
                guarded,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(REQUEST_SECONDS),
                timeout_graceful_shutdown=STOP_SECONDS,
                h11_max_incomplete_event_size=HEADER_SIZE_MAX,
            )
        )
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """`HOST:PORT`, with the port that the kernel chose for port 0."""
        assert self._socket is not None, "server is not started"
        return Uri(self._place.host, self._socket.getsockname()[1]).address

    @property
    def url(self) -> str:
        return f"http://{self.address}/"

    async def start(self) -> None:
        """Start the server; return when it accepts requests. Raise CannotListen if the address is not available."""
        self._socket = await _bound(self._place, self._option)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        await self._server.is_answering.wait()

    async def stop(self) -> None:
        """Close all connections; close connections of event streams after STOP_SECONDS."""
        self._server.should_exit = True
        task, self._task = self._task, None
        if task is not None:
            await task

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


async def _bound(place: Uri, option: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        family, kind, protocol, _, address = (
            await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        message = f"cannot serve HTTP at {place.address}: {error.strerror or error}"
        raise CannotListen(message, hint=f"choose another {option}, or port 0 for any free port") from error
    return bound


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_answering = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_answering.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: signals are handled by the process that embeds the server."""
        yield


def _let_go_of_who_takes_nothing(transport: asyncio.Transport) -> None:
    """Let the kernel drop a client that does not read: a normal close would wait for unsent data indefinitely."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(REQUEST_SECONDS * 1000))


class _Protocol(H11Protocol):
    """HTTP protocol whose request timeout covers the whole header; uvicorn's timeout stops at its first byte."""

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._make_room()
        _let_go_of_who_takes_nothing(transport)
        self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _make_room(self) -> None:
        """At the connection limit, close one of the idlest connections: the oldest of the address that has the most."""
        others = [each for each in self.connections if isinstance(each, _Protocol) and each is not self]
        if len(others) < CONNECTIONS_MAX:
            return
        idlest = min(each._busyness for each in others)
        candidates = [each for each in others if each._busyness == idlest]
        counts = Counter(each._host for each in candidates)
        victim = min(candidates, key=lambda each: (-counts[each._host], each._since))
        self.connections.discard(victim)
        victim.transport.abort()

    @property
    def _busyness(self) -> int:
        """0 without a complete request, 1 if the client does not read the response, 2 otherwise."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            return 0
        return 1 if self.flow.write_paused else 2

    @property
    def _host(self) -> str:
        return self.client[0] if self.client else ""

    def _wait_for_request(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
