"""The 128 bytes that a server says first: its version, its UUID and the salt for authentication.

Layout: reference section 2.1. Which requests a peer understands follows from `version_id`.
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
"""What chap-sha1 uses. Real servers send 32 bytes."""

_NUMBER = r"([0-9]{1,3})"
_FIRST_LINE = re.compile(rf"Tarantool {_NUMBER}\.{_NUMBER}\.{_NUMBER}\S* \(([\w ]+)\)(?: ([0-9a-fA-F-]{{36}}))?")


class GreetingError(RemoteProtocolError):
    """What the peer said first is no greeting of a Tarantool server."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """`version` as three numbers; `uuid` is that of the instance, nil while it has none."""

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
    """The number by which releases are compared, in greetings and in key SERVER_VERSION."""
    return major << 16 | minor << 8 | patch


def decode_greeting(data: bytes) -> Greeting:
    if len(data) != GREETING_SIZE or data[63:64] != b"\n" or data[127:128] != b"\n":
        raise GreetingError("the peer is no Tarantool server", hint="check host and port")
    first = data[:63].decode("ascii", "replace").rstrip(" \0")
    match = _FIRST_LINE.fullmatch(first)
    if match is None:
        raise GreetingError(f"the peer calls itself {first[:40]!r}, not Tarantool", hint="check host and port")
    major, minor, patch, protocol, instance = match.groups()
    if protocol != "Binary":
        raise GreetingError(f"the peer speaks the {protocol} protocol", hint="use the port of box.cfg.listen")
    try:
        salt = base64.b64decode(data[64:127].rstrip(b" \0"), validate=True)
        instance_uuid = uuid.UUID(instance) if instance else uuid.UUID(int=0)
    except (binascii.Error, ValueError) as error:
        raise GreetingError(f"the greeting is damaged: {error}") from error
    if len(salt) < SALT_SIZE_MIN:
        raise GreetingError(f"the greeting has a salt of {len(salt)} bytes, {SALT_SIZE_MIN} are needed")
    return Greeting((int(major), int(minor), int(patch)), instance_uuid, salt, protocol)


def encode_greeting(greeting: Greeting) -> bytes:
    first = f"Tarantool {greeting.version_text} ({greeting.protocol}) {greeting.uuid}".encode()
    second = base64.b64encode(greeting.salt)
    if len(first) > 63 or len(second) > 63 or len(greeting.salt) < SALT_SIZE_MIN:
        raise LocalProtocolError("version, UUID and salt do not fit into a greeting")
    return first.ljust(63) + b"\n" + second.ljust(63) + b"\n"
