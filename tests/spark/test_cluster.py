"""The pipeline on a Spark of several processes: it relies on no process or directory that is not shared."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.spark.clusters import local_cluster, standalone

Found = dict[str, Any]
SECONDS = 800
# The first test of each cluster waits for all jobs of that cluster.
pytestmark = pytest.mark.timeout(900)


CLUSTERS = [
    pytest.param(standalone, id="standalone"),
    pytest.param(
        local_cluster,
        id="local_cluster",
        marks=pytest.mark.full_scale(reason="its executors are equally separate, but it has no master process"),
    ),
]


@pytest.fixture(scope="module", params=CLUSTERS)
def found(request: pytest.FixtureRequest, java: None, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the results of `cluster_driver` on one cluster, by job."""
    directory = tmp_path_factory.mktemp(request.param.__name__)
    shared, hidden = directory / "shared", directory / "hidden"
    shared.mkdir()
    hidden.mkdir()
    with request.param(directory / "spark", hidden) as (master, environment):
        command = [sys.executable, "-m", "tests.spark.cluster_driver", master, str(shared), str(hidden)]
        done = subprocess.run(
            command,
            env=environment | {"TMPDIR": str(hidden)},
            cwd=hidden,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    lines = (json.loads(line) for line in done.stdout.splitlines())
    results = {line["job"]: line["found"] for line in lines}
    assert done.returncode == 0, f"{done.stderr[-6000:]}\nafter {list(results)}"
    return results


def test_executors_share_nothing_with_the_driver(found: Found) -> None:
    seen = found["processes"]
    assert seen["driver_sees"] == "seen"
    assert seen["executors_see"] == ["", ""]
    assert len(seen["directories"]) == 3


def test_archive_is_read_by_executors(found: Found) -> None:
    assert found["xlog_changes"] == [
        ["delete", 6, 4, None],
        ["insert", 3, 3, "three"],
        ["insert", 4, 4, "four"],
        ["update", 5, 3, None],
    ]


def test_past_state_is_restored(found: Found) -> None:
    assert found["restored"] == {"code": 0, "snapshots": 1, "rows": [[3, "drei"]]}


def test_rows_of_a_live_server_are_read_by_executors(found: Found) -> None:
    assert found["live"]["rows"] == 100


@pytest.mark.parametrize("transport", ["inline", "tcp"])
def test_executors_without_access_to_the_spool_receive_changes(found: Found, transport: str) -> None:
    assert sorted(found["live"][transport]) == list(range(1, 51))


def test_live_server_is_mirrored_and_verified(found: Found) -> None:
    assert found["live"]["mirror"] == [0, 0]
    assert found["live"]["verify"] == [0, 1], "equal after the mirror, different after later changes"
