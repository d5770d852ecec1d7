"""Masks replace the values of chosen fields with a digest, a placeholder or null before rows reach the lake.

Pure: tuples in, masked tuples out, many at once. The lake holds only masked tuples, in the typed columns and in
`_tuple` alike, so nothing in the lake reveals a value. Folding operations needs the exact tuples: the mirror keeps
those itself (`spark/mirror/batch.py`), never in the lake.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal, get_args

import msgspec
import numpy as np
import pyarrow as pa

from flowstone.box.definitions import SpaceDefinition
from flowstone.columns import column_kernels as kernels
from flowstone.columns.column_limits import Starts
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.scan import Cells
from flowstone.text.json_plain import json_value

MaskKind = Literal["sha256", "null", "redact"]
KINDS: Final[tuple[str, ...]] = get_args(MaskKind)
REDACTED: Final = "***"
_NIL: Final = b"\xc0"
_FORM: Final = "use SPACE.FIELD=KIND, such as users.email=sha256"


class WrongMask(FlowstoneError):
    """A mask cannot be parsed, or cannot be applied to the space it names."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one field of one space."""

    space: str
    field: str
    kind: MaskKind

    def __str__(self) -> str:
        return f"{self.space}.{self.field}={self.kind}"


def parse_mask(text: str) -> Mask:
    """Parse a mask such as `users.email=sha256`. The space name ends at the last dot before the `=`."""
    place, equals, kind = text.rpartition("=")
    space, dot, field = place.rpartition(".")
    if not (equals and dot and space and field):
        raise WrongMask(f"invalid mask {text!r}", hint=_FORM)
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1)
        raise WrongMask(
            f"unknown kind of mask {kind!r}", hint=f"{near[0]}?" if near else f"known kinds: {', '.join(KINDS)}"
        )
    return Mask(space, field, kind)  # type: ignore[arg-type]  # checked against KINDS above


@dataclass(frozen=True, slots=True)
class SpaceMask:
    """The masks of one space, by field number. Picklable: it is sent to executors with their tasks."""

    fields: tuple[tuple[int, MaskKind], ...]
    salt: str | None = None

    def definition(self, space: SpaceDefinition) -> SpaceDefinition:
        """Return the definition of masked tuples: digests and placeholders are strings, masked fields are nullable."""
        kinds = dict(self.fields)
        fields = tuple(
            msgspec.structs.replace(
                field,
                type=field.type if kinds[number] == "null" else "string",
                is_nullable=True,
                collation=field.collation if kinds[number] == "null" else None,
            )
            if number in kinds
            else field
            for number, field in enumerate(space.fields)
        )
        return msgspec.structs.replace(space, fields=fields)

    def tuples(self, exact: pa.Array) -> pa.Array:
        """Return the tuples with masked values. Null stays null, and so does a nil inside a tuple."""
        if isinstance(exact, pa.ChunkedArray):
            exact = exact.combine_chunks()
        if not len(exact) or not self.fields:
            return exact
        starts, ends = _fields(exact, [number for number, _ in self.fields])
        kinds = [kind for _, kind in self.fields]
        texts = exact.to_pylist()
        first = np.frombuffer(exact.buffers()[1], np.int32)[exact.offset : exact.offset + len(exact)].tolist()
        begins, stops = starts.tolist(), ends.tolist()
        found: list[bytes | None] = []
        for row, text in enumerate(texts):
            if text is None:
                found.append(None)
                continue
            pieces, at = [], 0
            for number, kind in enumerate(kinds):
                begin, stop = begins[number][row], stops[number][row]
                if begin < 0:
                    break  # fields are in ascending order, so later ones are missing too
                begin, stop = begin - first[row], stop - first[row]
                pieces += [text[at:begin], self._masked(text[begin:stop], kind)]
                at = stop
            found.append(b"".join([*pieces, text[at:]]))
        return pa.array(found, pa.binary())

    def _masked(self, value: bytes, kind: MaskKind) -> bytes:
        if value == _NIL or kind == "null":
            return _NIL
        return pack(REDACTED if kind == "redact" else digest(value, self.salt))


def digest(value: bytes, salt: str | None) -> str:
    """Return the SHA-256 of a MessagePack value in hexadecimal; with a salt, the HMAC-SHA-256 keyed with it.

    The input is the UTF-8 bytes of a string, the bytes of a binary, and the JSON text of anything else (a UUID or a
    decimal without quotes), so another system that has the value can compute the same digest.
    """
    plain = unpack(value)
    if isinstance(plain, bytes):
        data = plain
    else:
        text = plain if isinstance(plain, str) else json_value(value).strip('"')
        data = text.encode("utf-8", "surrogateescape")
    if salt is None:
        return hashlib.sha256(data).hexdigest()
    return hmac.new(salt.encode(), data, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Masking:
    """All masks of a mirror, and the salt of their digests."""

    masks: tuple[Mask, ...] = ()
    salt: str | None = None

    @classmethod
    def parse(cls, texts: Sequence[str], salt: str | None = None) -> Masking:
        masks = tuple(parse_mask(text) for text in texts)
        for number, mask in enumerate(masks):
            if any((mask.space, mask.field) == (other.space, other.field) for other in masks[:number]):
                raise WrongMask(f"{mask.space}.{mask.field} is masked twice", hint="omit one of the masks")
        return cls(masks, salt)

    def __bool__(self) -> bool:
        return bool(self.masks)

    def of(self, space: SpaceDefinition) -> SpaceMask | None:
        """Return the masks of a space, or None if it has none.

        Raise WrongMask if a mask cannot be applied, so that no value is ever mirrored unmasked.
        """
        fields: dict[int, MaskKind] = {}
        key = {part.field for part in space.primary_key.parts} if space.primary_key is not None else set()
        for mask in self.masks:
            if mask.space != space.name:
                continue
            if mask.field not in space.field_names:
                known = ", ".join(space.field_names) or "no named fields"
                raise WrongMask(
                    f"space {space.name!r} has no field {mask.field!r} to mask",
                    hint=f"it has {known}",
                )
            number = space.field_names.index(mask.field)
            if number in key:
                raise WrongMask(
                    f"field {mask.field!r} of space {space.name!r} is part of its primary key and cannot be masked",
                    hint="the primary key identifies rows; omit the mask, or skip the space with --exclude",
                )
            fields[number] = mask.kind
        return SpaceMask(tuple(sorted(fields.items())), self.salt) if fields else None

    def follow(self, was: SpaceDefinition, now: SpaceDefinition) -> None:
        """Raise WrongMask if an alter would change which values are masked.

        Values keep their field number when a field is renamed, so an alter may just have swapped the names.
        """
        before, after = self.of(was), self.of(now)
        if before == after and (before is None or was.name == now.name):
            return
        if before is None or after is None or was.name != now.name:
            raise WrongMask(
                f"space {was.name!r} was renamed to {now.name!r}, and --mask names only one of these",
                hint="mirror into a new lake with masks for the new name",
            )
        number, _ = min({*before.fields} ^ {*after.fields})
        raise WrongMask(
            f"masks of space {now.name!r} would apply to different fields: field {number + 1} was "
            f"{_name_of(was, number)} and is now {_name_of(now, number)}",
            hint="mirror into a new lake with masks for the new names",
        )

    @property
    def fingerprint(self) -> str:
        """Equal for equal masks and salt; all tables of a lake share it. It does not reveal the salt."""
        text = "\n".join(sorted(map(str, self.masks)))
        if not text:
            return ""
        return hmac.new((self.salt or "").encode(), text.encode(), hashlib.sha256).hexdigest()


def _name_of(space: SpaceDefinition, number: int) -> str:
    return repr(space.field_names[number]) if number < len(space.fields) else "without a name"


def _fields(tuples: pa.Array, numbers: Sequence[int]) -> tuple[Starts, Cells]:
    """Return the start and end of the numbered fields in the buffer of the tuples; -1 where a tuple lacks the field."""
    count = len(tuples)
    data = tuples.buffers()[2]
    buf = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    offsets = np.frombuffer(tuples.buffers()[1], np.int32)[tuples.offset : tuples.offset + count + 1]
    rows: Cells = np.flatnonzero(tuples.is_valid().to_numpy(zero_copy_only=False)).astype(np.int64)
    cells: Cells = np.full((scan.LINES, count), -1, np.int64)
    cells[scan.TUPLE_AT], cells[scan.TUPLE_END] = offsets[:-1], offsets[1:]
    all_starts: Starts = np.empty((max(numbers) + 2, len(rows)), np.int32)
    row = kernels.split_tuples(buf, cells, rows, np.empty(0, np.int64), all_starts)
    if row >= 0:
        raise WrongMask(f"cannot mask tuple {int(rows[row])} of a batch: it is not an array")
    starts: Starts = np.full((len(numbers), count), -1, np.int32)
    ends: Cells = np.full((len(numbers), count), -1, np.int64)
    for line, number in enumerate(numbers):
        found: Cells = np.empty(len(rows), np.int64)
        mine = np.ascontiguousarray(all_starts[number])
        kernels.value_ends(buf, mine, found)
        starts[line, rows], ends[line, rows] = mine, found
    return starts, ends
