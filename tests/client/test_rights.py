"""Advice about missing privileges: the least sufficient one, and none for guests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowstone.client.rights import NO_USER, to_replicate, to_run_transactions, to_watch

ADVICE = (to_replicate, to_watch, to_run_transactions)


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.__name__)
@pytest.mark.parametrize("user", [None, "guest"])
def test_hint_without_credentials_suggests_a_user_and_no_guest_privileges(
    advice: Callable[[str | None], str], user: str | None
) -> None:
    told = advice(user)
    assert told == "no user was given: set TT_CLI_USERNAME and TT_CLI_PASSWORD, or write user:password@… in the URI"
    assert "grant" not in NO_USER


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.__name__)
def test_hint_names_the_privilege_to_run_lua(advice: Callable[[str | None], str]) -> None:
    told = advice("watcher")
    assert "box.schema.user.grant('watcher', " in told
    assert ("'universe'" in told) is ("lets the user run any Lua on the server" in told)


def test_hint_for_a_monitoring_user_names_the_single_function_first() -> None:
    one, everything = to_watch("watcher").split("; or, ")
    assert one == (
        "on its master: box.schema.func.create('box.info', {if_not_exists = true}) and "
        "box.schema.user.grant('watcher', 'execute', 'function', 'box.info')"
    )
    assert "'universe'" in everything
