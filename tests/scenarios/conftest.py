"""Use the cluster of real servers and nodes of the interoperability tests."""

from __future__ import annotations

from tests.interop.conftest import cluster, pytest_generate_tests, pytest_runtest_makereport

__all__ = ["cluster", "pytest_generate_tests", "pytest_runtest_makereport"]
