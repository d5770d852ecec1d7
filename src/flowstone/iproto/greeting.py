"""The greeting: the 128 bytes that a server sends first, with its version, its UUID and the authentication salt.

Layout: `docs/spec/iproto.md#greeting`. Which requests a peer understands follows from `version_id`.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from dataclasses import dataclass, field

from flowstone.errors import LocalProtocolError, RemoteProtocolError

GREETING_SIZE = 128
SALT_SIZE_MIN = 20
"""Bytes of salt that chap-sha1 uses. Real servers send 32."""

_NUMBER = r"([0-9]{1,3})"
_FIRST_LINE = re.compile(rf"Tarantool {_NUMBER}\.{_NUMBER}\.{_NUMBER}\S* \(([\w ]+)\)(?: ([0-9a-fA-F-]{{36}}))?")


class GreetingError(RemoteProtocolError):
    """The first bytes of the peer are not the greeting of a Tarantool server."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A decoded greeting. `uuid` is the UUID of the instance, nil while it has none."""

    version: tuple[int, int, int]
    uuid: uuid.UUID
    salt: bytes = field(repr=False)
    protocol: str = "Binary"

    @property
    def version_id(self) -> int:
        major, minor, patch = self.version
        return version_id(major, minor, patch)

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def version_id(major: int, minor: int, patch: int) -> int:
    """Return the number by which releases are compared; the key SERVER_VERSION holds it."""
    return major << 16 | minor << 8 | patch


def decode_greeting(data: bytes) -> Greeting:
    """Return the greeting in `data`. Raise GreetingError if a Tarantool server would not send it."""
    if len(data) != GREETING_SIZE or data[63:64] != b"\n" or data[127:128] != b"\n":
        raise GreetingError("peer is not a Tarantool server", hint="check host and port")
    first = data[:63].decode("ascii", "replace").rstrip(" \0")
    match = _FIRST_LINE.fullmatch(first)
    if match is None:
        raise GreetingError(f"peer identifies itself as {first[:40]!r}, not as Tarantool", hint="check host and port")
    major, minor, patch, protocol, instance = match.groups()
    if protocol != "Binary":
        raise GreetingError(f"peer speaks the {protocol} protocol", hint="use the port of box.cfg.listen")
    try:
        salt = base64.b64decode(data[64:127].rstrip(b" \0"), validate=True)
        instance_uuid = uuid.UUID(instance) if instance else uuid.UUID(int=0)
    except (binascii.Error, ValueError) as error:
        raise GreetingError(f"malformed greeting: {error}") from error
    if len(salt) < SALT_SIZE_MIN:
        raise GreetingError(f"malformed greeting: salt of {len(salt)} bytes, at least {SALT_SIZE_MIN} are required")
    return Greeting((int(major), int(minor), int(patch)), instance_uuid, salt, protocol)


def encode_greeting(greeting: Greeting) -> bytes:
    """Return the 128 bytes of `greeting`."""
    first = f"Tarantool {greeting.version_text} ({greeting.protocol}) {greeting.uuid}".encode()
    second = base64.b64encode(greeting.salt)
    if len(first) > 63 or len(second) > 63 or len(greeting.salt) < SALT_SIZE_MIN:
        raise LocalProtocolError("version, UUID and salt do not fit into a greeting")
    return first.ljust(63) + b"\n" + second.ljust(63) + b"\n"
