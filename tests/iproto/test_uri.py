"""Addresses, and that they keep their secrets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.uri import Uri, UriError, parse_uri


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("3301", Uri("127.0.0.1", 3301)),
        ("db1:3301", Uri("db1", 3301)),
        ("127.0.0.1:3301", Uri("127.0.0.1", 3301)),
        ("[::1]:3301", Uri("::1", 3301)),
        ("bob@db1:3301", Uri("db1", 3301, "bob")),
        ("bob:@db1:3301", Uri("db1", 3301, "bob", "")),
        ("bob:se:c@ret@db1:3301", Uri("db1", 3301, "bob", "se:c@ret")),
        ("unix/:/tmp/a.sock", Uri("/tmp/a.sock", None)),
        ("bob:x@unix/:./a.sock", Uri("./a.sock", None, "bob", "x")),
        ("db1:1?transport=ssl&x", Uri("db1", 1, parameters=(("transport", "ssl"), ("x", "")))),
    ],
)
def test_every_form_is_read(text: str, uri: Uri) -> None:
    assert parse_uri(text) == uri


@pytest.mark.parametrize(
    "text",
    [
        "",
        "db1",
        "db1:",
        ":3301",
        "db1:0",
        "db1:65536",
        "99999",
        "db1:99999999999",
        "@db1:1",
        ":p@db1:1",
        "::1:5",
        "unix/:",
    ],
)
def test_what_is_no_address_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(UriError, match="host:port"):
        parse_uri(text)


def test_addresses_are_shown_as_they_are_written() -> None:
    for text in ("db1:3301", "[::1]:3301", "bob@db1:3301", "unix/:/tmp/a.sock"):
        assert str(parse_uri(text)) == text


SECRETS = st.text(max_size=20).map(lambda text: f"hidden{text.replace('?', '')}hidden")


@given(SECRETS)
def test_a_password_is_never_shown(secret: str) -> None:
    uri = parse_uri(f"bob:{secret}@db1:3301")
    assert uri.password == secret
    assert "hidden" not in f"{uri} {uri!r} {uri.address}"


@given(SECRETS, st.sampled_from(["db1", "x:y:z", "unix/:", "db1:0"]))
def test_a_password_is_not_shown_when_the_address_is_wrong(secret: str, place: str) -> None:
    with pytest.raises(UriError) as caught:
        parse_uri(f"bob:{secret}@{place}")
    assert "hidden" not in str(caught.value)
