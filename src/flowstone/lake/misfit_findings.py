"""Findings about lakes: fields with values in the quarantine, and the command that gives them a column that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flowstone.lake.quarantine import Quarantine
from flowstone.observation.findings.finding import Finding, Kind, Severity

if TYPE_CHECKING:
    import pyarrow as pa

_TYPES: Final = {
    "too_large": "decimal(20,0)",
    "too_precise": "string",
    "not_utf8": "binary",
    "wrong_type": "string",
    "out_of_range": "string",
}
"""A type that holds the values, by the reason why the present type does not."""

_WORDS: Final = {
    "too_large": "above 2^63-1",
    "too_precise": "of more digits than the column keeps",
    "not_utf8": "not UTF-8",
    "wrong_type": "of another type",
    "out_of_range": "out of the column's range",
}


def misfit_findings(lake: str, quarantine: Quarantine) -> tuple[Finding, ...]:
    """Return one finding for each field with misfits that are not healed."""
    rows = quarantine.open_rows()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in _grouped(rows):
        groups.setdefault((each["space"], each["field"]), []).append(each)
    return tuple(_finding(lake, space, field, found) for (space, field), found in sorted(groups.items()))


def _grouped(rows: pa.Table) -> list[dict[str, Any]]:
    keys = ["space", "field", "type", "reason"]
    firsts = [("key", "first"), ("value", "first"), ("version", "count")]
    found: list[dict[str, Any]] = rows.group_by(keys, use_threads=False).aggregate(firsts).to_pylist()
    return sorted(found, key=lambda each: -each["version_count"])


def _finding(lake: str, space: str, field: str, found: Sequence[Mapping[str, Any]]) -> Finding:
    count, most = sum(each["version_count"] for each in found), found[0]
    values = "1 value" if count == 1 else f"{count:,} values"
    reasons = ", ".join(f"{each['version_count']:,} {_WORDS.get(each['reason'], each['reason'])}" for each in found)
    kind = _TYPES.get(most["reason"], "string")
    return Finding(
        kind=Kind.MISFITS,
        severity=Severity.WARNING,
        member=lake,
        label=lake,
        what=f"{values} of {space}.{field} {'does' if count == 1 else 'do'} not fit the column in {lake}",
        why=f"the column is {most['type']}, and {reasons}; the column is null in these rows, `_tuple` has the value",
        advice=f"change the type: flowstone mirror --retype '{space}.{field}={kind}' SOURCE {lake}. Rows that were"
        " corrected or deleted since then stay in the quarantine as a record until the type changes",
        evidence=tuple(f"key {each['key_first']}: value {each['value_first']}, {each['reason']}" for each in found),
    )
