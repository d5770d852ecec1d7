"""The chaos run of continuous integration: half a minute for each kind of set; half an hour at full scale."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import FULL
from tests.places import ROOT

SECONDS = 1800 if FULL else 30
GRACE_SECONDS = 240
"""Time for the start, the healing and the second start, on a busy machine."""

ELECTIONS, REAL_MASTER, OWN_MASTER = 1, 1, 3
"""Seeds: of the 2.6 sets, one has a real server as master, one a node."""


def _run(name: str, seed: int, seconds: float) -> str:
    command = [sys.executable, "-m", "tests.chaos", f"--set={name}", f"--seed={seed}", f"--seconds={seconds:g}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds + GRACE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _assert_much_happened(told: str, seconds: float) -> None:
    """A run without events would prove nothing."""
    asked, answered = map(int, re.findall(r"operations: (\d+) asked, (\d+) answered", told)[0])
    (faults,) = re.findall(r"\((\d+) in all", told)
    assert answered >= 2 * seconds, told
    assert answered <= asked, told
    assert int(faults) >= seconds / 10, told
    assert re.search(r"answers of /health/ready: .*(?<!not )ready \d", told), told
    if FULL:  # in a short run, no fault may last long enough
        assert "long lags explained by a finding: 0 times" not in told, told
    assert "acknowledged and lost: 0" in told
    assert "verdict: ok" in told


@pytest.mark.timeout(SECONDS + 2 * GRACE_SECONDS)
def test_nodes_with_elections_keep_acknowledged_writes() -> None:
    _assert_much_happened(_run("elections", ELECTIONS, SECONDS), SECONDS)


@pytest.mark.real
@pytest.mark.timeout(SECONDS + 2 * GRACE_SECONDS)
@pytest.mark.parametrize("seed", [REAL_MASTER, OWN_MASTER], ids=["a real master", "a node as master"])
@pytest.mark.usefixtures("tarantool")
def test_nodes_and_real_servers_of_2_6_keep_acknowledged_writes(seed: int) -> None:
    seconds = SECONDS / 2
    _assert_much_happened(_run("dialect-2.6", seed, seconds), seconds)
