"""A task: its transaction is aborted by a wait, and values that are joined are split again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.lua.task import LuaTask, split_values
from flowstone.node.server.procedures import Call
from tests.node.conversations import Conversation
from tests.node.instances import make_instance


@pytest.fixture
def task() -> LuaTask:
    client = Conversation(make_instance())
    return LuaTask(1, Call(client.instance, client.watchers, "f", (), 1, client.session))


def test_wait_aborts_the_open_transaction_until_the_task_ends_it(task: LuaTask) -> None:
    task.begin(task.call.instance.box.begin())
    task.abort_by_yield()
    for use in (task.check, task.end):
        with pytest.raises(errors.TransactionYield):
            use()
    task.check()
    assert task.end() is None


def test_transaction_that_is_left_open_is_reported_and_rolled_back(task: LuaTask) -> None:
    assert not task.abandon()
    task.begin(task.call.instance.box.begin())
    assert task.abandon()
    assert task.transaction is None


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**63), st.text(), st.lists(st.text()), st.binary()), min_size=1))
def test_joined_values_are_split_at_their_boundaries(values: list[Any]) -> None:
    packed = [pack(value) for value in values]
    assert split_values(b"".join(packed), len(packed)) == packed
    assert [unpack(one) for one in split_values(b"".join(packed), len(packed))] == [unpack(one) for one in packed]
