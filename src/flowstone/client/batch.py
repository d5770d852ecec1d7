"""Many rows for one space, pipelined: `insert_many` and `replace_many`.

Each row is a transaction of its own. Most are answered with success, so the rows of a batch share one object until one
of them needs attention; that row becomes an `Attempt`, which sends it again where that is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from flowstone.box.row_forms import RowForm, RowMismatch
from flowstone.box.schema import UnknownSpace
from flowstone.client.dispatcher import Attempt, Dispatcher
from flowstone.client.statements import Store
from flowstone.errors import FlowstoneError, OutcomeUnknown
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.packet import Response

BATCH_ROWS: Final = 1000
BATCHES_MAX: Final = 8
"""Batches in flight: more would only fill memory."""

SHOWN: Final = 3


class RowsFailed(FlowstoneError):
    """Some rows of `insert_many` or `replace_many` are not stored, or not surely. `errors` has an error for each, by
    the position of the row; all other rows are stored."""

    def __init__(self, errors: dict[int, FlowstoneError], count: int) -> None:
        some = "; ".join(f"row {number}: {error}" for number, error in list(errors.items())[:SHOWN])
        more = "; …" if len(errors) > SHOWN else ""
        unknown = sum(isinstance(error, OutcomeUnknown) for error in errors.values())
        and_unknown = f", the outcome of {unknown} is unknown" if unknown else ""
        super().__init__(f"{len(errors)} of {count} rows failed{and_unknown}: {some}{more}")
        self.errors = errors


class _Batch:
    """Some rows in flight. `done` completes when each has an outcome; `errors` has those that failed."""

    def __init__(self, dispatcher: Dispatcher, statements: list[Store[Any]], first_row: int) -> None:
        self.deadline = dispatcher.deadline()
        self.errors: dict[int, FlowstoneError] = {}
        self.done: asyncio.Future[None] = dispatcher.loop.create_future()
        self._dispatcher = dispatcher
        self._statements = statements
        self._first_row = first_row
        self._first_sync = 0
        self._left = len(statements)

    def send(self) -> None:
        """Send the rows with one write if a leader is known; otherwise, each when there is one."""
        member = self._member = self._dispatcher.pool.choose("leader")
        schema = member.schema if member is not None else None
        self._schema = schema
        if member is None or schema is None or member.connection is None or member.connection.is_lost:
            self._send_each()
            return
        try:
            bodies = [statement.body(schema) for statement in self._statements]
        except (TarantoolError, UnknownSpace, RowMismatch):
            self._send_each()  # which finds the row that does not fit, and whether it fits a newer schema
            return
        type, version = self._statements[0].type, schema.version
        self._first_sync = member.connection.submit_many(type, bodies, self, schema_version=version)

    def answered(self, response: Response) -> None:
        if response.is_error:
            self._attempt(response.sync - self._first_sync).answered(response)
        else:
            self._finish_one()

    def failed(self, sync: int, error: FlowstoneError, *, was_sent: bool) -> None:
        self._attempt(sync - self._first_sync).failed(sync, error, was_sent=was_sent)

    def _send_each(self) -> None:
        for number in range(len(self._statements)):
            attempt = self._attempt(number)
            self._dispatcher.send_later(attempt)

    def _attempt(self, number: int) -> Attempt[Any]:
        """Return an attempt at one row, whose outcome counts for the batch."""
        attempt = Attempt(self._dispatcher, self._statements[number], "leader", self.deadline)
        if self._member is not None:
            attempt.member, attempt.schema = self._member, self._schema

        def finished(future: asyncio.Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                assert isinstance(error, FlowstoneError)
                self.errors[self._first_row + number] = error
            self._finish_one()

        attempt.future.add_done_callback(finished)
        return attempt

    def _finish_one(self) -> None:
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


async def store_many(
    dispatcher: Dispatcher, type: RequestType, space: int | str, rows: Iterable[Any], form: RowForm[Any]
) -> int:
    """Store the rows, and return their number. Raise RowsFailed when all have an outcome, if some are not stored."""
    iterator, count, errors = iter(rows), 0, {}
    under_way: list[_Batch] = []
    while statements := [Store(type, space, row, form) for row in islice(iterator, BATCH_ROWS)]:
        with suppress(FlowstoneError):  # each row reports it
            await dispatcher.leader()
        batch = _Batch(dispatcher, statements, count)
        batch.send()
        count += len(statements)
        under_way.append(batch)
        if len(under_way) == BATCHES_MAX:
            await under_way[0].done
            errors.update(under_way.pop(0).errors)
    for batch in under_way:
        await batch.done
        errors.update(batch.errors)
    if errors:
        raise RowsFailed(errors, count)
    return count
