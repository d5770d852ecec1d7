"""Options for HTTP: the address and the token."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import pytest

from flowstone.cli.console import UsageError
from flowstone.cli.http_options import TOKEN_VARIABLE, HttpPlace, place_of

TOKEN = "a-token-of-sixteen-and-more"


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_http_is_optional() -> None:
    assert place_of(None, None) is None


def test_loopback_address_needs_no_token() -> None:
    place = HttpPlace("127.0.0.1:0", None)
    assert (place.token, place.is_new) == (None, False)


def test_token_is_created_and_shown_off_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    place = HttpPlace("*:0", None)
    assert place.is_new
    place.tell("http://10.0.0.1:80/")
    where, token = capsys.readouterr().err.splitlines()
    assert where == "flowstone: metrics and health at http://10.0.0.1:80/"
    assert token.endswith(f"http://10.0.0.1:80/?token={place.token}")


def test_given_token_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    place = HttpPlace("*:0", None)
    assert (place.token, place.is_new) == (TOKEN, False)
    place.tell("http://10.0.0.1:80/")
    assert TOKEN not in capsys.readouterr().err


@pytest.mark.parametrize("token", ["correct+horse&battery staple", "100%25-sure-of-this#1", 'a=b;c/d?e:f@g,"h"~'])
def test_link_escapes_any_token(token: str) -> None:
    link = urlsplit(HttpPlace("127.0.0.1:0", token).link("http://127.0.0.1:80/"))
    assert (link.netloc, link.path, link.fragment) == ("127.0.0.1:80", "/", "")
    assert parse_qsl(link.query) == [("token", token)]


def test_link_without_a_token_is_the_address() -> None:
    assert HttpPlace("127.0.0.1:0", None).link("http://127.0.0.1:80/") == "http://127.0.0.1:80/"


@pytest.mark.parametrize(("listen", "token"), [("nowhere", None), ("unix/:/x", None), ("127.0.0.1:0", "short")])
def test_invalid_http_options_are_usage_errors(listen: str, token: str | None) -> None:
    with pytest.raises(UsageError):
        HttpPlace(listen, token)


@pytest.mark.parametrize("listen", ["foo", "unix/:/x", "99999"])
def test_invalid_address_is_reported_with_the_option_and_valid_forms(listen: str) -> None:
    with pytest.raises(UsageError) as refused:
        HttpPlace(listen, None, option="--listen")
    assert refused.value.message.endswith("(given as --listen)")
    assert str(refused.value.hint).startswith("write it as HOST:PORT, or as a port")
    assert "unix" not in str(refused.value.hint)
