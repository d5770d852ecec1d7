"""Distinguishable transactions: each of several numbered rows, so that a lost or split one is visible.

A `Scribe` writes them to a member in a thread, whatever happens to the member, and records the answers.
"""

from __future__ import annotations

from collections import Counter
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import unpack
from tests.interop import workload
from tests.interop.client import Client
from tests.interop.member import SECONDS, Member

LEDGER = 700
PARTS_MAX = 4
RETRY_SECONDS = 0.02
PACE_SECONDS = 0.001
"""Pause between transactions: enough of them to be hit by any fault, and not too many for a long run."""


def define(member: Member) -> None:
    """Define the space. Rows are [transaction number, row number, row count]; row [0, 0, n] has the newest number."""
    create = ["call", "box.schema.space.create", ["ledger", {"id": LEDGER}]]
    index = ["call", "box.space.ledger:create_index", ["pk", {"parts": [1, "unsigned", 2, "unsigned"]}]]
    workload.run(member, [create, index])


def parts_of(number: int) -> int:
    return number % PARTS_MAX + 1


def transaction(number: int) -> list[list[Any]]:
    parts = parts_of(number)
    rows: list[list[Any]] = [["insert", LEDGER, [number, part, parts]] for part in range(1, parts + 1)]
    return [*rows, ["replace", LEDGER, [0, 0, number]]]


class Scribe:
    """Writes until the block ends. `answered`: numbers of the acknowledged transactions."""

    def __init__(self, member: Member, *, first: int = 1, pace: float = PACE_SECONDS) -> None:
        self.answered: list[int] = []
        self.number = first
        self._member = member
        self._pace = pace
        self._ending = Event()
        self._problem: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join(SECONDS)
        if error is None:
            assert not self._thread.is_alive(), f"{self._member} no longer answers"
            if self._problem is not None:
                raise self._problem

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                try:
                    with self._member.connect() as client:
                        self._write(client)
                except OSError:
                    self._ending.wait(RETRY_SECONDS)
        except BaseException as error:
            self._problem = error

    def _write(self, client: Client) -> None:
        while not self._ending.is_set():
            try:
                client.call("interop.transaction", transaction(self.number))
            except TarantoolError as error:
                if error.code not in (READ_ONLY, LOADING, ACCESS_DENIED):
                    raise
                self._ending.wait(RETRY_SECONDS)
                continue
            except OSError:
                self.number += 1  # the outcome is unknown
                raise
            self.answered.append(self.number)
            self.number += 1
            self._ending.wait(self._pace)


READ_ONLY, LOADING, ACCESS_DENIED = 7, 116, 42
"""Errors while a member starts."""


def assert_whole(member: Member, answered: list[int]) -> None:
    """Check that every acknowledged transaction is present, and that all present ones are complete."""
    found = Counter[int]()
    for raw in member.tuples(LEDGER):
        number, part, _ = unpack(raw)
        if part:
            found[number] += 1
    lost = [number for number in answered if number not in found]
    assert not lost, f"{member} has lost {len(lost)} of {len(answered)} transactions: {lost[:10]}"
    split = [number for number, count in found.items() if count != parts_of(number)]
    assert not split, f"{member} has parts of the transactions {split[:10]}"
