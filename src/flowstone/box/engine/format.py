"""The format of a space's tuples: the rules for each field, from the space format and from index parts.

Rules, their order and the error texts are the same as in the server's tuple format: types are checked in tuple order
and down the JSON paths of index parts, and missing fields are reported last. A tuple is checked in up to two passes: a
quick one over its decoded values, and a close one over its bytes if the quick one is not conclusive. RTREE indexes are
checked last. They are not served here, but real servers that recover the data rely on valid fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.field_types import (
    KIND_ARRAY,
    KIND_DATETIME,
    KIND_DECIMAL,
    KIND_EXT,
    KIND_MAP,
    KIND_NIL,
    KIND_STR,
    KIND_UUID,
    accepted_classes,
    accepted_kinds,
    children_of,
    contains,
    end_of,
    is_accepted,
    kind_at,
)
from flowstone.box.engine.paths import EVERY, INDEX_BASE, Step, format_path, parse_path
from flowstone.iproto import errors
from flowstone.iproto.extensions import Extension
from flowstone.iproto.msgpack import unpack

_SIGNED_BUT_NOT_NEGATIVE: Final = re.compile(rb"[\xd0-\xd3][\x00-\x7f]", re.DOTALL)
"""A non-negative number with a signed encoding, which servers reject as unsigned. A false match costs a close check."""

_SINGLE_FLOAT: Final = 0xCA

_DECODED: Final = KIND_DECIMAL | KIND_UUID | KIND_DATETIME
"""Extensions whose content is checked only in index parts: servers store a malformed one in any other field."""


class FormatField:
    """A field of the format, or a value inside a field that a JSON path refers to."""

    __slots__ = ("accepted", "children", "id", "is_key_part", "is_nullable", "path", "type")

    def __init__(self, id: int, path: tuple[Step, ...], type: str = "any", is_nullable: bool = True) -> None:
        self.id = id
        self.path = path
        self.type = type
        self.is_nullable = is_nullable
        self.is_key_part = False
        self.accepted = 0
        self.children: dict[Step, FormatField] = {}

    @property
    def where(self) -> str:
        """The name of the field in error messages."""
        first = self.path[0]
        assert isinstance(first, int)
        return str(first + INDEX_BASE) if len(self.path) == 1 else format_path(self.path)

    @property
    def is_required(self) -> bool:
        return not self.children and not self.is_nullable

    def child_at(self, step: Step) -> FormatField | None:
        return self.children.get(EVERY) or self.children.get(step)

    def make_room_for(self, step: Step) -> None:
        """Become the array or map that the next step of a path requires; raise an error if another index conflicts."""
        needed = "map" if isinstance(step, str) else "array"
        if not contains(self.type, needed):
            raise errors.IndexPartTypeMismatch(
                f"Field {self.where} has type '{self.type}' in one index, but type '{needed}' in another"
            )
        self.type = needed
        if self.children and (step is EVERY) != (EVERY in self.children):
            raise errors.MultikeyIndexMismatch(
                f"Field {self.where} is used as multikey in one index and as single key in another"
            )

    def demand_container(self) -> None:
        """Make an array or map on a path mandatory, even if the field is nullable by default."""
        if self.type in ("array", "map"):
            self.is_nullable = False


class _Rectangle:
    """The check of an RTREE index: its field holds the coordinates of a point, or of two opposite corners of a box."""

    __slots__ = ("_dimension", "_steps")

    def __init__(self, index: IndexDefinition) -> None:
        part = index.parts[0]  # servers allow a single part
        self._steps: tuple[Step, ...] = (part.field, *(parse_path(part.path) if part.path else ()))
        self._dimension = index.dimension

    def check(self, values: Any) -> None:
        """Raise the server's error if the field is no rectangle; `values` is a tuple that has passed its format."""
        for step in self._steps:
            values = values[step]
        points, corners = self._dimension, self._dimension * 2
        if len(values) not in (points, corners):
            raise errors.RtreeRect(
                f"RTree: Field must be an array with {points} (point) or {corners} (rectangle/box) numeric coordinates"
            )
        for number, value in enumerate(values):
            # Servers convert coordinates to doubles and accept only integers that a double represents exactly.
            if not (type(value) is float or (type(value) is int and int(float(value)) == value)):
                # The server's text has the number of the coordinate, not of the field.
                raise errors.FieldType(
                    f"Tuple field {number + INDEX_BASE} type does not match one required by operation: expected number"
                )


class TupleFormat:
    """The rules for the tuples of a space. Immutable.

    `masks` holds the accepted kinds (`field_types.py`) of each field, from 0, or is None if the kinds of the fields
    alone cannot decide whether a tuple is valid. Extensions that need a close check are in no mask.
    """

    field_names: tuple[str, ...]
    field_count_exact: int  # 0: any
    field_count_min: int
    masks: NDArray[np.int64] | None

    def __init__(self, space: SpaceDefinition, dialect: Dialect = Dialect.V2_6) -> None:
        self.field_names = space.field_names
        self.field_count_exact = space.field_count
        self.field_count_min = _field_count_min(space)
        self._fields = _fields_of(space)
        self._nested_count = len(self._fields)
        for index in space.indexes:
            if not index.is_functional:
                for part in index.parts:
                    self._use(part)
        for field in self._fields:
            for inner in _below(field):
                inner.accepted = accepted_kinds(inner.type, dialect) | (KIND_NIL if inner.is_nullable else 0)
        self._is_nested = any(field.children for field in self._fields)
        self._rectangles = tuple(_Rectangle(index) for index in space.indexes if index.type == "rtree")
        self.masks = None if self._is_nested or self._rectangles else self._make_masks()
        self._is_surely_right = self._compile(dialect)

    @property
    def fields(self) -> tuple[FormatField, ...]:
        """The fields that the space format or an index part defines."""
        return tuple(self._fields)

    @property
    def type(self) -> str:
        """Type of a tuple as a node of an update tree: an array with the fields as children."""
        return "array"

    def child_at(self, step: Step) -> FormatField | None:
        """Return the field with number `step`, or None if the format does not define it."""
        return self._fields[step] if isinstance(step, int) and step < len(self._fields) else None

    def check(self, raw: bytes, values: tuple[Any, ...]) -> None:
        """Raise the server's error if the tuple is invalid. `values` is the decoded `raw`."""
        if not self._is_surely_right(raw, values):
            self._check_closely(raw)
        if self._rectangles:
            for rectangle in self._rectangles:
                rectangle.check(values)

    # --- from definition to fields -------------------------------------------------------------------------------

    def _use(self, part: IndexPart) -> None:
        field = self._fields[part.field]
        if part.path:
            field = self._descend(field, parse_path(part.path))
        # The stricter definition applies. In 2.6.0 a nullable path overrides the other one, and the server crashes.
        field.is_nullable = field.is_nullable and part.is_nullable
        if contains(field.type, part.type):
            field.type = part.type
        elif not contains(part.type, field.type):
            raise _mismatch(field, part)
        field.is_key_part = True

    def _descend(self, field: FormatField, steps: tuple[Step, ...]) -> FormatField:
        for step in steps:
            field.make_room_for(step)
            child = field.child_at(step)
            if child is None:
                child = field.children[step] = FormatField(self._nested_count, (*field.path, step))
                self._nested_count += 1
            field.demand_container()
            field.is_key_part = True
            field = child
        field.demand_container()
        return field

    def _make_masks(self) -> NDArray[np.int64]:
        closely = [KIND_EXT | _DECODED if field.is_key_part else KIND_EXT for field in self._fields]
        return np.array([field.accepted & ~kinds for field, kinds in zip(self._fields, closely, strict=True)], np.int64)

    # --- quick check ---------------------------------------------------------------------------------------------

    def _compile(self, dialect: Dialect) -> Callable[[bytes, tuple[Any, ...]], bool]:
        """Return a test that is True for most valid tuples and for no invalid one."""
        allowed = tuple(_allowed_classes(field, dialect) for field in self._fields)
        unsigned = tuple(field.id for field in self._fields if field.type == "unsigned")
        delicate = tuple(field.id for field in self._fields if field.type in ("unsigned", "double"))
        has_doubles = len(delicate) > len(unsigned)
        minimum, exact = self.field_count_min, self.field_count_exact
        suspicious = _SIGNED_BUT_NOT_NEGATIVE.search

        def is_surely_right(raw: bytes, values: tuple[Any, ...]) -> bool:
            count = len(values)
            if count < minimum or (exact and count != exact):
                return False
            for value, types in zip(values, allowed, strict=False):
                if type(value) not in types:
                    return False
            for number in unsigned:
                if number < count and (value := values[number]) is not None and value < 0:
                    return False
            if (unsigned and suspicious(raw)) or (has_doubles and _SINGLE_FLOAT in raw):
                return self._have_right_kinds(raw, delicate)
            return True

        return (lambda raw, values: False) if self._is_nested else is_surely_right

    def _have_right_kinds(self, raw: bytes, numbers: tuple[int, ...]) -> bool:
        """Return True if the fields with these numbers, in ascending order, have accepted encodings."""
        count, at = children_of(raw, 0)
        here = 0
        for number in numbers:
            if number >= count:
                break
            for _ in range(number - here):
                at = end_of(raw, at)
            here = number
            if not is_accepted(self._fields[number].accepted, raw, at):
                return False
        return True

    # --- close check ---------------------------------------------------------------------------------------------

    def _check_closely(self, raw: bytes) -> None:
        count, at = children_of(raw, 0)
        if self.field_count_exact and count != self.field_count_exact:
            raise errors.ExactFieldCount(
                f"Tuple field count {count} does not match space field count {self.field_count_exact}"
            )
        found: dict[int, None] = {}
        for number in range(min(count, len(self._fields))):
            at = _check_value(raw, at, self._fields[number], found)
        _check_missing(self._all_fields(), found)

    def _all_fields(self) -> Iterator[FormatField]:
        """Yield all fields and nested fields, level by level, except those inside of multikey arrays."""
        level = self._fields
        while level:
            yield from level
            level = [child for field in level for step, child in field.children.items() if step is not EVERY]


def _field_count_min(space: SpaceDefinition) -> int:
    fields = [number for number, field in enumerate(space.fields, 1) if not field.is_nullable]
    indexes = [index for index in space.indexes if not index.is_functional]
    parts = [part.field + 1 for index in indexes for part in index.parts if not part.is_nullable]
    return max([0, *fields, *parts])


def _fields_of(space: SpaceDefinition) -> list[FormatField]:
    fields = [
        FormatField(number, (number,), field.type, field.is_nullable) for number, field in enumerate(space.fields)
    ]
    indexed = [part.field + 1 for index in space.indexes if not index.is_functional for part in index.parts]
    return fields + [FormatField(number, (number,)) for number in range(len(fields), max([0, *indexed]))]


def _mismatch(field: FormatField, part: IndexPart) -> errors.TarantoolError:
    if field.is_key_part:
        return errors.IndexPartTypeMismatch(
            f"Field {field.where} has type '{field.type}' in one index, but type '{part.type}' in another"
        )
    return errors.FormatMismatchIndexPart(
        f"Field {field.where} has type '{field.type}' in space format, but type '{part.type}' in index definition"
    )


def _allowed_classes(field: FormatField, dialect: Dialect) -> frozenset[type]:
    classes = accepted_classes(field.type, dialect) - {Extension}  # an extension needs a close check of its code
    return classes | {type(None)} if field.is_nullable else classes


def _check_value(raw: bytes, at: int, field: FormatField, found: dict[int, None]) -> int:
    """Check the value at `at` and the nested values that paths refer to; return its end offset."""
    if not is_accepted(field.accepted, raw, at):
        raise _wrong_type(field)
    found[field.id] = None
    if field.is_key_part and kind_at(raw, at) & _DECODED and isinstance(unpack(raw[at : end_of(raw, at)]), Extension):
        raise _wrong_type(field)
    kind = kind_at(raw, at) if field.children else 0
    if kind == KIND_ARRAY:
        return _check_array(raw, at, field, found)
    if kind == KIND_MAP:
        return _check_map(raw, at, field, found)
    return end_of(raw, at)


def _wrong_type(field: FormatField) -> errors.TarantoolError:
    return errors.FieldType(
        f"Tuple field {field.where} type does not match one required by operation: expected {field.type}"
    )


def _check_array(raw: bytes, at: int, field: FormatField, found: dict[int, None]) -> int:
    count, at = children_of(raw, at)
    every = field.children.get(EVERY)
    for position in range(count):
        child = every or field.children.get(position)
        if child is None:
            at = end_of(raw, at)
        elif every is not None:
            inside: dict[int, None] = {}
            at = _check_value(raw, at, child, inside)
            _check_missing(_below(every), inside)
        else:
            at = _check_value(raw, at, child, found)
    return at


def _check_map(raw: bytes, at: int, field: FormatField, found: dict[int, None]) -> int:
    count, at = children_of(raw, at)
    for _ in range(count // 2):
        value_at = end_of(raw, at)
        key = unpack(raw[at:value_at]) if kind_at(raw, at) == KIND_STR else None
        child = field.children.get(key) if key is not None else None
        at = _check_value(raw, value_at, child, found) if child is not None else end_of(raw, value_at)
    return at


def _below(field: FormatField) -> Iterator[FormatField]:
    yield field
    for child in field.children.values():
        yield from _below(child)


def _check_missing(fields: Iterator[FormatField], found: dict[int, None]) -> None:
    missing = [field for field in fields if field.is_required and field.id not in found]
    if missing:
        first = min(missing, key=lambda field: field.id)
        raise errors.FieldMissing(f"Tuple field {first.where} required by space format is missing")
