"""chap-sha1: scrambles of a recorded conversation, and round trips."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.auth import check, hash_of_hash, scramble

SALT = base64.b64decode("pJtZ9M0k5Oz6H/QbITFPI3DMjdn15f7NTQsSFxgQKfU=")
RECORDED = bytes.fromhex("624f6cd5cb2e71d2d418b4e22e564572cf071cb4")


def test_scramble_equals_that_of_a_real_replica() -> None:
    assert scramble("secret", SALT) == RECORDED


def test_hash_of_the_empty_password_equals_that_of_guest_on_real_servers() -> None:
    assert base64.b64encode(hash_of_hash("")) == b"vhvewKp0tNyweZQ+cFKAlsyphfg="


@given(st.text(max_size=30), st.text(max_size=30), st.binary(min_size=20, max_size=32))
def test_only_the_right_password_is_accepted(password: str, other: str, salt: bytes) -> None:
    answer = scramble(password, salt)
    assert check(answer, hash_of_hash(password), salt)
    assert check(answer, hash_of_hash(other), salt) == (password == other)


@given(st.binary(max_size=40))
def test_random_scramble_is_never_accepted(answer: bytes) -> None:
    assert not check(answer, hash_of_hash("secret"), b"\0" * 20)
