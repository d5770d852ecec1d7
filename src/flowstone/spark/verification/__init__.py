"""Comparison of two sides (server, archive, directory, lake) at one settled position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.lazy import lazy_names

if TYPE_CHECKING:
    from flowstone.spark.verification.comparison import VerifyOptions, verify

__all__ = ["VerifyOptions", "verify"]

__getattr__ = lazy_names(__name__, {"VerifyOptions": "comparison", "verify": "comparison"})
