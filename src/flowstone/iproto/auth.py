"""chap-sha1 authentication: prove knowledge of a password without sending it (`docs/spec/iproto.md#scramble`).

A server stores `hash_of_hash`, never the password. Nothing here keeps, prints or logs a secret.
"""

from __future__ import annotations

import hashlib
import hmac

from flowstone.iproto.greeting import SALT_SIZE_MIN

METHOD = "chap-sha1"
SCRAMBLE_SIZE = 20


def hash_of_hash(password: str) -> bytes:
    """Return the hash that a server stores for `password`; `_user` holds it in base64."""
    return _sha1(_sha1(_bytes(password)))


def scramble(password: str, salt: bytes) -> bytes:
    """Return the proof of `password` for the `salt` of the server's greeting."""
    once = _sha1(_bytes(password))
    return _xor(once, _sha1(salt[:SALT_SIZE_MIN] + _sha1(once)))


def check(answer: bytes, stored: bytes, salt: bytes) -> bool:
    """Return True if `answer` proves the password whose `hash_of_hash` is `stored`."""
    if len(answer) != SCRAMBLE_SIZE:
        return False
    once = _xor(answer, _sha1(salt[:SALT_SIZE_MIN] + stored))
    return hmac.compare_digest(_sha1(once), stored)


def _bytes(password: str) -> bytes:
    return password.encode("utf-8", "surrogateescape")


def _sha1(data: bytes) -> bytes:
    # The protocol prescribes SHA-1.
    return hashlib.sha1(data, usedforsecurity=False).digest()


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
