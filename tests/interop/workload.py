"""Random changes of every kind from a seed, for real servers and Flowstone nodes alike.

Later workloads must have greater seeds: a sequence that is set back has another value after a join, even in real
servers. A workload is a stream of steps, plain lists that are sent as MessagePack: statements `[kind, space, …]`,
`["call", name, arguments]` for definitions, `["transaction", [statements]]`. Fields are counted from one, as in Lua.
Some steps are meant to be rejected (a duplicate key, a missing space): the rejections are returned with their reasons,
and any other error fails. Writers with different numbers use different keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from random import Random
from typing import Any, Final
from uuid import UUID

from flowstone.iproto.constants import Key, RequestType
from tests.interop.client import Client, Request
from tests.interop.member import Member, RealMember

PLAIN, PAIRS, HASH, NUMBERED, LOCAL, TEMPORARY, SURE, MADE = range(600, 608)
"""The spaces; those from MADE on are created and dropped."""

MADE_COUNT: Final = 4
KEYS: Final = 1000
"""Per writer: few, so that keys are duplicated, changed and missing."""

WRITER_KEYS: Final = 10_000
BATCH: Final = 250

EXPECTED_REFUSALS: Final = {
    3: "a key is taken",
    10: "the space is there already",
    14: "a first index that cannot be one",
    29: "an operation that does not fit the field",
    33: "a method of what is not there",
    35: "no such index",
    36: "no such space",
    37: "no such field",
    45: "no such user",
    46: "the user is there already",
    82: "no such role",
    83: "the role is there already",
    85: "the index is there already",
    89: "the grant is there already",
    90: "the role is granted already",
    91: "no such grant",
    145: "no such sequence",
    146: "the sequence is there already",
}
"""Allowed rejections by code: steps do not know the effects of earlier ones."""

TEXTS: Final = ("", "a", "Zürich", "snow ☃", "x" * 40, "long " * 300)
STRANGE: Final = (None, True, -1, 2**64 - 1, -(2**63), 1.5, 3.25e100, Decimal("12.340"), UUID(int=2**120 + 5))


def definitions(*, is_synchronous: bool) -> list[list[Any]]:
    """Return the spaces that all other steps use."""
    format = [
        {"name": "id", "type": "unsigned"},
        {"name": "text", "type": "string"},
        {"name": "number", "type": "integer"},
        {"name": "bits", "type": "unsigned"},
        {"name": "doc", "type": "any", "is_nullable": True},
    ]
    made = [
        _space("plain", PLAIN, format=format),
        _index("plain", "pk", parts=[1, "unsigned"]),
        _index("plain", "text", unique=False, parts=[2, "string", 3, "integer"]),
        _space("pairs", PAIRS),
        _index("pairs", "pk", parts=[1, "unsigned", 2, "string"]),
        _index("pairs", "once", parts=[3, "string"]),
        _space("hash", HASH),
        _index("hash", "pk", type="hash", parts=[1, "unsigned"]),
        ["call", "box.schema.sequence.create", ["ids", {"start": 100, "step": 3}]],
        _space("numbered", NUMBERED),
        _index("numbered", "pk", sequence="ids", parts=[1, "unsigned"]),
        _space("mine", LOCAL, is_local=True),
        _index("mine", "pk", parts=[1, "unsigned"]),
        _space("scratch", TEMPORARY, temporary=True),
        _index("scratch", "pk", parts=[1, "unsigned"]),
    ]
    if is_synchronous:
        made += [_space("sure", SURE, is_sync=True), _index("sure", "pk", parts=[1, "unsigned"])]
    return made


def _space(name: str, id: int, **options: Any) -> list[Any]:
    return ["call", "box.schema.space.create", [name, {"id": id} | options]]


def _index(space: str, name: str, **options: Any) -> list[Any]:
    return ["call", f"box.space.{space}:create_index", [name, options]]


@dataclass
class Workload:
    """Endless steps from a seed. `has_definitions`: includes schema changes, which only one writer may make."""

    seed: int
    writer: int = 0
    has_definitions: bool = True
    is_synchronous: bool = False

    def __post_init__(self) -> None:
        self._random = Random(f"{self.seed}/{self.writer}")
        self._number = 0

    def steps(self, count: int) -> Iterator[list[Any]]:
        """Return the next `count` steps."""
        for _ in range(count):
            self._number += 1
            yield self._step()

    def _step(self) -> list[Any]:
        chance = self._random.random()
        if self.has_definitions and chance < 0.04:
            return self._definition()
        if self.is_synchronous and chance < 0.06:
            return self._synchronous()
        if chance < 0.25:
            return ["transaction", [self._statement() for _ in range(self._random.randint(1, 6))]]
        return self._statement()

    # --- statements ---

    def _statement(self) -> list[Any]:
        pick = self._random.random()
        if pick < 0.6:
            return self._plain()
        if pick < 0.75:
            return self._pairs()
        if pick < 0.85:
            return self._random.choice((self._replace, self._delete))(HASH)
        if pick < 0.88 and self.has_definitions:
            return ["insert", NUMBERED, [None, self._text()]]
        if pick < 0.94:
            return self._replace(LOCAL)
        return self._random.choice((self._replace, self._delete))(TEMPORARY)

    def _plain(self) -> list[Any]:
        pick = self._random.randrange(10)
        if pick < 2:
            return ["insert", PLAIN, self._tuple()]
        if pick < 4:
            return ["replace", PLAIN, self._tuple()]
        if pick < 7:
            return ["update", PLAIN, [self._key()], self._operations()]
        if pick < 9:
            return ["upsert", PLAIN, self._tuple(), self._operations()]
        return ["delete", PLAIN, [self._key()]]

    def _pairs(self) -> list[Any]:
        first, second = self._key(), self._random.choice("abc")
        once = f"{self.writer}-{self._random.randrange(KEYS * 4)}"
        pick = self._random.randrange(4)
        if pick == 0:
            return ["insert", PAIRS, [first, second, once, self._strange()]]
        if pick == 1:
            return ["replace", PAIRS, [first, second, once, self._strange()]]
        if pick == 2:
            return ["update", PAIRS, [first, second], [["=", 3, once], ["!", 4, self._number]]]
        return ["delete", PAIRS, [first, second]]

    def _replace(self, space: int) -> list[Any]:
        return ["replace", space, [self._key(), self._text(), self._strange()]]

    def _delete(self, space: int) -> list[Any]:
        return ["delete", space, [self._key()]]

    def _synchronous(self) -> list[Any]:
        statement = self._random.choice((self._replace, self._delete))(SURE)
        if self._random.random() < 0.5:
            return statement
        return ["transaction", [self._plain(), statement, self._replace(SURE)]]

    def _tuple(self) -> list[Any]:
        doc = self._random.choice((None, {"a": self._number, "b": [1, self._text()]}, [self._strange()], self._text()))
        extra = [self._strange() for _ in range(self._random.randrange(3))]
        number = self._random.randint(-(10**6), 10**6)
        return [self._key(), self._text(), number, self._random.getrandbits(20), doc, *extra]

    def _operations(self) -> list[list[Any]]:
        """Return at most one operation per field: the effect of several depends on the version."""
        random = self._random
        chance = random.random()
        if chance < 0.1:
            return [["=", "doc.a", self._number]]  # alone: 2.6 crashes if another operation has the same field
        if chance < 0.2:
            return [["=", -1, self._strange()]]
        bits = random.getrandbits(20)
        of_fields = [
            [["=", 2, self._text()], [":", 2, random.randint(1, 3), random.randint(0, 2), random.choice(TEXTS)]],
            [["=", "number", random.randint(-9, 9)], ["+", 3, random.randint(-100, 100)], ["-", 3, bits]],
            [["&", 4, bits], ["|", 4, bits], ["^", 4, bits]],
            [["!", 6, self._strange()], ["#", 6, 1]],
        ]
        return [random.choice(operations) for operations in random.sample(of_fields, random.choice((1, 1, 2, 3)))]

    def _key(self) -> int:
        return self.writer * WRITER_KEYS + self._random.randrange(KEYS)

    def _text(self) -> str:
        return self._random.choice(TEXTS) + str(self._random.randrange(50))

    def _strange(self) -> Any:
        return self._random.choice(STRANGE)

    # --- definitions ---

    def _definition(self) -> list[Any]:
        random = self._random
        name = f"made{random.randrange(MADE_COUNT)}"
        space = f"box.space.{name}"
        user = f"user{random.randrange(3)}"
        role = f"role{random.randrange(2)}"
        number = MADE + int(name[4:])
        kinds: list[Any] = [
            lambda: _space(name, number, format=[["a", "unsigned"], ["b", "string"], ["c", "any"]]),
            lambda: _index(name, "pk", parts=[1, "unsigned"]),
            lambda: _index(name, "b", unique=False, parts=[{"field": 2, "type": "string", "collation": "unicode_ci"}]),
            lambda: ["call", f"{space}:drop", []],
            lambda: ["call", f"{space}:truncate", []],
            lambda: ["call", f"{space}.index.b:drop", []],
            lambda: ["call", f"{space}:format", [[["a", "unsigned"], ["b", "string"]]]],
            lambda: ["call", f"{space}:format", [[["a", "unsigned"], ["b", "string"], {"name": "c", "type": "any"}]]],
            lambda: ["transaction", [["replace", number, [self._key(), self._text(), 1]] for _ in range(3)]],
            lambda: ["replace", number, [self._key(), self._text(), self._strange()]],
            lambda: ["replace", number, [self._key(), self._text(), self._strange()]],
            lambda: ["call", "box.schema.user.create", [user, {"password": self._text()}]],
            lambda: ["call", "box.schema.user.drop", [user]],
            lambda: ["call", "box.schema.user.passwd", [user, self._text()]],
            lambda: ["call", "box.schema.user.grant", [user, "read,write", "space", "plain"]],
            lambda: ["call", "box.schema.user.grant", [user, "execute", "role", role]],
            lambda: ["call", "box.schema.user.revoke", [user, "write", "space", "plain"]],
            lambda: ["call", "box.schema.role.create", [role]],
            lambda: ["call", "box.schema.role.drop", [role]],
            lambda: ["call", "box.schema.role.grant", [role, "read", "space", "plain"]],
            lambda: ["call", "box.sequence.ids:next", []],
            lambda: ["call", "box.sequence.ids:set", [self.seed * 10**10 + self._number * 1000]],
            lambda: [
                "call",
                "box.schema.sequence.create",
                [f"seq{random.randrange(2)}", {"min": 1, "max": 9, "cycle": True}],
            ],
            lambda: ["call", "box.schema.sequence.drop", [f"seq{random.randrange(2)}"]],
            lambda: ["call", "box.space.hash:truncate", []],
            lambda: ["call", "box.space.scratch:truncate", []],
        ]
        return random.choice(kinds)()


class Refusals(dict[int, int]):
    """Number of rejected steps, by code."""

    def add(self, step: list[Any], code: int, message: str) -> None:
        is_missing = step[0] == "call" and code == 0  # a method of nil, in Lua an error of its own
        assert code in EXPECTED_REFUSALS or is_missing, f"{step} was rejected with {code}: {message}"
        self[code] = self.get(code, 0) + 1


def run(member: Member, steps: Iterator[list[Any]] | list[list[Any]], refusals: Refusals | None = None) -> Refusals:
    """Run the steps on `member`, one after another."""
    refusals = Refusals() if refusals is None else refusals
    steps = iter(steps)
    with member.connect() as client:
        while batch := list(islice(steps, BATCH)):
            if isinstance(member, RealMember):
                _run_real(client, batch, refusals)
            else:
                _run_node(client, batch, refusals)
    return refusals


def define(member: Member, dialect: str) -> bool:
    """Create the spaces, including synchronous ones if possible: in newer replica sets they need an elected leader."""
    is_synchronous = dialect == "2.6"
    run(member, definitions(is_synchronous=is_synchronous))
    if isinstance(member, RealMember):
        member.call("interop.veto", "plain", 7)
    return is_synchronous


def change(member: Member, count: int, *, seed: int = 1, is_synchronous: bool = False) -> None:
    """Make this number of changes of all kinds."""
    run(member, Workload(seed, is_synchronous=is_synchronous).steps(count))


def _run_real(client: Client, batch: list[list[Any]], refusals: Refusals) -> None:
    for number, (code, message) in client.call("interop.run", batch).items():
        refusals.add(batch[number - 1], code, message)


def _run_node(client: Client, batch: list[list[Any]], refusals: Refusals) -> None:
    """Statements between calls are in flight together; a call waits for those before it, and later ones wait for it."""
    together: list[list[Any]] = []
    for step in batch:
        if step[0] != "call":
            together.append(step)
            continue
        _ask(client, together, refusals)
        _ask(client, [step], refusals)
        together = []
    _ask(client, together, refusals)


def _ask(client: Client, steps: list[list[Any]], refusals: Refusals) -> None:
    for step, answer in zip(steps, client.pipeline(map(_request, steps)), strict=True):
        if answer.is_error:
            error = answer.error()
            refusals.add(step, error.code, error.message)


def _request(step: list[Any]) -> Request:
    kind, *rest = step
    if kind == "call":
        return Request(RequestType.CALL, {Key.FUNCTION_NAME: rest[0], Key.TUPLE: rest[1]})
    if kind == "transaction":
        return Request(RequestType.CALL, {Key.FUNCTION_NAME: "interop.transaction", Key.TUPLE: rest})
    space = {Key.SPACE_ID: rest[0]}
    if kind in ("insert", "replace"):
        return Request(RequestType[kind.upper()], space | {Key.TUPLE: rest[1]})
    if kind == "delete":
        return Request(RequestType.DELETE, space | {Key.KEY: rest[1]})
    if kind == "update":
        return Request(RequestType.UPDATE, space | {Key.INDEX_BASE: 1, Key.KEY: rest[1], Key.TUPLE: rest[2]})
    return Request(RequestType.UPSERT, space | {Key.INDEX_BASE: 1, Key.TUPLE: rest[1], Key.OPS: rest[2]})
