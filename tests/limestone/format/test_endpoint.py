"""Endpoints as the original writes them, plus encrypted ones and IPv6; all other text is rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.format.endpoint import Endpoint, EndpointError


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://127.0.0.1:1234", Endpoint("127.0.0.1", 1234)),
        ("tcp://replica.example:65535", Endpoint("replica.example", 65535)),
        ("tls://replica:4242", Endpoint("replica", 4242, True)),
        ("tcp://[::1]:5", Endpoint("::1", 5)),
        ("tls://[fe80::1%eth0]:5", Endpoint("fe80::1%eth0", 5, True)),
        ("tcp://localhost:0", Endpoint("localhost", 0)),
    ],
)
def test_endpoint_round_trips(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(f" {text}\n") == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    (
        "|tcp://|127.0.0.1:1234|tcp://host|tcp://host:|tcp://:1|tcp://host:65536|tcp://host:123456|udp://host:1|"
        "tcp://::1:5|tcp://[::1:5|tcp://a b:5|tcp://user@host:5|tcp://host:5/x|tcp://host:x"
    ).split("|"),
)
def test_invalid_endpoint_is_rejected_with_the_valid_forms(text: str) -> None:
    with pytest.raises(EndpointError) as refused:
        Endpoint.parse(text)
    assert "tcp://host:port" in str(refused.value)


@given(st.text())
def test_any_string_is_an_endpoint_or_rejected(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text)
    except EndpointError:
        return
    assert Endpoint.parse(str(endpoint)) == endpoint
