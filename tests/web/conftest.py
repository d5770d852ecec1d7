"""Fixtures for tests of web pages in a real browser."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.web import browser as chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield Debian's Chromium, for one module. If it is missing, fail with CI=true, and skip otherwise."""
    if chromium.installed() is None:
        message = "Chromium is not installed (Debian package `chromium`)"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    with chromium.launched() as launched:
        yield launched


@pytest.fixture
def watch() -> chromium.Watch:
    """Return the recorder of requests and errors of the page."""
    return chromium.Watch()


@pytest.fixture
def page(browser: Browser, watch: chromium.Watch) -> Iterator[Page]:
    """An empty page without history. The test fails if it requested another host, or if its console has errors."""
    context = browser.new_context()
    context.set_default_timeout(60_000)
    page = context.new_page()
    watch.of(page)
    yield page
    context.close()
    watch.check()
