"""All kinds of findings are documented, and only those."""

from __future__ import annotations

import re

import msgspec

from flowstone.observation.findings.finding import Finding, Kind, Severity
from tests.places import ROOT

PAGE = ROOT / "docs" / "reference" / "findings.md"


def test_every_kind_has_a_line_in_the_reference() -> None:
    first_cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    told = {word for cell in first_cells for word in re.findall(r"\w+", cell)}
    assert told == {kind.value for kind in Kind}


def test_finding_round_trips_through_json() -> None:
    finding = Finding(
        kind=Kind.LOG_GAP,
        severity=Severity.STOPPED,
        member="u",
        label="a",
        what="w",
        why="y",
        advice="d",
        evidence=("e",),
    )
    assert msgspec.json.decode(msgspec.json.encode(finding), type=Finding) == finding
    assert b'"kind":"log_gap","severity":"stopped"' in msgspec.json.encode(finding)
