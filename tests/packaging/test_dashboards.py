"""The Grafana dashboards: a node or a mirror exports every metric that they query, with the labels that they use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

import flowstone
from flowstone.spark.mirror.progress import MirrorDataLoss, MirrorProgress, TableProgress
from flowstone.web.metrics import encode
from flowstone.web.mirror_metrics import MirrorMetrics
from flowstone.web.node_metrics import NodeMetrics
from tests.places import ROOT
from tests.web.exposition import Exposition, checked

DASHBOARDS: Final = ROOT / "packaging" / "grafana"
METRIC: Final = re.compile(r"\b((?:tnt|flowstone)_\w+)(\{[^}]*\})?")
OF_PROMETHEUS: Final = frozenset({"job", "instance", "le"})
UUID: Final = "aaaaaaaa-0000-4000-8000-000000000001"


def board(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DASHBOARDS / f"{name}.json").read_text())
    return found


def queries(name: str) -> list[tuple[str, str]]:
    """Return expression and legend of every target, and those of the variables."""
    shown = board(name)
    targets = [target for panel in shown["panels"] for target in panel["targets"]]
    variables = [each["query"]["query"] for each in shown["templating"]["list"] if each["type"] == "query"]
    return [(target["expr"], target["legendFormat"]) for target in targets] + [(query, "") for query in variables]


async def of_nodes(directory: Path) -> Exposition:
    """Return the metrics of a leader with a follower."""
    options: Any = {"election_mode": "candidate", "wal_mode": "fsync"}
    async with flowstone.Node(directory / "a", listen="127.0.0.1:0", user=("app", "secret"), **options) as leader:
        space = await leader.create_space("orders")
        await space.create_index("primary")
        await space.insert((1,))
        upstream = f"app:secret@{leader.address}"
        async with flowstone.Node(directory / "b", listen="127.0.0.1:0", replication=upstream, **options) as follower:
            return checked(encode(await NodeMetrics(follower).metrics(), "")[0].decode())


async def of_mirror(directory: Path) -> Exposition:
    metrics = MirrorMetrics("lake")
    metrics.note(MirrorDataLoss(UUID, "rows 6 to 9 are gone"))
    tables = {"orders": TableProgress(1000, 500.0, 12, misfits=3)}
    metrics.note(MirrorProgress({UUID: {1: 5}}, 1234, 617.0, 0.4, 7, tables, 0.25, 3, 5))
    return checked(encode(await metrics.metrics(), "")[0].decode())


@pytest.mark.parametrize(("name", "exported"), [("nodes", of_nodes), ("mirror", of_mirror)], ids=["nodes", "mirror"])
async def test_dashboard_queries_only_metrics_that_exist(name: str, exported: Any, tmp_path: Path) -> None:
    found = await exported(tmp_path)
    labels: dict[str, set[str]] = {}
    for family in found.families.values():
        for sample, pairs in family.samples:
            labels.setdefault(sample, set()).update(key for key, _ in pairs)
    asked = queries(name)
    assert len(asked) > 5
    for expression, legend in asked:
        metrics = METRIC.findall(expression)
        assert metrics, expression
        known: set[str] = set(OF_PROMETHEUS)
        for metric, selector in metrics:
            assert metric in labels, f"{metric} is not exported"
            used = set(re.findall(r"(\w+)\s*[=!]", selector))
            assert used <= labels[metric] | OF_PROMETHEUS, (metric, used)
            known |= labels[metric]
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= known, legend


@pytest.mark.parametrize("name", ["nodes", "mirror"])
def test_panels_do_not_overlap_and_have_unique_ids(name: str) -> None:
    cells: set[tuple[int, int]] = set()
    panels = board(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
