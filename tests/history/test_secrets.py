"""Password hashes never appear in the output, whatever row they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowstone.history import secrets
from flowstone.history.log_reading import Piece, Reading
from flowstone.history.records import records
from flowstone.history.secrets import hide_secrets
from flowstone.history.selection import Mask, Selection
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import RequestType
from flowstone.iproto.extensions import Extension
from flowstone.iproto.slab import Slab
from flowstone.outside import production
from tests.history.logs import Log

HASH = "vhvewKp0tNyweZQ+cFKAlsyphfg="
USER = (32, 1, "clerk", "user", {"chap-sha1": HASH}, [HASH], 0)


def pieces(log: Log) -> list[Piece]:
    log.writer.close()
    return list(Reading(production(), [log.path], selection=Selection(show_system=True)).pieces())


@pytest.mark.parametrize(
    "row",
    [
        (RequestType.INSERT, {0x10: 304, 0x21: USER}),
        (RequestType.REPLACE, {0x10: 304, 0x21: USER}),
        (RequestType.UPDATE, {0x10: 304, 0x20: (32,), 0x21: (("=", 4, {"chap-sha1": HASH}),)}),
        (RequestType.UPDATE, {0x10: 304, 0x20: (32,), 0x21: (("=", "auth", {"chap-sha1": HASH}),)}),
        (RequestType.UPDATE, {0x10: 304, 0x20: (32,), 0x21: (("=", "auth.chap-sha1", HASH),)}),
        (RequestType.UPDATE, {0x10: 304, 0x20: (32,), 0x21: (("=", "[5]['chap-sha1']", HASH),)}),
        (RequestType.UPDATE, {0x10: 304, 0x15: 1, 0x20: (32,), 0x21: (("=", 4, "user"), ("=", 5, HASH))}),
        (RequestType.UPDATE, {0x10: 304, 0x20: (32,), 0x21: (("=", 1, HASH), ("=", (HASH,), 1))}),
        (RequestType.UPDATE, {0x10: 304, 0x20: (32,), 0x21: (HASH, (HASH,), ("=", -3, HASH))}),
        (RequestType.UPSERT, {0x10: 304, 0x21: USER, 0x28: (("=", 4, {"chap-sha1": HASH}),)}),
        (RequestType.REPLACE, {0x10: 304, 0x21: USER, 0x2C: USER, 0x2D: USER}),
        (RequestType.INSERT, {0x10: 304, 0x21: {"chap-sha1": HASH}}),
        (RequestType.INSERT, {0x10: 304, 0x21: {HASH: 1}, 0x7E: HASH}),
        (
            RequestType.INSERT,
            {0x10: 304, 0x21: (32, 1, "clerk", "user", HASH, HASH.encode(), Extension(9, HASH.encode()))},
        ),
        (RequestType.DELETE, {0x10: 304, 0x20: ((HASH,),)}),
    ],
)
def test_no_password_hash_remains(tmp_path: Path, row: tuple[RequestType, dict[int, Any]]) -> None:
    log = Log(tmp_path)
    log.write(row)
    (piece,) = hide_secrets(pieces(log))
    assert HASH.encode() not in piece.slab.payload
    (record,) = records([piece])
    assert "<hidden>" in str(record.body)
    assert record.space is not None
    assert record.space.name == "_user"


def test_user_keeps_its_name_and_other_rows_are_unchanged(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.insert(512, 1, {"chap-sha1": HASH})
    log.write((RequestType.INSERT, {0x10: 304, 0x21: USER}), (RequestType.INSERT, {0x10: 512, 0x21: (2,)}))
    log.insert(512, 3)
    (piece,) = pieces(log)
    (hidden,) = hide_secrets([piece])
    before, after = list(records([piece])), list(records([hidden]))
    assert [row.transaction for row in before] == [row.transaction for row in after]
    assert after[1].body[0x21] == (32, 1, "clerk", "user", {"chap-sha1": "<hidden>"}, ("<hidden>",), 0)
    for number in (0, 2, 3):
        assert before[number].row == after[number].row
    assert np.array_equal(piece.slab.cells[rows_of.SPAN], hidden.slab.cells[rows_of.SPAN])


def test_piece_without_users_is_unchanged(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.insert(512, 1)
    (piece,) = pieces(log)
    assert list(hide_secrets([piece])) == [piece]
    assert next(hide_secrets([piece])) is piece


def test_transaction_of_several_pieces_stays_one_transaction(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(
        (RequestType.INSERT, {0x10: 304, 0x21: USER}),
        (RequestType.INSERT, {0x10: 280, 0x21: (600, 1, "x", "memtx", 0, {}, ())}),
        (RequestType.INSERT, {0x10: 600, 0x21: (1,)}),
    )
    found = list(hide_secrets(pieces(log)))
    assert len(found) > 1
    assert len({id(piece.slab) for piece in found}) == 1
    assert len({record.transaction for record in records(found)}) == 1


def test_a_slab_is_rewritten_once_for_all_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path)
    for number in range(20):
        log.insert(304, *USER)
        log.insert(280, 600 + number, 1, f"x{number}", "memtx", 0, {}, ())
    found = pieces(log)
    rewritten, calls = secrets._rewritten, []

    def counted(slab: Slab, secret: Mask) -> Slab:
        calls.append(slab)
        return rewritten(slab, secret)

    monkeypatch.setattr(secrets, "_rewritten", counted)
    assert len(list(hide_secrets(found))) == len(found) == 20
    assert len(calls) == len({id(piece.slab) for piece in found})


def test_names_and_types_of_users_are_not_masked(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(
        (RequestType.UPDATE, {0x10: 304, 0x15: 1, 0x20: ("clerk",), 0x21: (("=", 3, "boss"), ("=", "type", "role"))})
    )
    (record,) = records(hide_secrets(pieces(log)))
    assert record.body[0x20] == ("clerk",)
    assert record.body[0x21] == (("=", 3, "boss"), ("=", "type", "role"))
