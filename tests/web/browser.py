"""Debian's Chromium, driven by Playwright: requests and console errors of a page, and the findings of axe-core.

The fixtures of `conftest.py` use this. No traffic leaves the machine: the browser resolves no other host, and
`Watch.strangers` finds a page that tries.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, sync_playwright

OURS: Final = frozenset({"127.0.0.1", "localhost"})
SILENT_SCHEMES: Final = frozenset({"about", "blob", "data"})
"""Schemes of URLs without a host."""

FLAGS: Final = (
    "--no-sandbox",  # as root, as in most containers, there is none
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


def installed() -> str | None:
    """Return the path of Debian's browser; Playwright's own is never downloaded."""
    return shutil.which("chromium")


@contextmanager
def launched() -> Iterator[Browser]:
    """Yield a headless browser.

    Until it ends, this thread counts as running an event loop: put tests that are coroutines into other modules."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watch:
    """The requests and console errors of a page, from its start.

    A test that breaks a connection on purpose removes the resulting errors from `complaints`; others fail it."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def of(self, page: Page) -> None:
        page.context.on("request", self._asked)
        page.on("console", self._said)
        page.on("pageerror", self._thrown)

    def strangers(self) -> list[str]:
        """Requested URLs of other hosts."""
        addresses = [urlsplit(address) for address in self.requests]
        return [a.geturl() for a in addresses if a.scheme not in SILENT_SCHEMES and a.hostname not in OURS]

    def check(self) -> None:
        assert not self.strangers(), f"the page requested other hosts: {self.strangers()}"
        assert not self.complaints, f"the page complained: {self.complaints}"

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _thrown(self, error: Error) -> None:
        self.complaints.append(f"uncaught: {error.message}")


def accessibility_faults(page: Page) -> list[str]:
    """Return the serious and critical faults that axe-core finds in a page, each with its places."""
    found = Axe().run(page).response["violations"]
    return [
        f"{fault['id']}: {fault['help']}: {', '.join(str(node['target']) for node in fault['nodes'])}"
        for fault in found
        if fault["impact"] in {"serious", "critical"}
    ]
