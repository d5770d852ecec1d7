"""Shared by commands about live members: addresses, and the confirmation."""

from __future__ import annotations

import io
import sys

import pytest

from flowstone.cli.console import UsageError
from flowstone.cli.replica_set.members import addresses, consent
from tests.cli.conftest import Terminal


def test_every_uri_gets_the_given_user() -> None:
    first, second = addresses(["db1:3301", "db2:3301"], "admin", "secret")
    assert (first.user, second.user, second.password, second.address) == ("admin", "admin", "secret", "db2:3301")


def test_yes_skips_the_confirmation() -> None:
    assert consent("really?", yes=True)


def test_confirmation_without_a_terminal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="use --yes to skip the confirmation"):
        consent("really?", yes=False)


@pytest.mark.parametrize(
    ("answer", "is_given"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_confirmation_on_a_terminal_reads_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, is_given: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert consent("expel replica 3?", yes=False) is is_given
    told = "" if is_given else "flowstone: nothing was changed\n"
    assert capsys.readouterr().err == f"expel replica 3? (y/N) {told}"
