"""Addresses for HTTP, and valid tokens."""

from __future__ import annotations

import pytest

from flowstone.iproto.uri import UriError
from flowstone.web.address import TOKEN_LENGTH_MIN, TokenNeeded, check_token, http_address, is_loopback, new_token


def test_new_tokens_differ() -> None:
    assert new_token() != new_token()
    assert len(new_token()) >= TOKEN_LENGTH_MIN


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("8081", True),
        ("127.0.0.1:0", True),
        ("127.1.2.3:80", True),
        ("localhost:80", True),
        ("[::1]:80", True),
        ("*:80", False),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("db1.example:80", False),
        ("10.0.0.1:80", False),
    ],
)
def test_loopback_addresses(text: str, loopback: bool) -> None:
    assert is_loopback(http_address(text)) is loopback


@pytest.mark.parametrize("text", ["unix/:/tmp/x", "user@127.0.0.1:80", "nowhere", "127.0.0.1:80?transport=ssl"])
def test_invalid_http_addresses(text: str) -> None:
    with pytest.raises(UriError):
        http_address(text)


def test_token_is_required_off_loopback() -> None:
    check_token(http_address("127.0.0.1:80"), None)
    check_token(http_address("*:80"), new_token())
    with pytest.raises(TokenNeeded, match="is reachable from other machines"):
        check_token(http_address("*:80"), None)


@pytest.mark.parametrize("token", ["", "short", "ü" * 20, "line\nbreak of sixteen"])
def test_invalid_token_is_rejected_and_not_shown(token: str) -> None:
    with pytest.raises(TokenNeeded) as refused:
        check_token(http_address("127.0.0.1:80"), token)
    assert not token or token not in str(refused.value)
