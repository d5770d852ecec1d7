"""The report of a node in this process: the same as a query over the network returns, without a connection."""

from __future__ import annotations

from typing import Any

from flowstone.node.node import Node
from flowstone.observation.query import shown_options, upstreams_configured
from flowstone.observation.report import Report, report_of


async def own_report(node: Node) -> Report:
    """Return the node's current report; raise `NotRunning` if it does not run."""
    return report_now(node, await node.free_space())


def report_now(node: Node, disk: dict[str, Any] | None = None) -> Report:
    """Return the node's current report without waiting for its disk; `disk` is the usage, if already known."""
    info = node.info()
    address = node.address or str(info["uuid"])
    options = node.configuration.shown(node.box.dialect)
    return report_of(
        address,
        info,
        gc=node.gc_info(),
        anonymous=node.replication_anon(),
        cfg=shown_options(options),
        upstreams_configured=upstreams_configured(options),
        disk=disk,
    )
