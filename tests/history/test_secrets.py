"""Hashes of passwords are nowhere in what is shown, in whatever way the log got them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowstone.history.reading import Piece, Reading
from flowstone.history.records import records
from flowstone.history.secrets import hide_secrets
from flowstone.history.selection import Selection
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import RequestType
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
        (RequestType.UPSERT, {0x10: 304, 0x21: USER, 0x28: (("=", 4, {"chap-sha1": HASH}),)}),
    ],
)
def test_no_hash_is_left(tmp_path: Path, row: tuple[RequestType, dict[int, Any]]) -> None:
    log = Log(tmp_path)
    log.write(row)
    (piece,) = map(hide_secrets, pieces(log))
    assert HASH.encode() not in piece.slab.payload
    (record,) = records([piece])
    assert "<hidden>" in str(record.body)
    assert record.space is not None
    assert record.space.name == "_user"


def test_a_user_keeps_its_name_and_other_rows_their_bytes(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.insert(512, 1, {"chap-sha1": HASH})
    log.write((RequestType.INSERT, {0x10: 304, 0x21: USER}), (RequestType.INSERT, {0x10: 512, 0x21: (2,)}))
    log.insert(512, 3)
    (piece,) = pieces(log)
    hidden = hide_secrets(piece)
    before, after = list(records([piece])), list(records([hidden]))
    assert [row.transaction for row in before] == [row.transaction for row in after]
    assert after[1].body[0x21] == (32, 1, "clerk", "user", {"chap-sha1": "<hidden>"}, ("<hidden>",), 0)
    for number in (0, 2, 3):
        assert before[number].row == after[number].row
    assert np.array_equal(piece.slab.cells[rows_of.SPAN], hidden.slab.cells[rows_of.SPAN])


def test_a_piece_without_users_passes_untouched(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.insert(512, 1)
    (piece,) = pieces(log)
    assert hide_secrets(piece) is piece
