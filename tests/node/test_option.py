"""One option: the meaning of texts and values, and its spelling."""

from __future__ import annotations

import pytest

from flowstone.iproto import errors
from flowstone.node.configuration import OPTIONS


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("read_only", "true", True),
        ("read_only", "FALSE", False),
        ("checkpoint_count", "3", 3),
        ("txn_timeout", "0.5", 0.5),
        ("wal_mode", "fsync", "fsync"),
        ("listen", "3301", "3301"),
        ("replication_synchro_quorum", "2", 2),
        ("replication_synchro_quorum", "N / 2 + 1", "N / 2 + 1"),
    ],
)
def test_text_of_the_command_line_becomes_a_value(name: str, text: str, value: object) -> None:
    option = OPTIONS[name]
    assert option.accept(option.parse(text)) == value


@pytest.mark.parametrize(("name", "text"), [("read_only", "maybe"), ("checkpoint_count", "few")])
def test_string_of_another_type_is_rejected(name: str, text: str) -> None:
    option = OPTIONS[name]
    with pytest.raises(errors.TarantoolError, match=f"'{name}': should be of type"):
        option.accept(option.parse(text))


def test_option_has_one_spelling() -> None:
    option = OPTIONS["wal_max_size"]
    assert (option.dashed, option.variable) == ("--wal-max-size", "FLOWSTONE_WAL_MAX_SIZE")
