"""Values for people, as YAML in block style: an entry of a map per line, and short arrays on one line.

`yaml_rows.py` writes keys and single values. The text is valid YAML 1.1 and 1.2; reading it back gives the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flowstone.text.yaml_rows import KEY_SIZE_MAX, yaml_key, yaml_value

WIDTH: Final = 100
"""Columns up to which an array is written on one line, as a tuple usually is."""


def yaml_list(values: Sequence[Any]) -> str:
    """Return `values` as a YAML list, one item for each, with a newline at its end."""
    return "\n".join(_items(values) if values else ["[]"]) + "\n"


def _items(values: Sequence[Any]) -> list[str]:
    lines = []
    for value in values:
        first, *others = _block(value) or [yaml_value(value)]
        lines += [f"- {first}", *(f"  {line}" for line in others)]
    return lines


def _entries(value: dict[Any, Any]) -> list[str]:
    lines = []
    for key, inner in value.items():
        block = _block(inner)
        lines += (
            [f"{yaml_key(key)}: {yaml_value(inner)}"]
            if block is None
            else [f"{yaml_key(key)}:", *(f"  {line}" for line in block)]
        )
    return lines


def _block(value: Any) -> list[str] | None:
    """Return the lines of a map or a long array, without indentation; None for a value that goes on one line."""
    if isinstance(value, dict) and value and _has_plain_keys(value):
        return _entries(value)
    if isinstance(value, list | tuple) and value and len(yaml_value(value)) > WIDTH:
        return _items(value)
    return None


def _has_plain_keys(value: dict[Any, Any]) -> bool:
    """Return True if no key needs the form `? key`, which this module writes in flow style only."""
    return not any(isinstance(key, dict | list | tuple) or len(yaml_key(key)) >= KEY_SIZE_MAX for key in value)
