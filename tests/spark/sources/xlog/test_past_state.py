"""Past states: for any plan, the tasks together have each tuple once."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from flowstone.box.schema import UnknownSpace
from flowstone.iproto.msgpack import pack
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import NotSettled
from flowstone.spark.sources.options import xlog_options
from flowstone.spark.sources.xlog import past_state
from flowstone.spark.sources.xlog.log_directories import LogDirectories
from flowstone.spark.sources.xlog.past_state import StatePart, plan_state, read_state, state_contracts
from tests.node.archived_rows import SYNC, confirm, rollback
from tests.spark.archives import DIRECTORY, WrittenArchive
from tests.spark.change_rows import (
    INSERT,
    REPLACE,
    UPDATE,
    define,
    define_key,
    delete,
    insert,
    statement,
    truncate,
    update,
    upsert,
    whole,
)

State = dict[int, tuple[Any, ...]]
DEFINITIONS = [
    (280, (512, 1, "orders", "memtx", 0, {}, [{"name": "id", "type": "unsigned"}, {"name": "name", "type": "string"}])),
    (288, (512, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])),
]


def parts(archive: WrittenArchive, **options: str) -> list[StatePart]:
    given = {"path": DIRECTORY, "mode": "state", "space": "orders", **options}
    return plan_state(LogDirectories.open(archive.disk, [DIRECTORY]), xlog_options(given))


def rows(archive: WrittenArchive, **options: str) -> list[dict[str, Any]]:
    batches = [batch for part in parts(archive, **options) for batch in read_state(archive.disk, part)]
    return [row for batch in batches for row in batch.to_pylist()]


def state(archive: WrittenArchive, **options: str) -> list[tuple[int, str]]:
    return sorted((row["id"], row["name"]) for row in rows(archive, **options))


class Model:
    """Writes an archive, and records the state after each transaction."""

    def __init__(self, archive: WrittenArchive, seed: int) -> None:
        self.archive = archive
        self.random = Random(seed)
        self.lsn = 2
        self.state: State = {}
        self.states: dict[int, State] = {2: {}}

    def step(self) -> None:
        random = self.random
        tentative = dict(self.state)
        changes = [self._change(tentative) for _ in range(random.randint(1, 4))]
        if random.random() < 0.2:
            verdict = random.choice((confirm, rollback))
            first = self.lsn - len(changes) + 1
            self.lsn += 1
            named = self.lsn - 1 if verdict is confirm else first
            self.archive.write(whole(*changes, flags=SYNC), verdict(self.lsn, named))
            if verdict is rollback:
                tentative = self.state
        else:
            self.archive.write(whole(*changes))
        self.state = tentative
        self.states[self.lsn] = dict(self.state)

    def _change(self, state: State) -> Any:
        random = self.random
        self.lsn += 1
        key, name = random.randrange(60), f"n{self.lsn}"
        kind = random.randrange(14)
        if kind < 4:
            state[key] = (key, name)
            return statement(REPLACE, self.lsn, {0x10: 512, 0x21: (key, name)})
        if kind < 7:
            state.pop(key, None)
            return delete(self.lsn, key)
        if kind < 10:
            if key in state:
                state[key] = (key, name)
            return update(self.lsn, key, ("=", 2, name))
        if kind < 13:
            state[key] = (key, f"u{name}") if key in state else (key, name)
            return upsert(self.lsn, (key, name), ("=", 1, f"u{name}"))
        if random.random() < 0.2:
            state.clear()
            return truncate(self.lsn)
        return insert(self.lsn, self.lsn, space=513)

    def snapshot(self) -> None:
        self.archive.log.cut(VClock({1: self.lsn}))
        tuples = [(512, self.state[key]) for key in sorted(self.state)]
        self.archive.snapshot(VClock({1: self.lsn}), [*DEFINITIONS, (511, ("x",)), *tuples, (513, (1,))])


@pytest.mark.parametrize("seed", range(4))
def test_state_at_every_position_equals_the_model(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(past_state, "SLICE_SIZE", 1)
    if seed > 1:
        monkeypatch.setattr(past_state, "SHARE_SIZE", 200)
    archive = WrittenArchive()
    archive.define_orders()
    model = Model(archive, seed)
    for number in range(120):
        model.step()
        if number in (40, 80):
            model.snapshot()
    archive.save()
    for lsn in [*model.random.sample(sorted(model.states), 12), model.lsn]:
        assert state(archive, asOf=str(lsn)) == sorted(model.states[lsn].values())
    assert state(archive) == sorted(model.state.values())


def test_large_snapshot_is_split_by_key_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_state, "SLICE_SIZE", 1)
    archive = WrittenArchive()
    tuples = [(512, (number, "x" * 300)) for number in range(2000)]
    archive.define_orders()
    archive.log.cut(VClock({1: 2}))
    archive.snapshot(VClock({1: 2}), [*DEFINITIONS, *((511, ("y" * 300,)) for _ in range(600)), *tuples])
    archive.write(whole(delete(3, 0), delete(4, 999), insert(5, 5000, "new"), update(6, 1998, ("=", 2, "changed"))))
    archive.save()
    planned = parts(archive)
    assert len(planned) > 2
    assert all(len(part.snapshot) == 1 for part in planned)
    assert planned[0].low is None
    assert planned[-1].high is None
    assert [part.high for part in planned[:-1]] == [part.low for part in planned[1:]]
    found = dict(state(archive))
    assert len(found) == 1999
    assert found[1998] == "changed"
    assert found[5000] == "new"
    assert state(archive, asOf="2") == [values for _, values in tuples]
    # Whatever key a slice begins with, the changes of that key are folded once.
    archive.write(whole(*(statement(REPLACE, 7 + number, {0x10: 512, 0x21: (number, "r")}) for number in range(2000))))
    archive.save()
    assert state(archive) == [*((number, "r") for number in range(2000)), (5000, "new")]


def test_space_with_a_hash_index_is_split_by_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_state, "SHARE_SIZE", 100)
    archive = WrittenArchive()
    key = (288, (512, 0, "pk", "hash", {"unique": True}, [[0, "unsigned"]]))
    space = define(1, 512, "orders", ("id", "unsigned"), ("name", "string"))
    archive.write(whole(space, statement(INSERT, 2, {0x10: key[0], 0x21: key[1]})))
    archive.log.cut(VClock({1: 2}))
    tuples = [(512, (number * 7919 % 1000, "x" * 100)) for number in range(1000)]
    archive.snapshot(VClock({1: 2}), [DEFINITIONS[0], key, *tuples])
    archive.write(whole(delete(3, 5)))
    archive.save()
    planned = parts(archive)
    assert [part.share for part in planned] == [(number, 8) for number in range(8)]
    assert state(archive) == sorted((number, "x" * 100) for number in range(1000) if number != 5)


def test_primary_key_altered_before_the_moment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = WrittenArchive()
    archive.define_orders()
    archive.write(whole(insert(3, 1, "b"), insert(4, 2, "a")), whole(insert(5, 3, "c"), delete(6, 3)))
    by_name = {0x10: 288, 0x21: (512, 0, "pk", "tree", {"unique": True}, [[1, "string"]])}
    archive.write(whole(statement(REPLACE, 7, by_name)))
    archive.write(
        whole(delete(8, "a"), insert(9, 1, "d")),
        whole(statement(UPDATE, 10, {0x10: 512, 0x20: ("b",), 0x21: (("=", 0, 7),)})),
    )
    archive.save()
    assert state(archive) == [(1, "d"), (7, "b")]
    assert state(archive, asOf="6") == [(1, "b"), (2, "a")]


def test_recreated_space_has_no_rows_of_the_old_one() -> None:
    archive = WrittenArchive()
    archive.define_orders()
    archive.write(whole(insert(3, 1, "old")))
    archive.write(whole(delete(4, 512, 0, space=288)), whole(delete(5, 512, space=280)))
    archive.write(whole(define(6, 512, "orders", ("id", "unsigned"), ("name", "string")), define_key(7, 512)))
    archive.write(whole(insert(8, 2, "new")))
    archive.save()
    assert state(archive) == [(2, "new")]
    assert state(archive, asOf="3") == [(1, "old")]
    with pytest.raises(UnknownSpace, match=r"no space 'orders' in archive at \{1: 5\}; the log has no user space"):
        state(archive, asOf="5")


def test_unsettled_moment_is_refused() -> None:
    archive = WrittenArchive()
    archive.define_orders()
    archive.write(whole(insert(3, 1, "x"), flags=SYNC))
    archive.save()
    with pytest.raises(NotSettled, match=r"the nearest: \{1: 2\}"):
        state(archive, asOf="3")
    assert state(archive) == []


def test_columns_are_those_at_the_moment() -> None:
    archive = WrittenArchive()
    archive.define_orders()
    archive.write(whole(insert(3, 1, "x")))
    archive.write(whole(define(4, 512, "orders", ("id", "unsigned"))))
    archive.save()
    directories = LogDirectories.open(archive.disk, [DIRECTORY])
    options = {"path": DIRECTORY, "mode": "state", "space": "orders"}
    (now,) = state_contracts(directories, xlog_options(options)).values()
    (then,) = state_contracts(directories, xlog_options({**options, "asOf": "3"})).values()
    assert (now.schema.names, then.schema.names) == (["id", "_extra"], ["id", "name", "_extra"])
    assert rows(archive) == [{"id": 1, "_extra": '["x"]'}]
    assert rows(archive, columns="_tuple,_space,id") == [{"_tuple": '[1,"x"]', "_space": "orders", "id": 1}]


def test_password_hashes_are_hidden_by_default() -> None:
    archive = WrittenArchive()
    user = (32, 1, "eve", "user", {"chap-sha1": "secret="})
    archive.write(whole(statement(INSERT, 1, {0x10: 304, 0x21: user})))
    archive.save()
    given = {"space": "_user", "columns": "_tuple"}
    assert rows(archive, **given) == [{"_tuple": '[32,1,"eve","user",{"chap-sha1":"<hidden>"}]'}]
    (part,) = parts(archive, **given)
    shown = pa.Table.from_batches(read_state(archive.disk, part, show_secrets=True))
    assert "secret=" in shown.column(0)[0].as_py()


def test_keys_are_split_evenly_and_deterministically() -> None:
    keys = pa.array([pack(number) for number in range(4000)], pa.binary())
    archive = WrittenArchive()
    archive.define_orders()
    archive.save()
    (part,) = parts(archive)
    counts = []
    for number in range(4):
        own = past_state._own(keys, replace(part, share=(number, 4)))
        sliced = past_state._own(keys.slice(100, 50), replace(part, share=(number, 4)))
        assert own.slice(100, 50) == sliced
        counts.append(own.true_count)
    assert sum(counts) == 4000
    assert min(counts) > 800
