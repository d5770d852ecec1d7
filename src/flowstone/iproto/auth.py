"""chap-sha1: proving a password without sending it (reference section 3).

A server stores `hash_of_hash`, never the password. Nothing here keeps, prints or logs a secret.
"""

from __future__ import annotations

import hashlib
import hmac

from flowstone.iproto.greeting import SALT_SIZE_MIN

METHOD = "chap-sha1"
SCRAMBLE_SIZE = 20


def hash_of_hash(password: str) -> bytes:
    """What a server stores of a password (base64 of it stands in `_user`)."""
    return _sha1(_sha1(_bytes(password)))


def scramble(password: str, salt: bytes) -> bytes:
    """The answer to `salt` of someone who knows `password`."""
    once = _sha1(_bytes(password))
    return _xor(once, _sha1(salt[:SALT_SIZE_MIN] + _sha1(once)))


def check(answer: bytes, stored: bytes, salt: bytes) -> bool:
    """Whether `answer` comes from someone whose password has `stored` as its hash_of_hash."""
    if len(answer) != SCRAMBLE_SIZE:
        return False
    once = _xor(answer, _sha1(salt[:SALT_SIZE_MIN] + stored))
    return hmac.compare_digest(_sha1(once), stored)


def _bytes(password: str) -> bytes:
    return password.encode("utf-8", "surrogateescape")


def _sha1(data: bytes) -> bytes:
    # SHA-1 is what the protocol prescribes, not our choice of a hash.
    return hashlib.sha1(data, usedforsecurity=False).digest()


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
