"""A model of an instance's data and the rows that create it: the data of a server after reading our files.

`World` generates random statements from a seed, numbers their rows, applies them to its model and yields transactions.
Uses only features of 2.6.0.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.xlog.transactions import LogTransaction, make_transaction
from tests.places import VECTORS

BOOTSTRAP = VECTORS / "bootstrap-2.6.0.json"
INSTANCE = "11111111-0000-4000-8000-000000000001"
OTHER = "11111111-0000-4000-8000-000000000002"
SPACE, INDEX, SCHEMA, CLUSTER = 280, 288, 272, 320

Tuple = tuple[Any, ...]


@dataclass(frozen=True)
class SpaceDefinition:
    """A space and its primary key; `secondary` are further indexes."""

    id: int
    name: str
    fields: tuple[tuple[str, str], ...]
    key: tuple[int, ...] = (0,)
    secondary: tuple[int, ...] = ()
    is_local: bool = False
    is_nullable: bool = True

    def rows(self) -> Iterator[tuple[int, Tuple]]:
        """Return its rows in `_space` and `_index`."""
        flags = {"group_id": 1} if self.is_local else {}
        layout = [
            {"name": name, "type": type_, "is_nullable": self.is_nullable and number not in self.key}
            for number, (name, type_) in enumerate(self.fields)
        ]
        yield SPACE, (self.id, 1, self.name, "memtx", 0, flags, layout)
        parts = [[number, self.fields[number][1]] for number in self.key]
        yield INDEX, (self.id, 0, "pk", "tree", {"unique": True}, parts)
        for number in self.secondary:
            name, type_ = self.fields[number]
            part = {"field": number, "type": type_, "is_nullable": self.is_nullable}
            yield INDEX, (self.id, number + 1, name, "tree", {"unique": False}, [part])


TYPES = "unsigned integer number double string varbinary boolean scalar decimal uuid array map any".split()
ALL_TYPES = tuple((f"f_{name}", name) for name in TYPES)
INDEXED = tuple(number for number, name in enumerate(TYPES) if number and name not in ("array", "map", "any"))
TYPED = SpaceDefinition(512, "typed", ALL_TYPES, secondary=INDEXED)
STRICT = SpaceDefinition(513, "strict", ALL_TYPES, key=(4, 0), secondary=INDEXED, is_nullable=False)
LOCAL = SpaceDefinition(514, "local", (("id", "unsigned"), ("note", "string")), is_local=True)
LATE = SpaceDefinition(515, "late", (("id", "unsigned"), ("count", "unsigned"), ("note", "string")))


def random_value(rng: random.Random, type_: str) -> Any:
    """Return a value of this field type."""
    makers: dict[str, Callable[[], Any]] = {
        "unsigned": lambda: rng.choice((0, 127, 128, 65536, 2**32, 2**64 - 1, rng.getrandbits(40))),
        "integer": lambda: rng.choice((-1, -33, -(2**63), 2**64 - 1, rng.getrandbits(30) - 2**29)),
        "number": lambda: rng.choice((-5, 1.5, 2**63, Decimal("1.50"), rng.random())),
        "double": lambda: rng.choice((0.0, -1.25, 1e300, rng.random())),
        "string": lambda: rng.choice(("", "snow ☃", "x" * 40, f"s{rng.getrandbits(32)}")),
        "varbinary": lambda: rng.randbytes(rng.choice((0, 1, 31, 300))),
        "boolean": lambda: rng.random() < 0.5,
        "decimal": lambda: rng.choice((Decimal(0), Decimal("-12.345"), Decimal(rng.getrandbits(90)))),
        "uuid": lambda: uuid.UUID(int=rng.getrandbits(128)),
        "array": lambda: [random_value(rng, "any") for _ in range(rng.randrange(4))],
        "map": lambda: {f"k{i}": random_value(rng, "scalar") for i in range(rng.randrange(4))},
    }
    if type_ == "any":
        type_ = rng.choice(("integer", "string", "scalar", "map", "boolean"))
    if type_ == "scalar":  # without uuid, which 2.6.0 rejects in scalar fields
        type_ = rng.choice(("unsigned", "integer", "double", "string", "varbinary", "boolean", "decimal"))
    return makers[type_]()


@dataclass
class World:
    """The model. `data[space id][packed key]` is a tuple; `vclock` is the position of the numbered rows."""

    seed: int
    vclock: dict[int, int] = field(default_factory=dict)
    data: dict[int, dict[bytes, Tuple]] = field(default_factory=dict)
    spaces: dict[int, SpaceDefinition] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._next_id = 0

    def define(self, space: SpaceDefinition) -> None:
        self.spaces[space.id] = space
        self.data[space.id] = {}

    def random_tuple(self, space: SpaceDefinition) -> Tuple:
        """Return a tuple with a fresh first field."""
        self._next_id += 1
        nullable = space.is_nullable
        values: list[Any] = [self._next_id]
        for number, (_, type_) in enumerate(space.fields[1:], 1):
            is_null = nullable and number not in space.key and self.rng.random() < 0.2
            values.append(None if is_null else random_value(self.rng, type_))
        if nullable and self.rng.random() < 0.1:
            values = values[: max(space.key) + 1 + self.rng.randrange(3)]
        if self.rng.random() < 0.1 and len(values) == len(space.fields):
            values.append("beyond the format")
        return tuple(values)

    def put(self, space: SpaceDefinition, value: Tuple) -> None:
        self.data[space.id][self.key(space, value)] = value

    def key(self, space: SpaceDefinition, value: Tuple) -> bytes:
        return pack([value[number] for number in space.key])

    def dump(self) -> dict[int, list[str]]:
        """Return every tuple as hex of its MessagePack, sorted, per space."""
        return {
            space_id: sorted(pack(value).hex() for value in tuples.values()) for space_id, tuples in self.data.items()
        }

    def row(self, space_id: int, type_: RequestType, body: dict[int, bytes], replica_id: int = 1) -> Row:
        """Return a numbered row; values of `body` are MessagePack."""
        is_local = space_id in self.spaces and self.spaces[space_id].is_local
        origin = 0 if is_local else replica_id
        self.vclock[origin] = self.vclock.get(origin, 0) + 1
        pairs = b"".join(pack(key) + value for key, value in body.items())
        return Row(
            type_,
            replica_id=origin,
            group_id=GROUP_LOCAL if is_local else 0,
            lsn=self.vclock[origin],
            timestamp=1.7e9 + self.vclock[origin] / 1000,
            body=bytes((0x81 + len(body),)) + b"\x10" + pack(space_id) + pairs,
        )

    def change(self, space: SpaceDefinition, replica_id: int = 1) -> Row:
        """Apply a random statement on `space` to the model, and return its row."""
        tuples = self.data[space.id]
        kind = self.rng.choice(("insert", "insert", "replace", "update", "upsert", "delete"))
        if not tuples or kind == "insert":
            return self._store(space, RequestType.INSERT, self.random_tuple(space), replica_id)
        old = self.rng.choice(list(tuples.values()))
        key = self.key(space, old)
        if kind == "replace":
            new = [*self.random_tuple(space)]
            for number in space.key:
                new[number] = old[number]
            return self._store(space, RequestType.REPLACE, tuple(new), replica_id)
        if kind == "delete":
            del tuples[key]
            return self.row(space.id, RequestType.DELETE, {0x20: key}, replica_id)
        numbers = [n for n in range(1, min(len(old), len(space.fields))) if n not in space.key]
        if not numbers:
            # A statement without effect is also logged, with its own LSN.
            return self.row(space.id, RequestType.DELETE, {0x20: pack([2**50])}, replica_id)
        return self._modify(space, old, self.rng.choice(numbers), kind, replica_id)

    def _modify(self, space: SpaceDefinition, old: Tuple, number: int, kind: str, replica_id: int) -> Row:
        """Return an UPDATE or UPSERT of one field; in half of the cases its fields count from 1, as in Lua."""
        value = random_value(self.rng, space.fields[number][1])
        self.put(space, (*old[:number], value, *old[number + 1 :]))
        base = self.rng.randrange(2)
        operations = pack([["=", number + base, value]])
        body = {0x15: pack(base)} if base else {}
        if kind == "update":
            body |= {0x20: self.key(space, old), 0x21: operations}
            return self.row(space.id, RequestType.UPDATE, body, replica_id)
        body |= {0x28: operations, 0x21: pack(old)}
        return self.row(space.id, RequestType.UPSERT, body, replica_id)

    def _store(self, space: SpaceDefinition, type_: RequestType, value: Tuple, replica_id: int) -> Row:
        self.put(space, value)
        return self.row(space.id, type_, {0x21: pack(value)}, replica_id)

    def transaction(self) -> LogTransaction:
        """Return one to six random statements, sometimes on local and global spaces together."""
        replica_id = self.rng.choice((1, 1, 1, 2))
        spaces = [space for space in self.spaces.values() if replica_id == 1 or not space.is_local]
        count = self.rng.choice((1, 1, 1, 2, 3, 6))
        rows = [self.change(self.rng.choice(spaces), replica_id) for _ in range(count)]
        if count > 1 and rows[-1].group_id == GROUP_LOCAL and any(row.group_id == 0 for row in rows):
            self.vclock[replica_id] += 1
            # 2.6.0 ends a transaction whose last row is local with a NOP, so that its end is replicated.
            rows.append(Row(RequestType.NOP, replica_id, lsn=self.vclock[replica_id], timestamp=1.7e9))
        return make_transaction(rows)

    def create(self, space: SpaceDefinition) -> LogTransaction:
        """Return the DDL of a new space as one transaction."""
        self.define(space)
        return make_transaction(
            [self.row(system, RequestType.INSERT, {0x21: pack(value)}) for system, value in space.rows()]
        )


def system_tuples(spaces: list[SpaceDefinition]) -> dict[int, list[Tuple]]:
    """Return the system spaces of a new instance plus `spaces`, in the order of a snapshot."""
    found: dict[int, list[Tuple]] = {}
    for space_id, value in json.loads(BOOTSTRAP.read_text()):
        found.setdefault(space_id, []).append(tuple(value))
    found[SCHEMA] = [("max_id", 515) if value[0] == "max_id" else value for value in found[SCHEMA]]
    found[CLUSTER] = [(1, INSTANCE), (2, OTHER)]
    for space in spaces:
        for system, value in space.rows():
            found[system].append(value)
    return dict(sorted(found.items()))
