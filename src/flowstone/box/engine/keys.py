"""Index keys of tuples and requests, as values that Python's own `<` orders as the server does.

In a unique index on a single integer the key is the number itself, on a single string its bytes; otherwise it is the
concatenated encodings of the parts (`key_encoding.py`). In a non-unique index, or if a part is nil, the primary key is
appended, so that entries are distinct and equal keys are in primary key order. `KeyDefinition` relies on tuples having
passed their format; keys of requests are checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.collation import Collation
from flowstone.box.engine.field_types import KIND_FLOAT, accepted_classes, accepted_kinds, elements_of, kind_at
from flowstone.box.engine.key_encoding import ABOVE, NIL, Encoder, encoder
from flowstone.box.engine.key_parts import PART_OF_TYPE
from flowstone.box.engine.paths import EVERY, Step, find, parse_path
from flowstone.iproto import errors
from flowstone.iproto.msgpack import unpack

Key = int | bytes
Values = tuple[Any, ...]


EQ, REQ, ALL, LT, LE, GE, GT = range(7)
"""Iterator types of SELECT that ordered indexes support."""

_REVERSE: Final = (REQ, LT, LE)
_HASH_ITERATORS: Final = (EQ, ALL, GT)


class KeyKind(Enum):
    """Representation of keys: the number, the bytes of the string, or encoded parts."""

    INTEGER = "integer"
    STRING = "string"
    ENCODED = "encoded"


class KeyLayout(NamedTuple):
    """The parts of a key for compiled code: those of the index, then those of the primary key that may follow."""

    fields: tuple[int, ...]
    kinds: tuple[int, ...]
    """A PART constant of `key_parts.py` each."""
    accepted: tuple[int, ...]
    """The kinds of values (`field_types.py`) in keys of requests, without nil."""
    nullable: tuple[bool, ...]
    own_count: int
    """Number of parts of the index itself."""


class Span(NamedTuple):
    """The half-open range of entries from `low` to `high`; None means unbounded. Read backwards if `reverse`."""

    low: Key | None
    high: Key | None
    reverse: bool


_Getter = Callable[[Values], Any]


class _Part(NamedTuple):
    """An index part, prepared for use. `steps` is the path from the field; steps after EVERY are within an element."""

    definition: IndexPart
    get: _Getter
    encode: Encoder
    types: frozenset[type]
    is_unsigned: bool
    steps: tuple[Step, ...]
    accepted: int
    kind: int
    """The PART constant of `key_parts.py`; 0 if compiled code cannot encode the part."""


class KeyDefinition:
    """Computes the keys of one index. Immutable.

    `entries` returns the keys of a decoded tuple that has passed its format: one key, or for a multikey index any
    number of distinct keys in order. `exact` returns the key of a request that must match one tuple of a unique index.
    """

    kind: KeyKind
    parts: tuple[IndexPart, ...]
    is_unique: bool
    is_multikey: bool
    entries: Callable[[Values], list[Key]]
    exact: Callable[[Values], Key]

    def __init__(
        self,
        index: IndexDefinition,
        primary: IndexDefinition | None,
        collations: Mapping[int, Collation],
        space: SpaceDefinition | None = None,
        dialect: Dialect = Dialect.V2_6,
    ) -> None:
        self._index = index
        self._space = space
        self.parts = index.parts
        self.is_unique = index.unique
        self._parts = tuple(_part(part, collations, dialect) for part in index.parts)
        self._tail = tuple(_part(part, collations, dialect) for part in primary.parts) if primary is not None else ()
        self._doubles = frozenset(
            number
            for number, part in enumerate(index.parts)
            if part.type == "double" and not accepted_kinds(part.type, dialect) & KIND_FLOAT
        )
        """Numbers of the parts that accept 8-byte floats only."""
        self.is_multikey = any(EVERY in part.steps for part in self._parts)
        self.kind = _kind_of(index, self._parts)
        self._is_tree = index.type == "tree"
        self._encoders = tuple(part.encode for part in self._parts)
        # Plain tuples for the keys of requests: attribute access would cost as much as the encoding.
        self._requested = tuple(
            (part.types, part.is_unsigned, part.definition.is_nullable, part.encode) for part in self._parts
        )
        self.entries = self._without_excluded(self._compile_entries())
        self.exact = self._compile_exact()

    @property
    def layout(self) -> KeyLayout | None:
        """The parts for compiled code; None if it cannot compute keys of this index."""
        parts = (*self._parts, *self._tail)
        if any(not part.kind or part.definition.exclude_null for part in parts):
            return None
        # Servers reject two parts on one field, but files may have them; compiled code has room for each field once,
        # and once more in the primary key.
        if any(len({part.definition.field for part in each}) < len(each) for each in (self._parts, self._tail)):
            return None
        return KeyLayout(
            tuple(part.definition.field for part in parts),
            tuple(part.kind for part in parts),
            tuple(part.accepted for part in parts),
            tuple(part.definition.is_nullable for part in parts),
            len(self._parts),
        )

    def read(self, raw: bytes) -> Any:
        """Decode the key of a request.

        Raise KeyPartType for a 4-byte float where only 8-byte ones are accepted: once decoded, they are the same.
        """
        values = unpack(raw)
        if self._doubles and type(values) is tuple and len(values) <= len(self._parts):
            for number, element in enumerate(elements_of(raw)):
                if number in self._doubles and kind_at(element, 0) == KIND_FLOAT:
                    raise self._wrong_type(number)
        return values

    def span(self, iterator: int, values: Values) -> Span:
        """Return the span that a SELECT with this iterator and key reads."""
        if not values and self._takes_no_parts(iterator):
            return Span(None, None, iterator in _REVERSE)
        self._check_count(len(values))
        at, above = self._bounds(values)
        if iterator > GT or not (self._is_tree or iterator in _HASH_ITERATORS):
            raise self._unsupported("requested iterator type")
        if iterator == EQ:
            return Span(at, above, False)
        if iterator == REQ:
            return Span(at, above, True)
        if iterator == LT:
            return Span(None, at, True)
        if iterator == LE:
            return Span(None, above, True)
        if iterator == GT:
            return Span(above, None, False)
        # ALL with a key means GE in a tree and all entries in a hash.
        return Span(at if self._is_tree else None, None, False)

    def _bounds(self, values: Values) -> tuple[Key, Key]:
        """Return the lower and upper bound of all entries that begin with the key."""
        if self.kind is KeyKind.INTEGER:
            number = self.exact(values)
            assert isinstance(number, int)
            return number, number + 1
        if self.kind is KeyKind.STRING:
            text = self.exact(values)
            assert isinstance(text, bytes)
            return text, text + b"\x00"
        encoded = self._encode_request(values, True)
        return encoded, encoded + ABOVE

    def _encode(self, values: Sequence[Any]) -> bytes:
        return b"".join([encode(value) for encode, value in zip(self._encoders, values, strict=False)])

    # --- keys of tuples ------------------------------------------------------------------------------------------

    def _compile_entries(self) -> Callable[[Values], list[Key]]:
        if self.is_multikey:
            return self._multikey_entries
        first = self._parts[0]
        if self.kind is KeyKind.INTEGER:
            field = first.definition.field
            return lambda values: [values[field]]
        if self.kind is KeyKind.STRING:
            field = first.definition.field
            return lambda values: [_string_key(values[field])]
        if not self.is_unique:
            return _joined((*self._parts, *self._tail))
        if any(part.definition.is_nullable for part in self._parts):
            return self._nullable_entries
        return _joined(self._parts)

    def _without_excluded(self, entries: Callable[[Values], list[Key]]) -> Callable[[Values], list[Key]]:
        """Wrap `entries` to return no keys for a tuple with nil in a part that has `exclude_null`."""
        excluding = tuple(part for part in self._parts if part.definition.exclude_null and EVERY not in part.steps)
        if not excluding:
            return entries
        return lambda values: [] if any(part.get(values) is None for part in excluding) else entries(values)

    def _nullable_entries(self, values: Values) -> list[Key]:
        key = [part.get(values) for part in self._parts]
        return [self._encode(key) + self._tail_of(values) if None in key else self._encode(key)]

    def _multikey_entries(self, values: Values) -> list[Key]:
        """Return one entry per distinct element of the array; none if there is no array."""
        elements = _elements(self._parts, values)
        plain = [None if EVERY in part.steps else part.get(values) for part in self._parts]
        tail: bytes | None = None
        entries: dict[Key, None] = {}
        for element in elements:
            key = [
                find(element, part.steps[part.steps.index(EVERY) + 1 :]) if EVERY in part.steps else value
                for part, value in zip(self._parts, plain, strict=True)
            ]
            if any(value is None and part.exclude_null for part, value in zip(self.parts, key, strict=True)):
                continue
            encoded = self._encode(key)
            if not self.is_unique or None in key:
                tail = self._tail_of(values) if tail is None else tail
                encoded += tail
            entries[encoded] = None
        return sorted(entries)

    def _tail_of(self, values: Values) -> bytes:
        return b"".join([part.encode(part.get(values)) for part in self._tail])

    # --- keys of requests ----------------------------------------------------------------------------------------

    def _compile_exact(self) -> Callable[[Values], Key]:
        if self.kind is KeyKind.INTEGER:
            lowest = 0 if self._parts[0].is_unsigned else -(1 << 63)

            def exact_integer(values: Values) -> Key:
                if len(values) == 1 and type(values[0]) is int and values[0] >= lowest:
                    return values[0]
                raise self._not_exact(values)

            return exact_integer
        if self.kind is KeyKind.STRING:

            def exact_string(values: Values) -> Key:
                if len(values) == 1 and type(values[0]) is str:
                    return _string_key(values[0])
                raise self._not_exact(values)

            return exact_string
        if len(self._parts) == 1:
            ((types, is_unsigned, _, encode),) = self._requested

            def exact_part(values: Values) -> Key:
                if len(values) == 1 and type(value := values[0]) in types and not (is_unsigned and value < 0):
                    return encode(value)
                raise self._not_exact(values)

            return exact_part
        if len(self._parts) == 2:
            return self._compile_exact_pair()
        return self._exact_encoded

    def _compile_exact_pair(self) -> Callable[[Values], Key]:
        (types_a, is_unsigned_a, _, encode_a), (types_b, is_unsigned_b, _, encode_b) = self._requested

        def exact_pair(values: Values) -> Key:
            if len(values) == 2:
                a, b = values
                if (
                    type(a) in types_a
                    and type(b) in types_b
                    and not (is_unsigned_a and a < 0)
                    and not (is_unsigned_b and b < 0)
                ):
                    return encode_a(a) + encode_b(b)
            raise self._not_exact(values)

        return exact_pair

    def _exact_encoded(self, values: Values) -> Key:
        if len(values) != len(self._parts):
            raise self._not_exact(values)
        return self._encode_request(values, False)

    def _encode_request(self, values: Values, takes_nil: bool) -> bytes:
        """Check and encode the parts of a request's key."""
        encoded = b""
        for value, (types, is_unsigned, is_nullable, encode) in zip(values, self._requested, strict=False):
            if type(value) in types and not (is_unsigned and value < 0):
                encoded += encode(value)
            elif value is None and takes_nil and is_nullable:
                encoded += NIL
            else:
                raise self._wrong_part(values, takes_nil)
        return encoded

    def _wrong_part(self, values: Values, takes_nil: bool) -> errors.TarantoolError:
        """Return the error for the first part whose value has a wrong type."""
        for number, (part, value) in enumerate(zip(self._parts, values, strict=False)):
            is_right = type(value) in part.types and not (part.is_unsigned and value < 0)
            if not is_right and not (value is None and takes_nil and part.definition.is_nullable):
                return self._wrong_type(number)
        raise AssertionError("every part is right")

    def _wrong_type(self, number: int) -> errors.TarantoolError:
        return errors.KeyPartType(
            f"Supplied key type of part {number} does not match index part type: expected {self.parts[number].type}"
        )

    def _not_exact(self, values: Values) -> errors.TarantoolError:
        if len(values) != len(self._parts):
            return errors.ExactMatch(
                f"Invalid key part count in an exact match (expected {len(self._parts)}, got {len(values)})"
            )
        return self._wrong_part(values, takes_nil=False)

    def _takes_no_parts(self, iterator: int) -> bool:
        return self._is_tree or iterator == ALL or (self._index.type == "hash" and iterator == GT)

    def _check_count(self, count: int) -> None:
        expected = len(self._parts)
        if count > expected:
            raise errors.KeyPartCount(f"Invalid key part count (expected [0..{expected}], got {count})")
        if count < expected and not self._is_tree:
            raise errors.PartialKey(
                f"{self._index.type.upper()} index  does not support selects via a partial key"
                f" (expected {expected} parts, got {count}). Please Consider changing index type to TREE."
            )

    def _unsupported(self, what: str) -> errors.TarantoolError:
        space, engine = (self._space.name, self._space.engine) if self._space else (str(self._index.space_id), "memtx")
        return errors.UnsupportedIndexFeature(
            f"Index '{self._index.name}' ({self._index.type.upper()}) of space '{space}' ({engine})"
            f" does not support {what}"
        )


def _kind_of(index: IndexDefinition, parts: tuple[_Part, ...]) -> KeyKind:
    part = parts[0].definition
    if len(parts) > 1 or not index.unique or part.is_nullable or parts[0].steps:
        return KeyKind.ENCODED
    if part.type in ("unsigned", "integer"):
        return KeyKind.INTEGER
    return KeyKind.STRING if part.type == "string" and part.collation is None else KeyKind.ENCODED


def _part(part: IndexPart, collations: Mapping[int, Collation], dialect: Dialect) -> _Part:
    collation = collations.get(part.collation) if part.collation is not None else None
    steps = parse_path(part.path) if part.path else ()
    return _Part(
        part,
        _getter(part, steps),
        encoder(part.type, part.is_nullable, collation, dialect),
        accepted_classes(part.type, dialect),
        part.type == "unsigned",
        steps,
        accepted_kinds(part.type, dialect),
        0 if steps or (collation is not None and not collation.is_binary) else _compiled_kind(part.type, dialect),
    )


def _compiled_kind(type: str, dialect: Dialect) -> int:
    if type == "double" and dialect is not Dialect.V2_11:
        return 0  # doubles of older dialects have an encoding of their own
    return PART_OF_TYPE.get(type, 0)


def _getter(part: IndexPart, steps: tuple[Step, ...]) -> _Getter:
    field = part.field
    if steps:
        return lambda values: find(values[field], steps) if field < len(values) else None
    if part.is_nullable:
        return lambda values: values[field] if field < len(values) else None
    return lambda values: values[field]


def _joined(parts: tuple[_Part, ...]) -> Callable[[Values], list[Key]]:
    """Return a function for entries of a single key; the most common shapes have a fast path."""
    if all(not part.steps and not part.definition.is_nullable for part in parts):
        fields, encoders = [part.definition.field for part in parts], [part.encode for part in parts]
        if len(parts) == 1:
            (a,), (encode_a,) = fields, encoders
            return lambda values: [encode_a(values[a])]
        if len(parts) == 2:
            (a, b), (encode_a, encode_b) = fields, encoders
            return lambda values: [encode_a(values[a]) + encode_b(values[b])]
        pairs = tuple(zip(fields, encoders, strict=True))
        return lambda values: [b"".join([encode(values[field]) for field, encode in pairs])]
    return lambda values: [b"".join([part.encode(part.get(values)) for part in parts])]


def _elements(parts: tuple[_Part, ...], values: Values) -> tuple[Any, ...]:
    """Return the array that `[*]` of a multikey index refers to; empty if there is none."""
    part = next(part for part in parts if EVERY in part.steps)
    field = part.definition.field
    array = find(values[field], part.steps[: part.steps.index(EVERY)]) if field < len(values) else None
    return array if type(array) is tuple else ()


def _string_key(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
