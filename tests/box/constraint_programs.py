"""Statements on spaces with foreign keys, as protocol requests: the same for real servers and nodes.

`STORIES` are the named cases of the reference; `random_program` generates many statements from a seed. Each program has
its own spaces, so all programs run on one server. The answers of real servers are in `tests/vectors/constraints`;
`python -m tests.box.constraint_programs BINARY...` rewrites them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.packet import decode_response
from tests.places import VECTORS

RECORDED = VECTORS / "constraints"
SEEDS = range(4)

Step = tuple[int, dict[int, Any]]
"""The type and body of a request."""

SPACE, INDEX, TRUNCATE, FUNCTION = 280, 288, 330, 296
TEXTS_SHOWN = (1, 12, 71, 111, 141, 234, 237, 238, 239, 240)
"""Codes of errors whose texts are compared; the dialects of Flowstone have their own texts for others."""


def field(name: str, type: str = "unsigned", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type, **more}


def refers(name: str, space: int | None, to: int | str) -> dict[str, Any]:
    return {"foreign_key": {name: {"field": to} | ({"space": space} if space is not None else {})}}


def space(number: int, *format: dict[str, Any], **flags: Any) -> Step:
    name = f"s{number}"
    return RequestType.INSERT, {0x10: SPACE, 0x21: [number, 1, name, "memtx", 0, flags, list(format)]}


def alter(number: int, *format: dict[str, Any], **flags: Any) -> Step:
    return RequestType.UPDATE, {
        0x10: SPACE,
        0x15: 1,
        0x20: [number],
        0x21: [["=", 6, flags], ["=", 7, list(format)]],
    }


def rename(number: int, name: str) -> Step:
    return RequestType.UPDATE, {0x10: SPACE, 0x15: 1, 0x20: [number], 0x21: [["=", 3, name]]}


def index(number: int, id: int, *parts: int, unique: bool = True, type: str = "unsigned", kind: str = "tree") -> Step:
    row = [number, id, f"i{id}", kind, {"unique": unique}, [[part, type] for part in parts]]
    return RequestType.INSERT, {0x10: INDEX, 0x21: row}


def nullable_index(number: int, id: int, *parts: int) -> Step:
    made = [{"field": part, "type": "unsigned", "is_nullable": True} for part in parts]
    return RequestType.INSERT, {0x10: INDEX, 0x21: [number, id, f"i{id}", "tree", {"unique": False}, made]}


def drop_index(number: int, id: int) -> Step:
    return RequestType.DELETE, {0x10: INDEX, 0x20: [number, id]}


def drop_space(number: int) -> Step:
    return RequestType.DELETE, {0x10: SPACE, 0x20: [number]}


def truncate(number: int) -> Step:
    return RequestType.UPSERT, {0x10: TRUNCATE, 0x15: 1, 0x21: [number, 1], 0x28: [["+", 2, 1]]}


def insert(number: int, *values: Any) -> Step:
    return RequestType.INSERT, {0x10: number, 0x21: list(values)}


def replace(number: int, *values: Any) -> Step:
    return RequestType.REPLACE, {0x10: number, 0x21: list(values)}


def delete(number: int, *key: Any) -> Step:
    return RequestType.DELETE, {0x10: number, 0x20: list(key)}


def update(number: int, key: Any, *operations: list[Any]) -> Step:
    return RequestType.UPDATE, {0x10: number, 0x15: 1, 0x20: [key], 0x21: list(operations)}


def upsert(number: int, values: list[Any], *operations: list[Any]) -> Step:
    return RequestType.UPSERT, {0x10: number, 0x15: 1, 0x21: values, 0x28: list(operations)}


def family(p: int, c: int) -> list[Step]:
    """Return the steps that create a parent with a unique `code`, and a child with an indexed foreign key to it."""
    return [
        space(p, field("id"), field("code"), field("u", is_nullable=True)),
        index(p, 0, 0),
        index(p, 1, 1),
        space(c, field("id"), field("cid", is_nullable=True, **refers("f1", p, "code"))),
        index(c, 0, 0),
        nullable_index(c, 1, 1),
    ]


def stories() -> Iterator[tuple[str, list[Step]]]:
    p, c = 600, 601
    yield (
        "child side",
        [
            *family(p, c),
            insert(p, 1, 10),
            insert(c, 1, 10),
            insert(c, 2, 11),
            insert(c, 2, None),
            insert(c, 3),
            insert(c, 4, "x"),
            replace(c, 2, 11),
            replace(c, 2, 10),
            update(c, 1, ["=", 2, 11]),
            update(c, 1, ["=", 2, None]),
            upsert(c, [1, 11], ["=", 2, 10]),
            upsert(c, [1, 10], ["=", 2, 12]),
            upsert(c, [9, 12], ["=", 2, 10]),
            upsert(c, [9, 10], ["=", 2, 12]),
            delete(c, 9),
        ],
    )
    p, c = 610, 611
    yield (
        "parent side",
        [
            *family(p, c),
            insert(p, 1, 10),
            insert(p, 2, 20),
            insert(c, 1, 10),
            delete(p, 1),
            delete(p, 2),
            update(p, 1, ["=", 2, 11]),
            update(p, 1, ["=", 3, 7]),
            replace(p, 1, 12),
            replace(p, 1, 10, 5),
            upsert(p, [1, 10], ["=", 2, 13]),
            insert(p, 1, 14),
            insert(p, 1, 10),
            truncate(p),
            drop_index(p, 1),
            delete(p, 1),
            insert(c, 5, 10),
            index(p, 1, 1),
            drop_index(c, 1),
            delete(p, 1),
            update(p, 1, ["=", 3, 8]),
            update(p, 1, ["=", 2, 15]),
            nullable_index(c, 1, 1),
            delete(p, 1),
            delete(c, 1),
            truncate(p),
            drop_space(p),
            drop_index(p, 1),
            drop_index(p, 0),
            drop_space(p),
            rename(p, "other"),
        ],
    )
    p, c = 620, 621
    both = {"k": {"space": p, "field": {"a": "x", "b": "y"}}}
    yield (
        "complex keys",
        [
            space(p, field("id"), field("x"), field("y")),
            index(p, 0, 0),
            index(p, 1, 2, 1),
            space(c, field("id"), field("a", is_nullable=True), field("b", is_nullable=True), foreign_key=both),
            index(c, 0, 0),
            nullable_index(c, 1, 1, 2),
            insert(p, 1, 5, 6),
            insert(c, 1, 5, 6),
            insert(c, 2, 6, 5),
            insert(c, 3),
            insert(c, 4, None, None),
            insert(c, 5, 5),
            insert(c, 6, None),
            insert(c, 7, 5, None),
            insert(c, 8, None, 6),
            insert(c, 9, "x", 6),
            update(c, 1, ["=", 2, 7]),
            delete(p, 1),
            update(p, 1, ["=", 2, 9]),
            replace(p, 1, 5, 6),
            delete(c, 1),
            delete(p, 1),
        ],
    )
    p = 630
    yield (
        "own space",
        [
            space(p, field("id"), field("up", is_nullable=True, **refers("self", None, "id"))),
            index(p, 0, 0),
            nullable_index(p, 1, 1),
            insert(p, 1, 1),
            insert(p, 1, None),
            insert(p, 2, 1),
            update(p, 1, ["=", 2, 1]),
            delete(p, 1),
            delete(p, 2),
            update(p, 1, ["=", 2, None]),
            insert(p, 3, 1),
            replace(p, 3, 3),
            delete(p, 3),
            truncate(p),
            insert(p, 1, None),
            drop_index(p, 1),
            drop_index(p, 0),
            drop_space(p),
        ],
    )
    p, c = 640, 641
    yield (
        "added over rows",
        [
            space(p, field("id")),
            index(p, 0, 0),
            space(c, field("id"), field("cid")),
            index(c, 0, 0),
            insert(p, 1),
            insert(c, 1, 1),
            insert(c, 2, 2),
            alter(c, field("id"), field("cid", **refers("f", p, "id"))),
            alter(c, field("id"), field("cid"), foreign_key={"k": {"space": p, "field": {1: 0}}}),
            delete(c, 2),
            alter(c, field("id"), field("cid", **refers("f", p, 0))),
            insert(c, 3, 3),
            delete(p, 1),
            alter(c, field("id"), field("cid")),
            delete(p, 1),
        ],
    )
    p, c = 650, 651
    yield (
        "indexes and names that do not fit",
        [
            space(p, field("id"), field("code"), field("text", "string")),
            index(p, 0, 0),
            index(p, 1, 1, unique=False),
            index(p, 2, 2, type="string"),
            space(
                c,
                field("id"),
                field("a", "any", is_nullable=True, **refers("none", p, "code")),
                field("b", "any", is_nullable=True, **refers("unknown", p, "nosuch")),
                field("c", "any", is_nullable=True, **refers("text", p, "text")),
            ),
            index(c, 0, 0),
            insert(p, 1, 5, "x"),
            insert(c, 1, 5),
            insert(c, 1, None, 1),
            insert(c, 1, None, None, 1),
            insert(c, 1, None, None, "x"),
            delete(p, 1),
            alter(c, field("id"), field("a", "any"), foreign_key={"k": {"space": p, "field": {"zz": "id"}}}),
            insert(c, 2, 1),
            delete(p, 1),
            alter(p, field("id"), field("kode"), field("text", "string")),
            delete(p, 1),
        ],
    )
    p, c, d = 660, 661, 662
    yield (
        "definitions",
        [
            space(p, field("id"), group_id=1),
            index(p, 0, 0),
            space(c, field("id"), field("x", **refers("lp", p, "id"))),
            space(c, field("id"), field("x", **refers("gone", 9999, "id"))),
            space(d, field("id"), temporary=True),
            space(c, field("id"), field("x", **refers("t", d, "id"))),
            space(c, field("id"), field("x", **refers("l", p, "id")), group_id=1),
            index(c, 0, 0),
            insert(c, 1, 1),
            space(d + 1, field("id", constraint={"nofun": 77})),
            space(d + 1, field("id", constraint=1)),
            space(d + 1, field("id", constraint={"c": "x"})),
            space(d + 1, field("id", constraint={1: 1})),
            space(d + 1, field("id", foreign_key=1)),
            space(d + 1, field("id", foreign_key={"f": 1})),
            space(d + 1, field("id", foreign_key={"f": {}})),
            space(d + 1, field("id", foreign_key={"f": {"field": 1.5}})),
            space(d + 1, field("id", foreign_key={"f": {"space": "x", "field": 0}})),
            space(d + 1, field("id", foreign_key={"f": {"other": 1}})),
            space(d + 1, field("id"), foreign_key={"f": {"field": "id"}}),
            space(d + 1, field("id"), foreign_key={"f": {"field": {}}}),
            space(d + 1, field("id"), constraint={"c": 78}),
        ],
    )
    p, c = 670, 671
    yield (
        "the order of checks",
        [
            space(p, field("id"), field("code")),
            index(p, 0, 0),
            index(p, 1, 1),
            space(
                c,
                field("id"),
                field("a", **refers("one", p, "id")),
                field("b", **refers("two", p, "code")),
                field("s", "string"),
                foreign_key={"whole": {"space": p, "field": {"a": "id"}}},
            ),
            index(c, 0, 0),
            index(c, 1, 1, unique=False),
            insert(p, 1, 10),
            insert(c, 1, 2, 11, "x"),
            insert(c, 1, 1, 11, 5),
            insert(c, 1, 1, "y", "x"),
            insert(c, 1, 1, 10, 5),
            insert(c, 1, 1, 10, "x"),
            insert(c, 1, 1, 11, "x"),
            update(c, 1, ["=", 1, 9], ["=", 2, 7]),
            update(p, 1, ["=", 1, 9]),
            delete(p, 1),
        ],
    )


STORIES = dict(stories())


def random_program(seed: int, length: int = 220) -> list[Step]:
    """Return statements on a parent, a child with a simple and a complex key, and a space that refers to itself.

    Without zeros: a parent whose field in a complex key is 0 can be deleted on a real server although it is referenced.
    """
    random = Random(seed)
    p, c, t = 700 + 10 * seed, 701 + 10 * seed, 702 + 10 * seed
    whole = {"whole": {"space": p, "field": {"a": "x", "b": "y"}}}
    steps = [
        space(p, field("id"), field("x"), field("y"), field("u", is_nullable=True)),
        index(p, 0, 0),
        index(p, 1, 1, 2),
        space(
            c,
            field("id"),
            field("pid", is_nullable=True, **refers("simple", p, "id")),
            field("a", is_nullable=True),
            field("b", is_nullable=True),
            foreign_key=whole,
        ),
        index(c, 0, 0),
        nullable_index(c, 1, 1),
        nullable_index(c, 2, 3, 2),
        space(t, field("id"), field("up", is_nullable=True, **refers("up", None, "id"))),
        index(t, 0, 0),
        nullable_index(t, 1, 1),
    ]

    def number() -> int:
        return random.randrange(1, 6)

    def some() -> int | None:
        return None if random.random() < 0.25 else number()

    def values(where: int) -> list[Any]:
        if where == p:
            return [number(), number(), random.randrange(1, 3), some()]
        if where == c:
            return [number(), some(), some(), None if random.random() < 0.3 else random.randrange(1, 3)]
        return [number(), some()][: random.choice((1, 2, 2, 2))]

    def operation(where: int) -> list[Any]:
        place = random.randrange(2, {p: 5, c: 5, t: 3}[where])
        return ["=", place, number() if where == p and place < 4 else some()]

    for _ in range(length):
        where = random.choice((p, p, c, c, c, t, t))
        kind = random.randrange(7)
        if kind <= 1:
            steps.append(insert(where, *values(where)))
        elif kind == 2:
            steps.append(replace(where, *values(where)))
        elif kind == 3:
            steps.append(delete(where, number()))
        elif kind == 4:
            steps.append(update(where, number(), operation(where)))
        elif kind == 5:
            steps.append(upsert(where, values(where), operation(where)))
        else:
            steps.append(truncate(where) if random.random() < 0.1 else delete(where, number()))
    return steps


def programs() -> dict[str, list[Step]]:
    """Return all programs by name."""
    return STORIES | {f"seed {seed}": random_program(seed) for seed in SEEDS}


def shown(error: TarantoolError) -> str:
    """Return the answer to a failed statement in the form of recordings."""
    return f"{error.code} {error.message}" if error.code in TEXTS_SHOWN else str(error.code)


def recorded(version: str) -> dict[str, list[Any]]:
    """Return the answers of a real server to each program: tuples, or a string for an error."""
    found: dict[str, list[Any]] = json.loads((RECORDED / f"{version}.json").read_text())
    return found


def answers_of(port: int) -> dict[str, list[Any]]:
    """Return the answers of a server to all programs."""
    from tests.conformance.wire import Client

    client = Client(port)
    try:
        return {name: [_answer(client, step) for step in steps] for name, steps in programs().items()}
    finally:
        client.close()


def _answer(client: Any, step: Step) -> Any:
    try:
        rows = decode_response(client.request(*step)).values()[0x30]
    except TarantoolError as error:
        return shown(error)
    return plain(rows) if step[1][0x10] >= 512 else "done"


def plain(rows: Any) -> list[Any]:
    return [list(row) for row in rows]


def main(binaries: list[str]) -> None:
    from tests import real_tarantool
    from tests.interop.versions import _version_of

    RECORDED.mkdir(parents=True, exist_ok=True)
    for binary in binaries:
        version = ".".join(map(str, _version_of(binary)))
        with tempfile.TemporaryDirectory() as directory, real_tarantool.serve(Path(directory), binary=binary) as server:
            found = answers_of(server.port)
        lines = [
            f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, each)) + "\n]" for name, each in found.items()
        ]
        (RECORDED / f"{version}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
