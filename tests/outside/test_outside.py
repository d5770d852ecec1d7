"""The `Outside` object, which all components receive."""

from __future__ import annotations

import dataclasses

import pytest

from flowstone.outside import Outside, production


def test_production_sets_every_part() -> None:
    outside = production()
    assert all(getattr(outside, field.name) is not None for field in dataclasses.fields(Outside))


def test_parts_cannot_be_replaced() -> None:
    outside = production()
    with pytest.raises(dataclasses.FrozenInstanceError):
        outside.clock = production().clock  # type: ignore[misc]
