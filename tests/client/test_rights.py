"""Advice about rights: the least that is enough, and nothing for guests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowstone.client.rights import NO_USER, to_replicate, to_run_transactions, to_watch

ADVICE = (to_replicate, to_watch, to_run_transactions)


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.__name__)
@pytest.mark.parametrize("user", [None, "guest"])
def test_who_gave_no_user_is_told_to_and_guests_are_granted_nothing(
    advice: Callable[[str | None], str], user: str | None
) -> None:
    told = advice(user)
    assert told == "no user was given: set TT_CLI_USERNAME and TT_CLI_PASSWORD, or write user:password@… in the URI"
    assert "grant" not in NO_USER


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.__name__)
def test_a_right_that_is_one_to_run_lua_is_called_so(advice: Callable[[str | None], str]) -> None:
    told = advice("watcher")
    assert "box.schema.user.grant('watcher', " in told
    assert ("'universe'" in told) is ("lets the user run any Lua on the server" in told)


def test_who_only_watches_is_advised_the_one_function_first() -> None:
    one, everything = to_watch("watcher").split("; or, ")
    assert one == (
        "on its master: box.schema.func.create('box.info', {if_not_exists = true}) and "
        "box.schema.user.grant('watcher', 'execute', 'function', 'box.info')"
    )
    assert "'universe'" in everything
