"""The limit of open transactions."""

from __future__ import annotations

import pytest

from flowstone.iproto import errors
from flowstone.node.server.streams import OpenTransactions, RequestStream


def test_open_transactions_of_unauthenticated_clients_are_counted_separately() -> None:
    transactions = OpenTransactions(2, 1, lambda: False)
    assert not transactions.add(False)
    with pytest.raises(errors.Unsupported, match="more than 1 open transactions before authentication"):
        transactions.add(False)
    assert transactions.add(True)
    assert transactions.add(True)
    with pytest.raises(errors.Unsupported, match="more than 2 open transactions"):
        transactions.add(True)
    transactions.remove(True)
    assert transactions.add(True)


def test_trusted_guests_are_ordinary_clients() -> None:
    assert OpenTransactions(2, 1, lambda: True).add(False)


def test_stream_without_a_transaction_has_no_state() -> None:
    assert RequestStream().usable(0.0) is None
