"""Findings about values in the quarantine of a lake."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from flowstone.lake.misfit_findings import misfit_findings
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.quarantine import Quarantine
from flowstone.lake.table_schema import LakeSchema
from flowstone.observation.findings.finding import Kind, Severity
from tests.spark.lake_rows_given import ORDERS, UUID, at, packed

SCHEMA = LakeSchema(ORDERS, (UUID,))


def quarantine_with(directory: Path, *tuples: bytes) -> Quarantine:
    quarantine, found = Quarantine(str(directory), {}), MisfitRows()
    SCHEMA.rows(pa.array([b"k"] * len(tuples), pa.binary()), pa.array(tuples, pa.binary()), misfits=found, origins={})
    quarantine.add(found, {UUID: at(5)}, {})
    return quarantine


def test_lake_without_misfits_has_no_findings(tmp_path: Path) -> None:
    assert misfit_findings("/lake", quarantine_with(tmp_path, packed(1, "x"))) == ()


def test_finding_names_field_reasons_and_the_command(tmp_path: Path) -> None:
    quarantine = quarantine_with(tmp_path, packed(2**63, 5), packed(2**64 - 1, "x"), packed("x", "y"))
    ids, names = misfit_findings("/lake", quarantine)
    assert (ids.kind, ids.severity, ids.member) == (Kind.MISFITS, Severity.WARNING, "/lake")
    assert ids.what == "3 values of orders.id do not fit the column in /lake"
    assert ids.why == (
        "the column is BIGINT, and 2 above 2^63-1, 1 of another type; "
        "the column is null in these rows, `_tuple` has the value"
    )
    assert "flowstone mirror --retype 'orders.id=decimal(20,0)' SOURCE /lake" in ids.advice
    assert ids.evidence == (
        "key [9223372036854775808]: value 9223372036854775808, too_large",
        'key ["x"]: value "x", wrong_type',
    )
    assert names.what == "1 value of orders.name does not fit the column in /lake"


@pytest.mark.parametrize(("raw", "kind"), [(b"\x92\x01\xa1\xff", "binary"), (b"\x92\x01\x05", "string")])
def test_advice_has_a_type_that_holds_the_value(tmp_path: Path, raw: bytes, kind: str) -> None:
    (found,) = misfit_findings("/lake", quarantine_with(tmp_path, raw))
    assert f"'orders.name={kind}'" in found.advice
