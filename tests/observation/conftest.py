"""Use the cluster of real servers and nodes of the interoperability tests."""

from __future__ import annotations

from tests.interop.conftest import cluster, nodes, pytest_generate_tests, pytest_runtest_makereport

__all__ = ["cluster", "nodes", "pytest_generate_tests", "pytest_runtest_makereport"]
