"""The browser for tests of pages: it records requests and errors, and no traffic leaves the machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Error, Page

from tests.web.browser import Watch, accessibility_faults

HEAD = b"<!doctype html><html lang=en><title>Tea</title><link rel=icon href='data:,'><main><h1>Tea</h1>"
GOOD = HEAD + b"<p>4 cups</p>"
BAD = HEAD + b"<img src=/tea.png><button></button>"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = {"/": GOOD, "/bad": BAD}.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Security-Policy", "default-src 'none'; img-src 'self' data:; connect-src *")
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_valid_page_has_no_complaints(page: Page, watch: Watch, site: str) -> None:
    page.goto(site)
    assert page.text_content("h1") == "Tea"
    assert accessibility_faults(page) == []
    assert f"{site}/" in watch.requests


def test_axe_finds_unnamed_elements_although_the_page_forbids_scripts(page: Page, watch: Watch, site: str) -> None:
    with page.expect_console_message():  # the image does not exist
        page.goto(f"{site}/bad")
    faults = accessibility_faults(page)
    assert {fault.split(":")[0] for fault in faults} == {"button-name", "image-alt"}
    watch.complaints.clear()


def test_console_error_fails_a_test(page: Page, watch: Watch, site: str) -> None:
    page.goto(site)
    page.evaluate("console.error('no tea')")
    with page.expect_event("pageerror"):
        page.evaluate("setTimeout(() => { throw new Error('spilt') })")
    with pytest.raises(AssertionError, match=r"no tea.*spilt"):
        watch.check()
    watch.complaints.clear()


def test_request_to_another_host_is_blocked_and_fails_a_test(page: Page, watch: Watch, site: str) -> None:
    page.goto(site)
    told = page.expect_console_message(lambda message: "ERR_NAME_NOT_RESOLVED" in message.text)
    with told, pytest.raises(Error, match="Failed to fetch"):
        page.evaluate("fetch('https://example.com/tea.js')")
    assert any("ERR_NAME_NOT_RESOLVED" in complaint for complaint in watch.complaints)
    with pytest.raises(AssertionError, match=r"requested other hosts: \['https://example\.com/tea\.js'\]"):
        watch.check()
    watch.requests.clear()
    watch.complaints.clear()
