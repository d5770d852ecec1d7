"""Errors of this package name the file and the offset, and cross process boundaries."""

from __future__ import annotations

import pickle

from flowstone.errors import RemoteProtocolError
from flowstone.limestone.errors import DamagedFile, LimestoneError


def test_error_names_the_damaged_file_the_offset_and_the_hint() -> None:
    error = DamagedFile("log/epoch", 9, "it ends inside a record", hint="repair it")
    assert str(error) == "log/epoch is damaged at byte 9: it ends inside a record; repair it"
    assert isinstance(error, LimestoneError)
    assert isinstance(error, RemoteProtocolError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.path, again.offset) == (str(error), "log/epoch", 9)
