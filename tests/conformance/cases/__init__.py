"""The table of cases: one module per topic, each with its `CASES`."""

from __future__ import annotations

from tests.conformance.case import Case
from tests.conformance.cases import (
    collations,
    documents,
    index_definitions,
    iterators,
    keys,
    privileges,
    requests,
    sequences,
    space_definitions,
    statements,
    update_paths,
    updates,
    upserts,
)

DATA_THEMES = (iterators, keys, collations, documents, statements, updates, update_paths, upserts)
"""Of the statements on tuples; the others are about definitions and the protocol."""

THEMES = (
    *DATA_THEMES,
    space_definitions,
    index_definitions,
    sequences,
    privileges,
    requests,
)

ALL_CASES: list[Case] = [case for theme in THEMES for case in theme.CASES]
