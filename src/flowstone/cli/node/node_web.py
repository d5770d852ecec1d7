"""The HTTP server of a served node: metrics, health and, if enabled, the dashboard.

It runs as long as the process, and answers even while the node is starting or waiting for peers, when probes need an
answer.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from flowstone.cli.http_options import HttpPlace, place_of
from flowstone.cli.node.process_options import ProcessOptions
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node.configuration import listen_uri
from flowstone.node.node import Node
from flowstone.observation import places
from flowstone.outside import production

if TYPE_CHECKING:
    from starlette.applications import Starlette

LOG = logging.getLogger("flowstone.web")


class NodeWeb:
    """The HTTP server of `node`. Does nothing if `http_listen` is not set."""

    def __init__(self, node: Node, options: ProcessOptions, user: tuple[str, str] | None) -> None:
        self._node = node
        self._options = options
        self._user = user
        self._stack = AsyncExitStack()
        self._place = place_of(options.http_listen, options.http_token)

    async def start(self) -> None:
        """Start the server, and return when it answers. Raise an error if it cannot."""
        if self._place is not None:
            await self._start(self._place)

    async def _start(self, place: HttpPlace) -> None:
        from flowstone.web.node_metrics import NodeMetrics

        options = self._options
        page = await self._page() if options.dashboard else None
        metrics = NodeMetrics(self._node, self._own())
        metrics.complaints.start()
        self._stack.callback(metrics.complaints.stop)
        web = place.server(metrics, page, options.http_hosts)
        await self._stack.enter_async_context(web)
        LOG.info("%s at %s", "metrics, health and dashboard" if options.dashboard else "metrics and health", web.url)
        place.tell_token(web.url)

    async def _page(self) -> Starlette:
        from flowstone.web.dashboard import page
        from flowstone.web.feed import Feed
        from flowstone.web.node_view import NodeView

        outside = production()
        feed = Feed(outside, NodeView(outside, self._node, self._members()))
        await feed.start()
        self._stack.push_async_callback(feed.stop)
        return page(feed)

    def _members(self) -> list[Uri]:
        """Return the node's upstreams and its own address, with the first user, so that its log can be followed, too.

        Without a first user, or a known address of its own, return only the upstreams.
        """
        uris, own = [parse_uri(uri) for uri in self._node.configuration.replication], self._own()
        if self._user is None or own is None:
            return uris
        name, password = self._user
        is_known = any(places.place_of(uri.address) == places.place_of(own.address) for uri in uris)
        return uris if is_known else [*uris, replace(own, user=name, password=password)]

    def _own(self) -> Uri | None:
        """Return the address the node listens on; None if it does not listen, or if the port is not known yet."""
        configuration = self._node.configuration
        if configuration.listen is None:
            return None
        encrypted = (("transport", "ssl"),) if configuration.ssl_cert_file is not None else ()
        own = replace(listen_uri(configuration.listen), parameters=encrypted)
        return own if own.port != 0 else None

    async def stop(self) -> None:
        """Stop the server. Idempotent."""
        await self._stack.aclose()
