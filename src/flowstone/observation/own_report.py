"""What a node in this process says of itself: the report that asking it over the network would give, without asking."""

from __future__ import annotations

from typing import Any

from flowstone.node.node import Node
from flowstone.observation.asking import shown_options, upstreams_configured
from flowstone.observation.report import Report, report_of


async def own_report(node: Node) -> Report:
    """How the node is now; `NotRunning` where it is not."""
    return report_now(node, await node.free_space())


def report_now(node: Node, disk: dict[str, Any] | None = None) -> Report:
    """As `own_report`, without waiting for the disk."""
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
