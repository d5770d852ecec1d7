"""Wrong tokens: the delayed answers, and the log."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from flowstone.web import token_failures
from flowstone.web.token_failures import LINE_SECONDS, RETRIES, WAITING_MAX, TokenFailures


async def test_answers_to_an_address_with_many_wrong_tokens_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_failures, "DELAY_SECONDS", 0.05)
    failures, loop = TokenFailures(), asyncio.get_running_loop()
    begun = loop.time()
    assert all([await failures.failed("10.0.0.1", "/") for _ in range(RETRIES + 3)])
    assert loop.time() - begun >= 2 * 0.05
    assert failures.count == RETRIES + 3


async def test_too_many_wrong_tokens_at_once_are_rejected_and_other_addresses_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_failures, "DELAY_SECONDS", 3600.0)
    failures = TokenFailures()
    for _ in range(RETRIES):
        assert await failures.failed("10.0.0.1", "/")
    waiting = [asyncio.create_task(failures.failed("10.0.0.1", "/")) for _ in range(WAITING_MAX)]
    await asyncio.sleep(0)
    assert not await failures.failed("10.0.0.1", "/")
    assert await failures.failed("10.0.0.2", "/")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_log_lines_about_wrong_tokens_are_rate_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures, now = TokenFailures(), 1000.0
    monkeypatch.setattr(token_failures, "time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.WARNING, "flowstone.web"):
        for number in range(100):
            await failures.failed(f"10.0.1.{number}", "/a\nb")
        now += LINE_SECONDS
        await failures.failed("10.0.2.1", "/")
    assert [record.getMessage() for record in caplog.records] == [
        "wrong token for '/a\\nb' from 10.0.1.0",
        "wrong token for '/' from 10.0.2.1; 99 earlier failures were not logged",
    ]


async def test_number_of_remembered_addresses_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_failures, "HOSTS_MAX", 10)
    failures = TokenFailures()
    for number in range(100):
        await failures.failed(f"10.0.1.{number}", "/")
    assert len(failures._hosts) == 10
