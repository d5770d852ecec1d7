"""The runtime of an applier, against a real master and against scripted ones."""

from __future__ import annotations
