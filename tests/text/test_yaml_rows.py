"""YAML output, read back by another library."""

from __future__ import annotations

import math
import tempfile
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.history.log_reading import Reading
from flowstone.history.records import records
from flowstone.history.selection import Selection
from flowstone.iproto.constants import RequestType
from flowstone.iproto.extensions import Datetime, ErrorRecord, ErrorStack, Extension, Interval
from flowstone.outside import production
from flowstone.text.yaml_rows import yaml_document, yaml_documents, yaml_value
from tests.history.logs import Log

texts = st.text(st.characters(codec="utf-8"))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), texts, st.binary(), st.uuids()
)
keys = st.one_of(texts, st.integers(-(2**63), 2**64 - 1), st.booleans())
values = st.recursive(scalars, lambda inner: st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=20)


def as_read(value: Any) -> Any:
    """Return `value` as decoded by a YAML parser. NaN, which does not equal itself, becomes a string."""
    if isinstance(value, tuple | list):
        return [as_read(each) for each in value]
    if isinstance(value, dict):
        return {as_read(key): as_read(each) for key, each in value.items()}
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return str(value) if isinstance(value, uuid.UUID) else value


@given(values)
def test_yaml_parser_reads_every_value_back(value: Any) -> None:
    assert as_read(yaml.safe_load(yaml_value(value))) == as_read(value)


@pytest.mark.parametrize(
    "word", ["y", "No", "TRUE", "null", "~", "", "1", "0x1f", "1e3", "2024-05-01", "a: b", "#", "-"]
)
def test_reserved_words_are_quoted(word: str) -> None:
    assert yaml.safe_load(yaml_value({word: word})) == {word: word}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Decimal("1.50"), "1.50"),
        (1e300, "1.0e+300"),
        (3.0, "3.0"),
        ("it's", '"it\'s"'),
        ('a "b" \\', '"a \\"b\\" \\\\"'),
        ("line\n", '"line\\n"'),
        ("\udcff\udcfe", '!!binary "//4="'),
        (b"\x00\xff", '!!binary "AP8="'),
        (Datetime(0, 500_000_000), "1970-01-01T00:00:00.5Z"),
        (Interval(year=1, month=-2), '"+1 years, -2 months"'),
        (Extension(5, b"x"), '{ext: 5, data: !!binary "eA=="}'),
        (
            ErrorStack((ErrorRecord("ClientError", "oops", code=3),)),
            '[{type: "ClientError", message: "oops", code: 3}]',
        ),
        ({(1, 2): 3}, "{? [1, 2] : 3}"),
        ({"plain_key": 1, "no": 2, "two words": 3}, '{plain_key: 1, "no": 2, "two words": 3}'),
    ],
)
def test_values_have_readable_yaml(value: Any, text: str) -> None:
    assert yaml_value(value) == text


def test_key_of_any_length_is_read_back() -> None:
    assert yaml.safe_load(yaml_value({"long " * 1000: 1})) == {"long " * 1000: 1}


def test_transaction_of_several_rows_starts_with_a_comment(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"))
    log.insert(512, 1)
    log.write(*((RequestType.INSERT, {0x10: 512, 0x21: (number,)}) for number in (2, 3)))
    log.writer.close()
    text = "".join(yaml_documents(records(Reading(production(), [log.path]).pieces())))
    assert [line for line in text.splitlines() if line[0] in "#-"] == ["---", "# transaction 4: 2 rows", "---", "---"]
    read = list(yaml.safe_load_all(text))
    assert [each["BODY"]["tuple"] for each in read] == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert [each["HEADER"].get("commit") for each in read] == [None, None, True]


def test_transaction_that_changes_the_schema_has_one_comment(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"))
    altered: tuple[Any, ...] = (512, 1, "renamed", "memtx", 0, {}, [])
    insert = (RequestType.INSERT, {0x10: 512, 0x21: (1,)})
    log.write(insert, (RequestType.REPLACE, {0x10: 280, 0x21: altered}), insert)
    log.writer.close()
    pieces = Reading(production(), [log.path], selection=Selection(show_system=True)).pieces()
    text = "".join(yaml_documents(records(pieces)))
    assert [line for line in text.splitlines() if line[0] == "#"] == ["# transaction 3: 3 rows"]
    assert [each["BODY"]["space"] for each in yaml.safe_load_all(text)][-3:] == ["t", "_space", "renamed"]


operations = st.lists(st.tuples(st.just("="), st.integers(-3, 3), scalars).map(tuple), max_size=3).map(tuple)
tuples = st.lists(values, max_size=4).map(tuple)
numbers = st.sampled_from([0, 1])
changes = st.one_of(
    st.tuples(st.just(RequestType.INSERT), st.fixed_dictionaries({0x10: st.just(512), 0x21: tuples})),
    st.tuples(st.just(RequestType.REPLACE), st.fixed_dictionaries({0x10: st.just(513), 0x21: tuples})),
    st.tuples(
        st.just(RequestType.UPDATE),
        st.fixed_dictionaries({0x10: st.just(512), 0x20: tuples, 0x21: operations}, optional={0x15: numbers}),
    ),
    st.tuples(
        st.just(RequestType.DELETE),
        st.fixed_dictionaries({0x10: st.just(512), 0x20: tuples}, optional={0x11: numbers, 0x2A: tuples}),
    ),
    st.tuples(
        st.just(RequestType.UPSERT),
        st.fixed_dictionaries({0x10: st.just(513), 0x21: tuples, 0x28: operations}, optional={0x15: numbers}),
    ),
    st.tuples(st.just(RequestType.RAFT_CONFIRM), st.just({0x02: 1, 0x03: 7})),
)


@settings(deadline=None)
@given(st.lists(changes, max_size=8), st.booleans())
def test_rows_written_as_columns_equal_those_written_one_by_one(
    rows: list[tuple[RequestType, dict[int, Any]]], names: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory))
        log.create_space(512, "t", ("id", "any"), ("no", "any"))
        for kind, body in rows:
            log.write((kind, body))
        log.writer.close()
        pieces = list(Reading(production(), [log.path]).pieces())
    together = yaml.safe_load_all("".join(yaml_documents(records(pieces), names=names)))
    one_by_one = yaml.safe_load_all("".join(yaml_document(record, names=names) for record in records(pieces)))
    assert as_read(list(together)) == as_read(list(one_by_one))
