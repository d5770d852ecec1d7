"""Random programs: the box and a simple model of it agree under any concurrency.

Autocommit statements, immediate transactions, bulk statements, concurrent interactive transactions, long-lived read
views, truncation, and a log that lags and sometimes fails. Interactive transactions must be serializable in commit
order, and only those with stale reads may fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowstone.box.box import Box
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.engine import statements
from flowstone.box.engine.read_view import ReadView
from flowstone.box.engine.transaction import BoxTransaction, InteractiveTransaction, Isolation
from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.table import table_of
from flowstone.box.lane.writes import Writes
from flowstone.box.system import TRUNCATE_ID
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TransactionConflict
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import encode_request
from tests.box import model
from tests.box.model import EQ, Outcome, State, Statement
from tests.box.programs import (
    EMPTY,
    NUMBERS,
    SPACES,
    WORDS,
    agreed,
    expected,
    fields_of,
    perform,
    requests,
    tuples,
)
from tests.box.spaces import box_with
from tests.conftest import FULL
from tests.iproto.scanned_requests import scanned

CONFLICT = 97


class Moment(NamedTuple):
    """The state, and the truncation count per space: a truncation replaces the space for interactive transactions."""

    state: State
    truncated: dict[int, int]


class Step(NamedTuple):
    """An action of an interactive transaction: a statement and its result, or a savepoint set or rolled back to."""

    statement: Statement | None
    result: list[bytes] | int = 0
    savepoint: int = -1
    """-1: set; otherwise the number of the savepoint rolled back to."""


class Interactive:
    """An interactive transaction and its reads."""

    def __init__(self, transaction: InteractiveTransaction) -> None:
        self.transaction = transaction
        self.begin: Moment | None = None
        """Return its snapshot: the time of its first statement, once that has read."""
        self.steps: list[Step] = []
        self.savepoints: list[tuple[int, int]] = []

    def replay(self, state: State) -> tuple[list[list[bytes] | int], State, list[model.Read]]:
        """Execute the statements serially on `state`; return their results, the next state, and their reads."""
        results: list[list[bytes] | int] = []
        reads: list[model.Read] = []
        saved: list[State] = []
        for step in self.steps:
            if step.statement is not None:
                outcome = expected(state, step.statement)
                results.append(outcome.result)
                reads += outcome.reads
                state = outcome.state
            elif step.savepoint < 0:
                saved.append(state)
            else:
                state = saved[step.savepoint]
                del saved[step.savepoint + 1 :]
        return results, state, reads

    @property
    def results(self) -> list[list[bytes] | int]:
        return [step.result for step in self.steps if step.statement is not None]

    @property
    def touched(self) -> list[int]:
        return sorted({step.statement.space for step in self.steps if step.statement is not None})


class View:
    """A read view, and its expected content while it is open."""

    def __init__(self, view: ReadView, state: State) -> None:
        self.view = view
        self.state = state
        self.pieces: dict[int, tuple[Iterator[list[bytes]], list[bytes]]] = {}
        """By space: a scan of its primary index, and its results so far."""


def put_in_lane(box: Box, space_id: int, requested: list[Statement], wanted: list[Outcome], written: Writes) -> int:
    """Execute statements in the lane; return their number, which ends before the first that fails."""
    packets = [packet_of(statement) for statement in requested]
    found = scanned([b"".join(packets)])
    table = table_of(box.space(space_id))
    assert table is not None
    lane = StatementLane(box)
    lane.begin(written, 1 << 20)
    tables = dict.fromkeys(found.cells[scan.CODE].tolist(), table)
    count = lane.execute(np.frombuffer(found.data, np.uint8), found.cells, 0, len(packets), tables, False)
    results = [[] if result is None else [result] for result in lane.results]
    assert results == [outcome.result for outcome in wanted[:count]]
    assert count == len(wanted) or isinstance(wanted[count].result, int)
    return count


def packet_of(statement: Statement) -> bytes:
    kind = RequestType[statement.type.upper()]
    key = Key.KEY if kind is RequestType.DELETE else Key.TUPLE
    body = {Key.SPACE_ID.value: statement.space, key.value: statement.values}
    return encode_request(kind, 1, pack(body))


def check_order(space: SpaceDefinition, index_id: int, state: State, found: list[bytes]) -> None:
    """Check that an index has the tuples of the model, in order if the index has one."""
    wanted = [entry.raw for entry in model.entries(space, index_id, state[space.id])]
    if space.indexes[index_id].type == "tree":
        assert found == wanted
    else:
        assert sorted(found) == sorted(wanted)


class Programs(RuleBasedStateMachine):
    """Apply every rule to the box and to the model, and compare."""

    def __init__(self) -> None:
        super().__init__()
        self.box: Box = box_with(*SPACES.values())
        self.now = Moment(EMPTY, dict.fromkeys(SPACES, 0))
        self.in_flight: list[tuple[BoxTransaction | Writes, Moment]] = []
        self.open: list[Interactive] = []
        self.views: list[View] = []

    # --- immediate effects ------------------------------------------------------------------------------------------

    def put_in_flight(self, transaction: BoxTransaction | Writes, after: State) -> None:
        """Queue a write for the log, as in the node: it is visible at once and logged later."""
        self.in_flight.append((transaction, self.now))
        self.box.in_flight.append(transaction)
        self.now = self.now._replace(state=after)

    @rule(statement=requests())
    def autocommit(self, statement: Statement) -> None:
        transaction = self.box.begin()
        outcome = agreed(transaction, self.now.state, statement)
        if transaction.statements:
            self.put_in_flight(transaction, outcome.state)
        else:
            assert outcome.state == self.now.state

    @rule(program=st.lists(requests() | st.just(None), min_size=1, max_size=6), commits=st.booleans())
    def immediate_transaction(self, program: list[Statement | None], commits: bool) -> None:
        """Run a program; the first None sets a savepoint, each later one rolls back to it."""
        transaction, state = self.box.begin(), self.now.state
        saved: tuple[tuple[int, int], State] | None = None
        for statement in program:
            if statement is not None:
                state = agreed(transaction, state, statement).state
            elif saved is None:
                saved = transaction.savepoint(), state
            else:
                transaction.rollback_to(saved[0])
                state = saved[1]
        if commits and transaction.statements:
            self.put_in_flight(transaction, state)
        else:
            transaction.rollback()
            assert transaction.statements == []

    @rule(
        program=st.sampled_from((NUMBERS, WORDS)).flatmap(
            lambda space_id: st.lists(
                st.tuples(
                    st.sampled_from(("insert", "replace", "replace", "delete")),
                    st.lists(st.tuples(*fields_of(SPACES[space_id])), min_size=1, max_size=4),
                ),
                min_size=1,
                max_size=3,
            ).map(lambda program: (space_id, program))
        )
    )
    def statements_in_the_lane(self, program: tuple[int, list[tuple[str, list[tuple[Any, ...]]]]]) -> None:
        """Run batches of one statement type each, whose writes can be rolled back together."""
        space_id, stretches = program
        written, state = Writes(), self.now.state
        for type, values in stretches:
            requested = [Statement(type, space_id, 0, each[:1] if type == "delete" else each) for each in values]
            outcomes: list[Outcome] = []
            for statement in requested:
                outcomes.append(expected(outcomes[-1].state if outcomes else state, statement))
            count = put_in_lane(self.box, space_id, requested, outcomes, written)
            state = outcomes[count - 1].state if count else state
        if written:
            self.put_in_flight(written, state)

    @rule(space_id=st.sampled_from(sorted(SPACES)))
    def truncate(self, space_id: int) -> None:
        transaction = self.box.begin()
        count = self.now.truncated[space_id] + 1
        statements.replace(transaction, self.box.space(TRUNCATE_ID), pack((space_id, count)))
        self.put_in_flight(transaction, {**self.now.state, space_id: ()})
        self.now = self.now._replace(truncated={**self.now.truncated, space_id: count})

    # --- the log --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.in_flight)
    @rule(count=st.integers(1, 9))
    def the_log_catches_up(self, count: int) -> None:
        for _ in range(min(count, len(self.in_flight))):
            self.box.in_flight.popleft()
            self.in_flight.pop(0)

    @precondition(lambda self: self.in_flight)
    @rule()
    def the_log_fails(self) -> None:
        """Roll back all pending writes, the newest first."""
        while self.in_flight:
            transaction, self.now = self.in_flight.pop()
            self.box.in_flight.pop()
            transaction.rollback()

    # --- interactive transactions ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < 4)
    @rule(isolation=st.sampled_from((Isolation.DEFAULT, Isolation.DEFAULT, Isolation.READ_CONFIRMED)))
    def begin(self, isolation: Isolation) -> None:
        self.open.append(Interactive(self.box.begin_interactive(isolation=isolation)))

    def confirmed(self) -> Moment:
        """Return the state before all writes that are not in the log."""
        return self.in_flight[0][1] if self.in_flight else self.now

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 3), statement=requests())
    def interactive_statement(self, number: int, statement: Statement) -> None:
        interactive = self.open[number % len(self.open)]
        is_confirmed = interactive.transaction.isolation is Isolation.READ_CONFIRMED
        begin = interactive.begin or (self.confirmed() if is_confirmed else self.now)
        views = len(self.box.views)
        result = perform(interactive.transaction, statement)
        if result == CONFLICT:
            # The space was replaced since the transaction began.
            assert self.now.truncated[statement.space] != begin.truncated[statement.space]
            self.open.remove(interactive)
            return
        if len(self.box.views) > views:
            interactive.begin = begin
        interactive.steps.append(Step(statement, result))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 3))
    def interactive_savepoint(self, number: int) -> None:
        interactive = self.open[number % len(self.open)]
        interactive.savepoints.append(interactive.transaction.savepoint())
        interactive.steps.append(Step(None))

    @precondition(lambda self: any(interactive.savepoints for interactive in self.open))
    @rule(number=st.integers(0, 3), savepoint=st.integers(0, 3))
    def interactive_rollback_to(self, number: int, savepoint: int) -> None:
        with_some = [interactive for interactive in self.open if interactive.savepoints]
        interactive = with_some[number % len(with_some)]
        savepoint %= len(interactive.savepoints)
        interactive.transaction.rollback_to(interactive.savepoints[savepoint])
        del interactive.savepoints[savepoint + 1 :]
        interactive.steps.append(Step(None, savepoint=savepoint))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 3))
    def interactive_rollback(self, number: int) -> None:
        self.open.pop(number % len(self.open)).transaction.rollback()

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 3))
    def interactive_commit(self, number: int) -> None:
        interactive = self.open.pop(number % len(self.open))
        is_reader = not interactive.transaction.statements
        try:
            prepared = interactive.transaction.prepare()
        except TransactionConflict:
            assert self.has_changed(interactive), "conflict without a concurrent change"
            return
        if is_reader:
            assert interactive.replay((interactive.begin or self.now).state)[0] == interactive.results
            assert not prepared.statements
            return
        results, after, _ = interactive.replay(self.now.state)
        assert results == interactive.results, "not serializable in commit order"
        self.put_in_flight(prepared, after)

    def has_changed(self, interactive: Interactive) -> bool:
        """Return True if a read of the transaction is stale, or a space was replaced."""
        begin, now = interactive.begin or self.now, self.now
        if any(begin.truncated[space] != now.truncated[space] for space in interactive.touched):
            return True
        _, _, reads = interactive.replay(begin.state)
        return any(
            model.looked_at(SPACES, begin.state, read) != model.looked_at(SPACES, now.state, read) for read in reads
        )

    # --- read views -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.views) < 4)
    @rule(confirmed=st.booleans())
    def open_view(self, confirmed: bool) -> None:
        moment = self.confirmed() if confirmed else self.now
        self.views.append(View(self.box.open_view(confirmed=confirmed), moment.state))

    @precondition(lambda self: self.views)
    @rule(number=st.integers(0, 3), statement=requests(("select",)))
    def read_through_a_view(self, number: int, statement: Statement) -> None:
        view = self.views[number % len(self.views)]
        index = view.view.spaces[statement.space].index(statement.index_id)
        statement = statement._replace(offset=0, limit=100)
        outcome = expected(view.state, statement)
        assume(isinstance(outcome.result, list))
        if not index.is_ordered and statement.iterator == EQ:
            raw = view.view.get(index, index.key.exact(statement.values))
            assert ([] if raw is None else [raw]) == outcome.result
            return
        found = [raw for _, raw in view.view.scan(index, index.key.span(statement.iterator, statement.values))]
        assert (found if index.is_ordered else sorted(found)) == outcome.result

    @precondition(lambda self: self.views)
    @rule(number=st.integers(0, 3), space_id=st.sampled_from(sorted(SPACES)), size=st.integers(1, 3))
    def take_a_slice_of_a_view(self, number: int, space_id: int, size: int) -> None:
        """Continue a scan in slices, with any writes between two of them."""
        view = self.views[number % len(self.views)]
        index = view.view.spaces[space_id].index(0)
        walk, taken = view.pieces.setdefault(space_id, (view.view.slices(index, size), []))
        piece = next(walk, None)
        if piece is not None:
            taken += piece
            return
        check_order(SPACES[space_id], 0, view.state, taken)
        del view.pieces[space_id]

    @precondition(lambda self: self.views)
    @rule(number=st.integers(0, 3))
    def close_view(self, number: int) -> None:
        self.views.pop(number % len(self.views)).view.close()

    # --- invariants -------------------------------------------------------------------------------------------------

    @invariant()
    def the_box_holds_what_the_model_holds(self) -> None:
        for space in self.box.spaces.values():
            if space.id in SPACES:
                assert sorted(space.tuples()) == sorted(self.now.state[space.id])

    @rule()
    def indexes_are_in_order(self) -> None:
        """Scan every index in order, through the box and through every view."""
        for space_id, space in SPACES.items():
            for index in space.indexes:
                live = self.box.space(space_id).index(index.id)
                check_order(space, index.id, self.now.state, [raw for _, raw in live.scan()])
                for view in self.views:
                    found = [raw for _, raw in view.view.scan(view.view.spaces[space_id].index(index.id))]
                    check_order(space, index.id, view.state, found)

    def teardown(self) -> None:
        while self.open:
            self.open.pop().transaction.rollback()
        while self.views:
            self.views.pop().view.close()
        self.box.views.clear()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    max_examples=5000 if FULL else 80, stateful_step_count=60 if FULL else 40, deadline=None
)


CHANGING = ("insert", "replace", "replace", "delete", "update", "upsert")


@st.composite
def meetings(draw: st.DrawFn) -> tuple[list[Statement], list[Statement], Statement, Statement]:
    """Draw existing keys, the writes and reads of a transaction, and a concurrent change."""
    space = SPACES[draw(st.sampled_from(sorted(SPACES)))]
    rows = draw(st.lists(st.tuples(*fields_of(space)), min_size=1, max_size=9))
    own = draw(st.lists(requests(CHANGING, (space.id,)), max_size=2))
    read = draw(requests(("select",), (space.id,)))
    key = model.keys_of(space.indexes[0], draw(st.sampled_from(rows)))[0]
    other = draw(st.just(Statement("delete", space.id, 0, key)) | requests(CHANGING, (space.id,)))
    return [Statement("replace", space.id, 0, row) for row in rows], own, read, other


@settings(max_examples=20_000 if FULL else 500)
@given(meetings())
def test_read_conflicts_only_with_changes_of_its_result(
    meeting: tuple[list[Statement], list[Statement], Statement, Statement],
) -> None:
    """A transaction writes and reads; then another one writes."""
    first, own, read, other = meeting
    programs = Programs()
    for statement in first:
        programs.autocommit(statement)
    programs.begin(Isolation.DEFAULT)
    (interactive,) = programs.open
    elsewhere = WORDS if read.space != WORDS else NUMBERS
    unread = Statement("replace", elsewhere, 0, ("seen" if elsewhere == WORDS else 99, None))
    for statement in (*own, read, unread):
        programs.interactive_statement(0, statement)
    programs.autocommit(other)
    has_changed = programs.has_changed(interactive)
    programs.interactive_commit(0)
    is_there = perform(programs.box.begin(), Statement("select", elsewhere, 0, unread.values[:1])) != []
    assert is_there is not has_changed


AUTOCOMMIT = 3
SCHEDULES = st.sampled_from(sorted(SPACES)).flatmap(
    lambda space_id: st.tuples(
        st.lists(tuples(SPACES[space_id]).map(lambda values: Statement("replace", space_id, 0, values)), max_size=6),
        st.lists(st.tuples(st.integers(0, AUTOCOMMIT), requests(space_ids=(space_id,)) | st.none()), max_size=24),
    )
)


@settings(max_examples=20_000 if FULL else 400)
@given(SCHEDULES)
def test_concurrent_transactions_of_one_space_are_serializable(
    schedule: tuple[list[Statement], list[tuple[int, Statement | None]]],
) -> None:
    """Interleave three transactions with other statements; None is a commit, and all commit at the end."""
    first, steps = schedule
    programs = Programs()
    for initial in first:
        programs.autocommit(initial)
    actors: dict[int, Interactive] = {}
    for actor, statement in [*steps, *((actor, None) for actor in range(AUTOCOMMIT))]:
        if actor == AUTOCOMMIT:
            if statement is not None:
                programs.autocommit(statement)
            continue
        if actors.get(actor) not in programs.open:
            programs.begin(Isolation.DEFAULT)
            actors[actor] = programs.open[-1]
        number = programs.open.index(actors[actor])
        if statement is None:
            programs.interactive_commit(number)
        else:
            programs.interactive_statement(number, statement)
    programs.indexes_are_in_order()


@pytest.mark.parametrize("space_id", sorted(SPACES))
@given(data=st.data())
def test_index_order_equals_that_of_the_reference_comparator(space_id: int, data: st.DataObject) -> None:
    """Compare many values at once; the programs above use few at a time."""
    space, box = SPACES[space_id], box_with(SPACES[space_id])
    state: State = {space_id: ()}
    for values in data.draw(st.lists(st.tuples(*fields_of(space)), min_size=10, max_size=40)):
        state = agreed(box.begin(), state, Statement("replace", space_id, 0, values)).state
    for index in space.indexes:
        check_order(space, index.id, state, [raw for _, raw in box.space(space_id).index(index.id).scan()])
