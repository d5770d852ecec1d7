"""Debian's Chromium, driven by Playwright: what a page asked for and complained of, and what axe-core says of it.

The fixtures of `conftest.py` are made of this. Nothing leaves the machine: the browser finds no other host's
address, and a page that as much as asked for one is found by `Watch.strangers`.
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
"""Schemes of addresses that name no host."""

FLAGS: Final = (
    "--no-sandbox",  # as root, as in most containers, it has none
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
    """The path of Debian's browser; Playwright's own is never fetched."""
    return shutil.which("chromium")


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser without a window.

    Until it ends, this thread counts as running an event loop: tests that are coroutines belong to other modules."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watch:
    """What a page asked for, and what it complained of, from its first moment on.

    A test that breaks a connection on purpose takes what that leaves in `complaints` out again: what is there in the
    end fails it."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def of(self, page: Page) -> None:
        page.context.on("request", self._asked)
        page.on("console", self._said)
        page.on("pageerror", self._thrown)

    def strangers(self) -> list[str]:
        """Addresses of other hosts that were asked for."""
        addresses = [urlsplit(address) for address in self.requests]
        return [a.geturl() for a in addresses if a.scheme not in SILENT_SCHEMES and a.hostname not in OURS]

    def check(self) -> None:
        assert not self.strangers(), f"the page asked other hosts: {self.strangers()}"
        assert not self.complaints, f"the page complained: {self.complaints}"

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _thrown(self, error: Error) -> None:
        self.complaints.append(f"uncaught: {error.message}")


def accessibility_faults(page: Page) -> list[str]:
    """The serious and critical faults that axe-core finds in a page as it stands, each with the places it names."""
    found = Axe().run(page).response["violations"]
    return [
        f"{fault['id']}: {fault['help']}: {', '.join(str(node['target']) for node in fault['nodes'])}"
        for fault in found
        if fault["impact"] in {"serious", "critical"}
    ]
