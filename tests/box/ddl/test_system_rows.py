"""Lookup of objects by the rows of system spaces."""

from __future__ import annotations

import pytest

from flowstone.box.ddl.system_rows import has_grants, has_rows, space_of
from flowstone.iproto import errors
from tests.box.bootstrapped import bootstrapped


def test_rows_are_found_by_a_partial_key() -> None:
    transaction = bootstrapped().begin()
    assert has_rows(transaction, 288, 0, 280)
    assert has_rows(transaction, 288, 0, 280, 2)
    assert not has_rows(transaction, 288, 0, 512)
    assert not has_rows(transaction, 285, 0, 1)  # a hash index


def test_absent_objects_have_no_rows() -> None:
    transaction = bootstrapped().begin()
    assert not has_rows(transaction, 288, 7, 280)
    assert not has_rows(transaction, 9999, 0, 1)


def test_grants_are_found_by_their_object() -> None:
    transaction = bootstrapped().begin()
    assert has_grants(transaction, "space", 281)
    assert not has_grants(transaction, "space", 280)


def test_row_of_an_absent_space_raises_an_error() -> None:
    transaction = bootstrapped().begin()
    assert space_of(transaction, 280).name == "_space"
    with pytest.raises(errors.NoSuchSpace, match="Space '999' does not exist"):
        space_of(transaction, 999)
