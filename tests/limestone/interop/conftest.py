"""What the tests against the real Limestone need, and when they are left out."""

from __future__ import annotations

import pytest

from tests.limestone.interop import real_limestone


@pytest.fixture(autouse=True)
def real_programs() -> None:
    if not real_limestone.available():
        pytest.skip(f"{real_limestone.VARIABLE} names no directory with the real tgreplica and tglogutil")
