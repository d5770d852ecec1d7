"""Compare two sides: the job of `flowstone verify`.

Both sides are shown at one settled position (`common_position.py`), as data frames (`sides.py`, `lake_side.py`).
Digests of all spaces are compared first, and keys only where digests differ (`digests.py`). The driver holds only the
rows it reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from flowstone.box.engine.paths import find, parse_path
from flowstone.box.schema import Schema, SchemaTracker, UnknownSpace
from flowstone.box.system import (
    CK_CONSTRAINT_ID,
    FIRST_USER_SPACE_ID,
    FUNC_INDEX_ID,
    INDEX_ID,
    SPACE_ID,
    SPACE_SEQUENCE_ID,
)
from flowstone.columns.sort_keys import sort_keys_of_keys
from flowstone.errors import FlowstoneError
from flowstone.iproto.msgpack import pack, unpack
from flowstone.lake.masks import SpaceMask
from flowstone.spark.collect import rows_of
from flowstone.spark.sources.options import AsOf
from flowstone.spark.verification.common_position import Meeting, meet
from flowstone.spark.verification.digests import (
    DIFFERS,
    ENCODED,
    MISSING_IN_A,
    MISSING_IN_B,
    SIDE_COLUMNS,
    TWICE,
    Difference,
    SpaceDigest,
    compare_digests,
    counts_by_kind,
    differing_keys,
    first_differences,
)
from flowstone.spark.verification.report import ShownDifference, SideReport, SpaceResult, VerifyReport, WrongRow
from flowstone.spark.verification.sides import DEFINITIONS, ON_REQUEST, Side, SideView
from flowstone.spark.verification.tuple_differences import FieldDifference, field_differences, shown_tuple

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

LIMIT: Final = 20

_FIRST_OF_USERS: Final[dict[int, tuple[int | str, ...]]] = {
    SPACE_ID: (FIRST_USER_SPACE_ID,),
    INDEX_ID: (FIRST_USER_SPACE_ID, 0),
    SPACE_SEQUENCE_ID: (FIRST_USER_SPACE_ID,),
    CK_CONSTRAINT_ID: (FIRST_USER_SPACE_ID, ""),
    FUNC_INDEX_ID: (FIRST_USER_SPACE_ID, 0),
}
"""System spaces with rows about spaces, and the lowest key that a row about a user space can have."""

_DEFINING: Final = (SPACE_ID, INDEX_ID)


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The spaces to compare (none: all), the position, and the number of differences to show."""

    spaces: tuple[int | str, ...] = ()
    with_system: bool = False
    at: AsOf | Literal["common"] | None = None
    wait: float = 10.0
    limit: int = LIMIT


def find_position(
    a: Side, b: Side, options: VerifyOptions, tell: Callable[[str], object] = lambda text: None
) -> Meeting:
    """Find the position at which to compare two sides. Waits as `options` say; needs no Spark."""
    return meet(a, b, at=options.at, wait=options.wait, sleep=time.sleep, monotonic=time.monotonic, tell=tell)


def compare(
    spark: SparkSession,
    a: Side,
    b: Side,
    meeting: Meeting,
    options: VerifyOptions,
    *,
    tell: Callable[[str], object] = lambda text: None,
) -> VerifyReport:
    """Compare two sides at the positions of `meeting`."""
    begun = time.monotonic()
    comparison = _Comparison(spark, a.view(spark, meeting.a), b.view(spark, meeting.b), options)
    tell(f"comparing {comparison.describe()} at {meeting.a}")
    spaces, differences, wrong = comparison.run(tell)
    return VerifyReport(
        SideReport(a.kind, a.name, a.replicaset_uuid, meeting.a.to_mapping(), meeting.lacks_a),
        SideReport(b.kind, b.name, b.replicaset_uuid, meeting.b.to_mapping(), meeting.lacks_b),
        tuple(spaces),
        tuple(differences),
        tuple(wrong),
        (*_notes_on(meeting), *comparison.notes()),
        time.monotonic() - begun,
    )


def _notes_on(meeting: Meeting) -> Iterator[str]:
    if not meeting.is_one_set:
        yield "the sides belong to different replica sets: each is compared at its newest settled position"
    elif not meeting.is_same_position:
        yield "the sides have no common position: each is compared at its own"


class _Comparison:
    """Two views, and the spaces of them that are compared."""

    def __init__(self, spark: SparkSession, a: SideView, b: SideView, options: VerifyOptions) -> None:
        self._spark, self._a, self._b, self._options = spark, a, b, options
        self._left_out = {**b.left_out, **a.left_out}
        self._chosen = frozenset(map(self._id_of, options.spaces))
        spaces = (a.spaces | b.spaces) - self._left_out.keys()
        definitions = frozenset(DEFINITIONS if not self._chosen else _DEFINING)
        if options.with_system:
            definitions |= frozenset(ON_REQUEST)
        definitions |= self._chosen & frozenset((*DEFINITIONS, *ON_REQUEST))
        self._definitions = definitions & a.definitions & b.definitions
        self._spaces = (spaces & self._chosen if self._chosen else spaces) | self._definitions
        for space_id in sorted(self._chosen):
            if space_id in self._left_out:
                raise FlowstoneError(f"space {self._name(space_id)!r} cannot be compared: {self._left_out[space_id]}")
        self._hidden = _hidden_fields(a, b)

    def _id_of(self, space: int | str) -> int:
        """Return the id of a space given by id or name, on either side. Raise UnknownSpace if neither has it."""
        found = self._a.schema.get(space) or self._b.schema.get(space)
        if found is None:
            self._a.schema.space(space)  # raises an error that lists the known spaces
            raise UnknownSpace(f"unknown space {space!r}")
        return found.id

    def _name(self, space_id: int) -> str:
        found = self._a.schema.get(space_id) or self._b.schema.get(space_id)
        return found.name if found is not None else f"space {space_id}"

    def describe(self) -> str:
        """Describe what is compared, for people."""
        count = len(self._spaces - self._definitions)
        return f"{count} {'space' if count == 1 else 'spaces'} and definitions"

    def notes(self) -> Iterator[str]:
        for space_id, why in sorted(self._left_out.items()):
            if not self._chosen:
                yield f"space {self._name(space_id)!r} is not compared: {why}"
        for space_id, fields in sorted(self._hidden.items()):
            if space_id not in self._spaces:
                continue
            schema = self._a.schema.get(space_id) or self._b.schema.get(space_id)
            names = schema.field_names if schema is not None else ()
            masked = [number for number in fields if number not in _uncompared(self._a, self._b, space_id)]
            told = ", ".join(names[number] if number < len(names) else str(number + 1) for number in masked)
            if told:
                yield f"space {self._name(space_id)!r}: masked fields are not compared: {told}"
        for view in (self._a, self._b):
            yield from view.notes

    # --- the jobs ---

    def run(self, tell: Callable[[str], object]) -> tuple[list[SpaceResult], list[ShownDifference], list[WrongRow]]:
        digests = compare_digests(self._frame(self._a, self._spaces), self._frame(self._b, self._spaces))
        known = {digest.space_id for digest in digests}
        empty = [SpaceDigest(space_id, 0, 0, 0, 0, ()) for space_id in self._spaces - known]
        digests = sorted([*digests, *empty], key=lambda digest: digest.space_id)
        buckets = {each.space_id: each.differing_buckets for each in digests if each.differing_buckets}
        kinds: dict[int, dict[str, int]] = {}
        shown: list[ShownDifference] = []
        if buckets:
            tell(f"searching for differing keys in {', '.join(map(self._name, sorted(buckets)))}")
            kinds, shown = self._differences(buckets)
        wrong = [*self._wrong("A", self._a, digests), *self._wrong("B", self._b, digests)]
        return [self._result(digest, kinds.get(digest.space_id, {})) for digest in digests], shown, wrong

    def _differences(
        self, buckets: dict[int, tuple[int, ...]]
    ) -> tuple[dict[int, dict[str, int]], list[ShownDifference]]:
        a, b = self._frame(self._a, buckets.keys()), self._frame(self._b, buckets.keys())
        found = differing_keys(self._spark, a, b, buckets).persist()
        try:
            kinds = counts_by_kind(found)
            shown = first_differences(found, self._options.limit) if self._options.limit else []
        finally:
            found.unpersist()
        return kinds, [self._shown(each) for each in shown]

    def _result(self, digest: SpaceDigest, kinds: dict[str, int]) -> SpaceResult:
        return SpaceResult(
            digest.space_id,
            self._name(digest.space_id),
            digest.rows_a,
            digest.rows_b,
            missing_in_a=kinds.get(MISSING_IN_A, 0),
            missing_in_b=kinds.get(MISSING_IN_B, 0),
            differing=kinds.get(DIFFERS, 0),
            twice=kinds.get(TWICE, 0),
            encoded=kinds.get(ENCODED, 0),
            wrong_a=digest.wrong_a,
            wrong_b=digest.wrong_b,
        )

    def _shown(self, difference: Difference) -> ShownDifference:
        space_id = difference.space_id
        a, b = difference.a, difference.b
        fields: Sequence[FieldDifference] = ()
        space = self._a.schema.get(space_id) or self._b.schema.get(space_id)
        if a is not None and b is not None:
            fields = field_differences(a, b, space.field_names if space is not None else (), space_id)
        key = self._key(space_id, a if a is not None else b) or difference.sort_key.hex()
        return ShownDifference(
            space_id,
            self._name(space_id),
            key,
            difference.kind,
            shown_tuple(a, space_id),
            shown_tuple(b, space_id),
            tuple(fields),
            difference.count_a,
            difference.count_b,
        )

    def _key(self, space_id: int, tuple_: bytes | None) -> str | None:
        """Return the primary key of a tuple as JSON, or None."""
        for schema in (self._a.schema, self._b.schema):
            found = key_of(schema, space_id, tuple_)
            if found is not None:
                return found
        return None

    def _wrong(self, letter: Literal["A", "B"], view: SideView, digests: Sequence[SpaceDigest]) -> Iterator[WrongRow]:
        """Yield the first inconsistent rows of a side."""
        from pyspark.sql import functions as f

        spaces = [each.space_id for each in digests if (each.wrong_a if letter == "A" else each.wrong_b)]
        if not spaces or not self._options.limit:
            return
        rows = self._frame(view, spaces).where(f.col("wrong").isNotNull())
        for row in rows_of(rows.orderBy("space_id", "sort_key").limit(self._options.limit)):
            space_id = row["space_id"]
            key = self._key(space_id, row["tuple"]) or row["sort_key"].hex()
            yield WrongRow(letter, space_id, self._name(space_id), key, row["wrong"])

    # --- frames ---

    def _frame(self, view: SideView, spaces: Collection[int]) -> DataFrame:
        """Return the rows of the compared spaces, masked like the rows of the other side."""
        mine = [space_id for space_id in spaces if space_id in view.spaces or space_id in view.definitions]
        frame = view.frame(mine) if mine else self._spark.createDataFrame([], SIDE_COLUMNS)
        condition = self._of_users()
        if condition is not None:
            frame = frame.where(condition)
        masks = {**(self._b.masks if view is self._a else self._a.masks)}
        masks = {space_id: mask for space_id, mask in masks.items() if space_id not in view.masks}
        masks |= {space_id: _nothing_of(fields) for space_id, fields in self._hidden.items()}
        masks = {space_id: mask for space_id, mask in masks.items() if space_id in mine}
        return frame.mapInArrow(partial(_masked, masks), SIDE_COLUMNS) if masks else frame

    def _of_users(self) -> Column | None:
        """Return the condition that limits system spaces to rows about user spaces, or about the chosen ones."""
        from pyspark.sql import functions as f

        condition: Column | None = None
        for space_id in sorted(self._definitions & _FIRST_OF_USERS.keys()):
            key = f.col("sort_key")
            if space_id in self._chosen:
                continue
            if self._chosen:
                wanted: Column = f.lit(False)
                for chosen in sorted(self._chosen):
                    wanted = wanted | key.startswith(f.lit(bytearray(_key_bytes(SPACE_ID, (chosen,)))))
            else:
                wanted = key >= f.lit(bytearray(_key_bytes(space_id, _FIRST_OF_USERS[space_id])))
            here = (f.col("space_id") != space_id) | wanted
            condition = here if condition is None else condition & here
        return condition


def key_of(schema: Schema, space_id: int, tuple_: bytes | None) -> str | None:
    """Return the primary key of a tuple as JSON, or None if the tuple or the space has none."""
    space = schema.get(space_id)
    if tuple_ is None or space is None or space.primary_key is None:
        return None
    try:
        values = unpack(tuple_)
        key = [
            values[part.field] if part.path is None else find(values[part.field], parse_path(part.path))
            for part in space.primary_key.parts
        ]
        return shown_tuple(pack(key), space_id=0)
    except (FlowstoneError, IndexError, TypeError):
        return None


def _key_bytes(space_id: int, key: tuple[int | str, ...]) -> bytes:
    """Return the sort key of a row of a system space."""
    space = SchemaTracker().schema.space(space_id)
    found: bytes = sort_keys_of_keys(space, pa.array([pack(key)], pa.binary()))[0].as_py()
    return found


def _hidden_fields(a: SideView, b: SideView) -> dict[int, tuple[int, ...]]:
    """Return the fields, by space, that cannot be compared.

    They are masked differently on both sides, have a mask that cannot be repeated, or are not part of the state.
    """
    found = {space_id: set(fields) for view in (a, b) for space_id, fields in view.hidden_fields.items()}
    for space_id in {*a.uncompared, *b.uncompared}:
        found.setdefault(space_id, set()).update(_uncompared(a, b, space_id))
    for space_id in a.masks.keys() & b.masks.keys():
        if a.masks[space_id] != b.masks[space_id]:
            both = (*a.masks[space_id].fields, *b.masks[space_id].fields)
            found.setdefault(space_id, set()).update(number for number, _ in both)
    for space_id, fields in found.items():
        for view in (a, b):
            if space_id in view.masks:
                fields.update(number for number, _ in view.masks[space_id].fields)
            fields.update(view.hidden_fields.get(space_id, ()))
    return {space_id: tuple(sorted(fields)) for space_id, fields in found.items()}


def _uncompared(a: SideView, b: SideView, space_id: int) -> tuple[int, ...]:
    return (*a.uncompared.get(space_id, ()), *b.uncompared.get(space_id, ()))


def _nothing_of(fields: Sequence[int]) -> SpaceMask:
    return SpaceMask(tuple((number, "null") for number in fields))


def _masked(masks: dict[int, SpaceMask], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Apply the masks of the other side to tuples. Runs in executors."""
    import pyarrow.compute as pc

    for batch in batches:
        tuples = batch.column("tuple")
        for space_id, mask in masks.items():
            chosen = pc.and_(pc.equal(batch.column("space_id"), space_id), tuples.is_valid())
            if pc.any(chosen).as_py():
                tuples = pc.replace_with_mask(tuples, chosen, mask.tuples(tuples.filter(chosen)))
        yield batch.set_column(batch.schema.get_field_index("tuple"), "tuple", tuples)
