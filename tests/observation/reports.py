"""Reports of fictitious servers, in the form of `box.info`, for tests of findings."""

from __future__ import annotations

from typing import Any

from flowstone.observation.report import Report, report_of

SET = "5e700000-0000-4000-8000-000000000000"


def uuid(number: int) -> str:
    """Return the UUID of the instance with this id."""
    return f"{number:08x}-0000-4000-8000-000000000000"


def address(number: int) -> str:
    return f"db{number}:3301"


def upstream(of: int, status: str = "follow", **more: Any) -> dict[str, Any]:
    return {"status": status, "peer": f"replicator@{address(of)}", "lag": 0.001, "idle": 0.1} | more


def downstream(vclock: dict[int, int], status: str = "follow", **more: Any) -> dict[str, Any]:
    return {"status": status, "vclock": vclock, "idle": 0.1} | more


def report(
    number: int,
    vclock: dict[int, int],
    peers: dict[int, dict[str, Any]] | None = None,
    *,
    gc: Any = None,
    cfg: Any = None,
    upstreams_configured: Any = None,
    **info: Any,
) -> Report:
    """Return a report of the instance with this id; `peers` gives `upstream` and `downstream` by id."""
    rows = {
        other: {"id": other, "uuid": uuid(other), "lsn": vclock.get(other, 0)} | sides
        for other, sides in (peers or {}).items()
    }
    rows |= {number: {"id": number, "uuid": uuid(number), "lsn": vclock.get(number, 0)}}
    table = {
        "version": "2.11.9",
        "package": "Tarantool",
        "id": number,
        "uuid": uuid(number),
        "cluster": {"uuid": SET},
        "status": "running",
        "ro": False,
        "vclock": vclock,
        "replication": rows,
    }
    return report_of(address(number), table | info, gc=gc, cfg=cfg, upstreams_configured=upstreams_configured)


def pair(first: dict[int, int], second: dict[int, int], told: dict[str, Any]) -> list[Report]:
    """Return the report of instance 2, which follows instance 1 over this link."""
    return [
        report(1, first, {2: {"downstream": downstream(second)}}),
        report(2, second, {1: {"upstream": upstream(1) | told}}, ro=True),
    ]
