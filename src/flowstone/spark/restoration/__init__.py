"""Restore: the state of a settled moment as files of a server, Delta tables or Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.lazy import lazy_names

if TYPE_CHECKING:
    from flowstone.spark.restoration.archive_restore import restore_archive

__all__ = ["restore_archive"]

__getattr__ = lazy_names(__name__, {"restore_archive": "archive_restore"})
