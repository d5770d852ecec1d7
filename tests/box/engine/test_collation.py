"""Collations: the order of the real server, and the errors if the ICU library is unavailable."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.definitions import IndexDefinition, IndexPart
from flowstone.box.engine import collation
from flowstone.box.engine.collation import Collation, CollationError, read_collation
from flowstone.box.engine.keys import KeyDefinition
from flowstone.iproto.msgpack import pack, unpack
from tests.box import raw_client
from tests.box.raw_client import RawClient

UNICODE = Collation(1, "unicode", "ICU", "", {"strength": "tertiary"})
UNICODE_CI = Collation(2, "unicode_ci", "ICU", "", {"strength": "primary"})

WORDS = """ a A á Á ä b B ab aB aa z Z é e E è ë f côte coté cote Cote ö o oe ß ss SS ы Ы ё е Е я 1 10 2 ² 名 名前 あ ア
ch c h llama luz lynx ñ n å Å æ ae co-op coop co_op I ı i İ dž Dž đ d ŋ ﬁ fi ½ ǆ resume résumé Resume""".split()
TEXTS = [
    *WORDS,
    "",
    " ",
    "a\x00",
    "a\x00b",
    "\x00",
    "\udcff",
    "a\udce2\udc82",
    "a b",
    "A B",
    "x" * 300,
    "e\u0301",
    "😀",
]


def test_strength_determines_whether_case_and_accents_matter() -> None:
    assert UNICODE_CI.sort_key("Résumé") == UNICODE_CI.sort_key("RESUME")
    shuffled = ["z", "RÉSUMÉ", "résumé", "Resume", "resume"]
    assert sorted(shuffled, key=UNICODE.sort_key) == ["resume", "Resume", "résumé", "RÉSUMÉ", "z"]


def test_collation_has_the_options_of_its_row() -> None:
    numeric = read_collation((300, "numbers", 1, "ICU", "", {"numeric_collation": "on"}))
    upper_first = read_collation((301, "upper", 1, "ICU", "en_US", {"case_first": "UPPER_FIRST"}))
    assert numeric.sort_key("a9") < numeric.sort_key("a10")
    assert UNICODE.sort_key("a9") > UNICODE.sort_key("a10")
    assert upper_first.sort_key("A") < upper_first.sort_key("a")
    assert UNICODE.sort_key("A") > UNICODE.sort_key("a")


def test_each_locale_has_its_own_order() -> None:
    swedish = Collation(302, "sv", "ICU", "sv", {"strength": "tertiary"})
    assert UNICODE.sort_key("ö") < UNICODE.sort_key("z") < swedish.sort_key("ö")


@given(st.text())
def test_sort_key_has_one_zero_byte_at_its_end(text: str) -> None:
    for one in UNICODE, UNICODE_CI:
        key = one.sort_key(text)
        assert key.index(b"\x00") == len(key) - 1


def test_sort_key_longer_than_its_buffer_is_complete() -> None:
    assert UNICODE.sort_key("ab" * 500) < UNICODE.sort_key("ab" * 499 + "ac")


def test_invalid_utf8_is_replaced() -> None:
    assert UNICODE.sort_key("a\udcff") == UNICODE.sort_key("a\ufffd")


def test_binary_collation_returns_the_bytes() -> None:
    assert Collation(3, "binary", "BINARY").sort_key("é\udcff") == b"\xc3\xa9\xff"


def test_invalid_collation_raises_on_first_use() -> None:
    with pytest.raises(CollationError, match="strength cannot be 'huge'"):
        Collation(303, "odd", "ICU", "", {"strength": "huge"}).sort_key("a")
    with pytest.raises(CollationError, match="ICU rejects case_level='tertiary'"):
        Collation(304, "odd", "ICU", "", {"case_level": "tertiary"}).sort_key("a")


def test_index_without_the_icu_library_raises_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    collation._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", nothing)
    sk = IndexDefinition(512, 1, "sk", "tree", True, (IndexPart(1, "string", collation=1),))
    key = KeyDefinition(sk, None, {1: Collation(1, "unicode")})
    with pytest.raises(CollationError, match=r"libicui18n is not installed; install ICU \(Debian: libicu"):
        key.entries((1, "a"))


# --- the real server --------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_index_order_with_a_collation_equals_that_of_the_real_server(tarantool: ModuleType, tmp_path: Path) -> None:
    own = [
        ("numbers", "", {"numeric_collation": "ON"}),
        ("upper", "en_US", {"case_first": "UPPER_FIRST"}),
        ("cases", "", {"strength": "PRIMARY", "case_level": "ON"}),
        ("shifted", "", {"alternate_handling": "SHIFTED", "strength": "QUATERNARY"}),
        ("french", "fr_CA", {"french_collation": "ON"}),
        ("same", "", {"strength": "IDENTICAL", "normalization_mode": "ON"}),
    ]
    setup = "local json = require('json') "
    for name, locale, options in own:
        setup += f"box.internal.collation.create('{name}', 'ICU', '{locale}', json.decode('{json.dumps(options)}')) "
    setup += (
        "local id = 600 for _, c in box.space._collation:pairs() do"
        " local s = box.schema.space.create('t' .. c.id, {id=600 + c.id}) s:create_index('pk')"
        " s:create_index('sk', {unique=false, parts={{2, 'string', collation=c.name}}})"
        " s:create_index('mixed', {unique=false, parts={{2, 'scalar', collation=c.name}}}) end"
    )
    with (
        tarantool.serve(tmp_path, setup=setup, cfg="wal_mode='none'") as server,
        RawClient(server.port) as client,
    ):
        (answer,) = client.ask([raw_client.select(276, 0)])  # _collation
        collations = {row[0]: read_collation(row) for row in map(unpack, answer.tuples)}
        assert {"unicode", "unicode_ci", "binary", "unicode_de__phonebook_s1", "same"} <= {
            one.name for one in collations.values()
        }
        for id in collations:
            tuples = [(number, text) for number, text in enumerate(TEXTS)]
            answers = client.ask([raw_client.insert(600 + id, pack(tuple_)) for tuple_ in tuples])
            assert not any(answer.code for answer in answers)
            for index_id, type in ((1, "string"), (2, "scalar")):
                assert order_of(client, 600 + id, index_id) == order(tuples, type, collations, id), collations[id]


def order(tuples: list[tuple[Any, ...]], type: str, collations: dict[int, Collation], id: int) -> list[Any]:
    primary = IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),))
    sk = IndexDefinition(512, 1, "sk", "tree", False, (IndexPart(1, type, collation=id),))
    key = KeyDefinition(sk, primary, collations)
    placed = {key.entries(tuple_)[0]: tuple_ for tuple_ in tuples}
    return [placed[entry] for entry in sorted(placed)]


def order_of(client: RawClient, space: int, index: int) -> list[Any]:
    (answer,) = client.ask([raw_client.select(space, index)])
    return [unpack(raw) for raw in answer.tuples]
