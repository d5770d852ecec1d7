"""Restore: the state of a settled moment as files of a server, Delta tables or Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.lazy import lazy_names

if TYPE_CHECKING:
    from flowstone.spark.restore.restoration import restore

__all__ = ["restore"]

__getattr__ = lazy_names(__name__, {"restore": "restoration"})
