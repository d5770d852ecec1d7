"""The content of a report: equality, lagging sides, and its JSON."""

from __future__ import annotations

import json

from flowstone.spark.verification.digests import DIFFERS
from flowstone.spark.verification.report import ShownDifference, SideReport, SpaceResult, VerifyReport, WrongRow
from flowstone.spark.verification.tuple_differences import FieldDifference

A = SideReport("node", "127.0.0.1:3301", "uuid", {1: 10})
B = SideReport("lake", "/lake", "uuid", {1: 10})


def report(*spaces: SpaceResult, b: SideReport = B, **more: tuple[object, ...]) -> VerifyReport:
    shown = {"differences": (), "wrong": (), "notes": (), **more}
    return VerifyReport(A, b, spaces, **shown, seconds=1.25)  # type: ignore[arg-type]


def test_sides_are_equal_without_differences_and_missing_rows() -> None:
    assert report(SpaceResult(512, "orders", 3, 3)).is_equal
    assert report(SpaceResult(512, "orders", 3, 3, encoded=2)).is_equal
    for differing in ("missing_in_a", "missing_in_b", "differing", "twice", "wrong_a", "wrong_b"):
        found = report(SpaceResult(512, "orders", 3, 3, **{differing: 1}))
        assert not found.is_equal, differing
        assert found.difference_count == 1


def test_side_with_missing_rows_is_not_equal_and_the_rows_are_named() -> None:
    late = report(SpaceResult(512, "orders", 3, 3), b=SideReport("lake", "/lake", "uuid", {1: 9}, ((1, 10, 10),)))
    assert not late.is_equal
    assert late.lateness() == ["B (/lake) lacks LSN 10 of replica 1"]


def test_json_has_valid_values_as_values_and_broken_ones_as_text() -> None:
    difference = ShownDifference(
        512, "orders", "[1]", DIFFERS, '[1,"a"]', "broken: 92", (FieldDifference("name", '"a"', "absent"),)
    )
    wrong = WrongRow("B", 512, "orders", "[2]", "_key is x'00'")
    found = json.loads(
        report(
            SpaceResult(512, "orders", 3, 3, differing=1, wrong_b=1), differences=(difference,), wrong=(wrong,)
        ).to_json()
    )
    assert found["equal"] is False
    assert found["a"] == {
        "kind": "node", "name": "127.0.0.1:3301", "replicaset_uuid": "uuid", "position": {"1": 10}, "lacks": []
    }  # fmt: skip
    assert found["difference_count"] == 2
    (shown,) = found["differences"]
    assert (shown["key"], shown["a"], shown["b"], shown["kind"]) == ([1], [1, "a"], "broken: 92", "differs")
    assert shown["fields"] == [{"path": "name", "a": '"a"', "b": "absent"}]
    assert found["wrong_rows"][0]["what"] == "_key is x'00'"
    assert found["spaces"][0]["equal"] is False
