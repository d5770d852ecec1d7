"""Addresses: parsing, and protection of passwords."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.uri import Uri, UriError, means_a_path, parse_members, parse_uri, with_login


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
        (
            "db1:1?transport=ssl&ssl_ca_file=/a@b.pem",
            Uri("db1", 1, parameters=(("transport", "ssl"), ("ssl_ca_file", "/a@b.pem"))),
        ),
        ("db1:1?", Uri("db1", 1)),
    ],
)
def test_every_form_of_address_is_parsed(text: str, uri: Uri) -> None:
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
def test_invalid_address_is_rejected_with_the_valid_forms(text: str) -> None:
    with pytest.raises(UriError, match="host:port"):
        parse_uri(text)


@pytest.mark.parametrize("wrong", [None, 3301, b"3301"])
def test_address_that_is_not_a_string_is_rejected(wrong: Any) -> None:
    with pytest.raises(UriError, match=f"not {type(wrong).__name__}.*host:port"):
        parse_uri(wrong)


def test_addresses_are_shown_as_written() -> None:
    for text in ("db1:3301", "[::1]:3301", "bob@db1:3301", "unix/:/tmp/a.sock"):
        assert str(parse_uri(text)) == text


SECRETS = st.text(max_size=20).map(lambda text: f"hidden{text.replace('?', '')}hidden")


@given(SECRETS)
def test_password_is_never_shown(secret: str) -> None:
    uri = parse_uri(f"bob:{secret}@db1:3301")
    assert uri.password == secret
    assert "hidden" not in f"{uri} {uri!r} {uri.address}"


@given(SECRETS, st.sampled_from(["db1", "x:y:z", "unix/:", "db1:0"]))
def test_password_is_not_shown_when_the_address_is_invalid(secret: str, place: str) -> None:
    with pytest.raises(UriError) as caught:
        parse_uri(f"bob:{secret}@{place}")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("trnsport=ssl", "unknown URI parameter 'trnsport'; known parameters: transport, ssl_cert_file"),
        ("transport=ssl&ssl_cafile=/a", "unknown URI parameter 'ssl_cafile'"),
        ("transport=tls", "transport is 'tls'.*plain or ssl"),
        ("transport", "transport is ''.*plain or ssl"),
        ("transport=ssl&transport=plain", "duplicate URI parameter transport"),
    ],
)
def test_invalid_parameter_is_rejected_without_showing_secrets(query: str, complaint: str) -> None:
    with pytest.raises(UriError, match=complaint) as caught:
        parse_uri(f"bob:hidden@db1:1?{query}&ssl_password=hidden")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", ["bob:1?hidden@db1:1", "bob:hidden?x@db1:1", "bob:a@hidden?x@db1:1"])
def test_password_with_a_question_mark_is_not_shown_as_address_or_parameter(text: str) -> None:
    with pytest.raises(UriError, match=r"a \? before its last @") as caught:
        parse_uri(text)
    assert "hidden" not in str(caught.value)


def test_uri_is_shown_with_its_parameters_but_without_secrets() -> None:
    uri = parse_uri("bob:hidden@db1:1?transport=ssl&ssl_password=hidden&ssl_ca_file=/ca.pem")
    assert uri.shown == "bob@db1:1?transport=ssl&ssl_ca_file=/ca.pem"
    assert parse_uri("db1:1").shown == "db1:1"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("/var/lib/a", True),
        ("data/a", True),
        ("data/db?", True),
        ("data", False),
        ("db1:3301", False),
        ("unix/:/run/a.sock", False),
        ("bob@unix/:/run/a.sock", False),
        ("bob:a/b@db1:3301", False),
        ("db1:3301?transport=ssl&ssl_ca_file=/ca.pem", False),
        ("db1:3301/?transport=ssl&ssl_password=a", False),
    ],
)
def test_argument_is_a_path_only_if_it_cannot_be_an_address_or_contain_a_secret(text: str, is_one: bool) -> None:
    assert means_a_path(text) is is_one


def test_login_is_added_to_an_address_without_a_user() -> None:
    assert with_login(parse_uri("db1:3301"), "app", "secret") == Uri("db1", 3301, "app", "secret")
    assert with_login(parse_uri("me@db1:3301"), "app", "secret") == Uri("db1", 3301, "me")
    with pytest.raises(UriError, match="password given without a user"):
        with_login(parse_uri("db1:3301"), None, "secret")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "u:hidden@db1:3301,u:hidden@db2:3302",
            "2 addresses, but one is expected: .*user 'u', host 'db2', port 3302, and",
        ),
        ("db1:3301,u:hidden@db2:3302,db3:1", "3 addresses, but one is expected; specify one member"),
        ("db1:3301,u:hidden@unix/:/a", "2 addresses, .*user 'db1', path '/a', and a password with a comma"),
        ("db1:3301,db2:3302", "2 addresses, but one is expected; specify one"),
        ("db1:1?transport=ssl,db2:2", "2 addresses"),
    ],
)
def test_several_addresses_are_rejected_when_one_is_expected(text: str, complaint: str) -> None:
    with pytest.raises(UriError, match=complaint) as caught:
        parse_uri(text)
    assert "hidden" not in str(caught.value)
    assert len(parse_members(text)) == text.count(",") + 1


@pytest.mark.parametrize("given", ["a:1, u:p@b:2", ["a:1", "u:p@b:2"]])
def test_members_may_be_a_list_or_a_string(given: Any) -> None:
    assert parse_members(given) == (Uri("a", 1), Uri("b", 2, "u", "p"))


def test_password_with_a_comma_is_not_split() -> None:
    assert parse_members("bob:a,b@db1:1") == (parse_uri("bob:a,b@db1:1"),) == (Uri("db1", 1, "bob", "a,b"),)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("db1:1,db2", "'db2' is not a valid address"),
        ("u:hidden@db1:hidden,u:hidden@db2:1", "address 1 of 2 in the list is not valid"),
        ("u:hidden,hidden@db1:99999", "port of 'db1:99999'"),
        ([], "empty"),
        (["db1:1,db2:2"], "2 addresses"),
        ("", "'' is not a valid address"),
        ("u:hidden:3301", "several colons and no @"),
        (3301, "not int"),
    ],
)
def test_invalid_members_are_rejected_without_showing_secrets(given: Any, complaint: str) -> None:
    with pytest.raises(UriError, match=complaint) as caught:
        parse_members(given)
    assert "hidden" not in str(caught.value)
