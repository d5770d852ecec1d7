"""Extensions of the replication protocol between a Flowstone master and a Flowstone replica.

Pure. Frames are used on the control channel only, and only if the replica's SESSION_BEGIN_ACK has offered them. So the
original never receives a frame. A frame is a type of 0x40 or more, a length of at most FRAME_SIZE_MAX, and a JSON
object: HELLO, HELLO_ACK or PREPARE. Unknown fields are ignored. Proofs and tokens never appear in a repr or an error.
Master and replica decide when a frame is allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Final

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import BadMessage
from flowstone.limestone.format.lineage import FORMER_MAX
from flowstone.limestone.format.messages import Message, MessageType, Parser

OFFER: Final = b"flowstone/1"
"""Prefix of the session secret in an ack whose sender supports these frames. A space and its nonce in hex follow."""

FRAME_SIZE_MAX: Final = 64 << 10
"""Maximum size of the JSON of one frame. A valid frame needs less than a hundredth of it."""

CONTROL_MESSAGE_SIZE_MAX: Final = 64 << 10
"""Maximum size of any message on a control channel; none of them carries data."""

NONCE_SIZE: Final = 32
TOKEN_SIZE: Final = 32
PROOF_SIZE: Final = hashlib.sha256().digest_size
EPOCH_MAX: Final = (1 << 64) - 1

SEED_CHANNEL_MAX: Final = 9_999
"""The id of the first log channel that is used for catch-up; each further channel has the next lower id."""

_HEAD: Final = struct.Struct(">BI")
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
_HEX: Final = re.compile(r"[0-9a-f]*", re.ASCII)
_OFFER: Final = re.compile(rb"flowstone/1 ([0-9a-f]{%d})" % (2 * NONCE_SIZE))


class FrameType(IntEnum):
    """The first byte of a frame. Messages of the protocol have smaller first bytes."""

    HELLO = 0x40
    HELLO_ACK = 0x41
    PREPARE = 0x42


class WireExtensionError(IntEnum):
    """Codes of ERROR that only a Flowstone replica uses."""

    AUTHENTICATION_FAILED = 200
    REFUSED = 201
    """The request cannot be executed; the message says why."""


class Action(Enum):
    """The kind of transfer that a replica prepares for."""

    RESUME = "resume"
    """Sessions of later epochs than the given one are invalidated, and the epoch file is set back if necessary."""

    SEED = "seed"
    """The existing data is put aside until the first group commit of the new data is durable."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A frame from the master with its identity and its state.

    `horizon`: the largest epoch whose entries are in a compacted file only; 0 if there is none. `proof` is None if the
    master has no shared secret. `formerly` lists its former identities; the master may replace data of these
    identities.
    """

    instance: str
    durable_epoch: int
    horizon: int
    nonce: bytes
    proof: bytes | None = field(default=None, repr=False)
    formerly: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HelloAck:
    """The replica's answer. `follows` is the master whose epochs the replica has; None if it never had a master.

    `token` is the secret for LOG_CHANNEL_CREATE, so that only this master opens channels."""

    instance: str
    follows: str | None
    durable_epoch: int
    token: bytes = field(repr=False)
    proof: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Prepare:
    """A frame from the master: prepare for the transfer. The answer is ACK."""

    action: Action
    epoch: int


Frame = Hello | HelloAck | Prepare


def offer(nonce: bytes) -> bytes:
    """Return the session secret by which a replica offers these frames."""
    return b"%s %s" % (OFFER, _checked(nonce, NONCE_SIZE).hex().encode())


def offered_nonce(session_secret: bytes) -> bytes | None:
    """Return the nonce of a replica that offers the frames, or None. Raise BadMessage for an offer without a nonce."""
    if not session_secret.startswith(OFFER):
        return None
    found = _OFFER.fullmatch(session_secret)
    if found is None:
        raise BadMessage("session secret offers flowstone/1 without a nonce")
    return bytes.fromhex(found[1].decode())


def master_proof(secret: bytes, master_nonce: bytes, replica_nonce: bytes) -> bytes:
    """Return the proof in HELLO that the master has the shared secret."""
    return _proof(secret, b"master", master_nonce, replica_nonce)


def replica_proof(secret: bytes, master_nonce: bytes, replica_nonce: bytes) -> bytes:
    """Return the proof in HELLO_ACK that the replica has the shared secret."""
    return _proof(secret, b"replica", master_nonce, replica_nonce)


def _proof(secret: bytes, role: bytes, master_nonce: bytes, replica_nonce: bytes) -> bytes:
    # Nonces have a fixed length, so different conversations never yield the same bytes.
    text = b"".join((role, _checked(master_nonce, NONCE_SIZE), _checked(replica_nonce, NONCE_SIZE)))
    return hmac.digest(secret, text, "sha256")


def is_proven(expected: bytes, given: bytes | None) -> bool:
    """Compare a proof or token in constant time."""
    return given is not None and hmac.compare_digest(expected, given)


def _checked(value: bytes, size: int) -> bytes:
    if len(value) != size:
        raise LocalProtocolError(f"nonce, token or proof has {len(value)} bytes; {size} are required")
    return value


def encode(frame: Frame) -> bytes:
    """Encode a frame."""
    kind, fields = _fields(frame)
    body = json.dumps(fields, separators=(",", ":")).encode()
    return _HEAD.pack(kind, len(body)) + body


def _fields(frame: Frame) -> tuple[FrameType, dict[str, Any]]:
    match frame:
        case Hello(instance, durable_epoch, horizon, nonce, proof, formerly):
            who: dict[str, Any] = {"instance": instance, "durable_epoch": durable_epoch, "horizon": horizon}
            if formerly:
                who["formerly"] = list(formerly)
            return FrameType.HELLO, who | {"nonce": _checked(nonce, NONCE_SIZE).hex(), "proof": _hex(proof)}
        case HelloAck(instance, follows, durable_epoch, token, proof):
            who = {"instance": instance, "follows": follows, "durable_epoch": durable_epoch}
            return FrameType.HELLO_ACK, who | {"token": _checked(token, TOKEN_SIZE).hex(), "proof": _hex(proof)}
        case Prepare(action, epoch):
            return FrameType.PREPARE, {"action": action.value, "epoch": epoch}


def _hex(proof: bytes | None) -> str | None:
    return None if proof is None else _checked(proof, PROOF_SIZE).hex()


def decode(kind: int, body: bytes) -> Frame:
    """Decode a frame from its type and JSON. Raise BadMessage if it is invalid."""
    try:
        frame_type = FrameType(kind)
    except ValueError:
        raise BadMessage(f"unknown message type {kind:#04x}") from None
    try:
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise BadMessage(f"{frame_type.name}: body is not JSON") from None
    if not isinstance(fields, dict):
        raise BadMessage(f"{frame_type.name}: body is not a JSON object")
    take = _Fields(frame_type, fields)
    match frame_type:
        case FrameType.HELLO:
            nonce = take.secret("nonce", NONCE_SIZE)
            proof = take.optional_secret("proof", PROOF_SIZE)
            where = take.epoch("durable_epoch"), take.epoch("horizon")
            return Hello(take.uuid("instance"), *where, nonce, proof, take.uuids("formerly"))
        case FrameType.HELLO_ACK:
            token = take.secret("token", TOKEN_SIZE)
            proof = take.optional_secret("proof", PROOF_SIZE)
            follows = take.uuid("follows") if fields.get("follows") is not None else None
            return HelloAck(take.uuid("instance"), follows, take.epoch("durable_epoch"), token, proof)
        case FrameType.PREPARE:
            return Prepare(take.action("action"), take.epoch("epoch"))


@dataclass(frozen=True, slots=True)
class _Fields:
    """Checks the fields of a frame. An error names the field, never its value."""

    frame: FrameType
    fields: Mapping[str, Any]

    def _bad(self, name: str, wanted: str) -> BadMessage:
        return BadMessage(f"{self.frame.name}: {name} is {wanted}")

    def uuid(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str) or not _UUID.fullmatch(value):
            raise self._bad(name, "not a UUID")
        return value.lower()

    def uuids(self, name: str) -> tuple[str, ...]:
        """Return a short list of UUIDs; empty if the field is missing."""
        values = self.fields.get(name, [])
        if not isinstance(values, list) or len(values) > FORMER_MAX:
            raise self._bad(name, f"not a list of at most {FORMER_MAX} values")
        if not all(isinstance(value, str) and _UUID.fullmatch(value) for value in values):
            raise self._bad(name, "not a list of UUIDs")
        return tuple(value.lower() for value in values)

    def epoch(self, name: str) -> int:
        value = self.fields.get(name)
        if type(value) is not int or not 0 <= value <= EPOCH_MAX:
            raise self._bad(name, "not an epoch")
        return value

    def action(self, name: str) -> Action:
        value = self.fields.get(name)
        try:
            return Action(value if isinstance(value, str) else "")
        except ValueError:
            raise self._bad(name, "unknown") from None

    def secret(self, name: str, size: int) -> bytes:
        value = self.fields.get(name)
        if not isinstance(value, str) or not _HEX.fullmatch(value) or len(value) != 2 * size:
            raise self._bad(name, f"not {size} bytes in hex")
        return bytes.fromhex(value)

    def optional_secret(self, name: str, size: int) -> bytes | None:
        return None if self.fields.get(name) is None else self.secret(name, size)


class ControlParser(Parser[Frame]):
    """Parses a control channel: messages of the protocol without data and, if `extended`, frames.

    The side that has offered the frames, or was offered them, sets `extended`. Until then a frame is an unknown
    message, as for the original. After a BadMessage, close the connection.
    """

    def __init__(self, *, extended: bool = False) -> None:
        super().__init__(size_max=CONTROL_MESSAGE_SIZE_MAX)
        self.extended = extended

    def _message(self) -> Message | Frame:
        kind = self._data[self._at]
        if self.extended and kind >= FrameType.HELLO:
            return self._frame(kind)
        if kind == MessageType.LOG_ENTRIES:
            raise BadMessage("LOG_ENTRIES on a control channel")
        return super()._message()

    def _frame(self, kind: int) -> Frame:
        body_at = self._wait_for(self._at + _HEAD.size)
        _, size = _HEAD.unpack_from(self._data, self._at)
        if size > FRAME_SIZE_MAX:
            raise BadMessage(f"frame of {size} bytes exceeds the limit of {FRAME_SIZE_MAX}")
        end = self._wait_for(body_at + size)
        body = self._data[body_at:end]
        self._taken(end)
        return decode(kind, body)
