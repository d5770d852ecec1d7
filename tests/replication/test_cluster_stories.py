"""Elections, queues and logs of whole sets as stories. `test_cluster_model.py` covers the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.places import TRANSCRIPTS
from tests.replication.cluster_stories import replay


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("cluster_*.txt")), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()
