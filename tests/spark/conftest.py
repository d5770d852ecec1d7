"""A Spark session for the tests that need one: local, one core, nothing left behind."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Absent Java: a failure where CI=true, else a skip that says so."""
    if shutil.which("java") is None:
        message = "Java is not installed (Debian package `openjdk-17-jre-headless`)"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    directory = tmp_path_factory.mktemp("spark")
    root = Path(__file__).resolve().parents[2]
    patched = pytest.MonkeyPatch()
    patched.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    patched.setenv("PYSPARK_PYTHON", sys.executable)
    patched.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root)]))
    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "600m")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.warehouse.dir", str(directory))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
    patched.undo()
