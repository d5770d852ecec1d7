"""The Spark session of the tests: one for each worker process of pytest, as the commands start theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from flowstone.spark.session import SparkUnavailable, check_java, session

CORES = 2
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def java() -> None:
    """Absent Java: a failure where CI=true, else a skip that says so."""
    try:
        check_java()
    except SparkUnavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") == "true" else pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(java: None) -> Iterator[SparkSession]:
    """A command that a test runs in its own process takes this one, too."""
    with pytest.MonkeyPatch.context() as patched:
        # Functions of test modules are pickled by name.
        patched.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        with session("tests", master=f"local[{CORES}]") as started:
            yield started
