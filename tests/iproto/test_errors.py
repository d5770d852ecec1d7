"""The table of error codes and its classes."""

from __future__ import annotations

import pickle

import pytest

from flowstone.iproto import errors
from flowstone.iproto.error_codes import HINT_OF_EXPELLED, HINTS, NAMES
from flowstone.iproto.errors import CLASSES, AccessDenied, TarantoolError, TupleFound, error_of
from flowstone.iproto.extensions import ErrorRecord, ErrorStack


def test_every_code_has_an_error_class_of_its_name() -> None:
    assert sorted(NAMES) == list(range(len(NAMES)))
    assert len({kind.__name__ for kind in CLASSES.values()}) == len(NAMES) == len(set(NAMES.values()))
    assert all(getattr(errors, kind.__name__) is kind for kind in CLASSES.values())


def test_error_of_a_code_is_caught_by_its_name() -> None:
    with pytest.raises(TupleFound) as caught:
        raise error_of(3, "Duplicate key exists")
    error = caught.value
    assert (error.code, error.name, error.message) == (3, "ER_TUPLE_FOUND", "Duplicate key exists")
    assert error.hint == HINTS[3]
    assert str(error) == f"Duplicate key exists (ER_TUPLE_FOUND, 3); {HINTS[3]}"


def test_log_gap_and_lua_error_have_different_classes() -> None:
    gap = ErrorStack((ErrorRecord("XlogGapError", "Missing .xlog file"),))
    assert error_of(32, "Missing .xlog file", gap).hint == HINTS[219]
    assert error_of(32, "attempt to index nil").hint == HINTS[32]


def test_hint_for_an_orphan_does_not_suggest_an_option() -> None:
    text = "Can't modify data on a read-only instance - "
    assert error_of(7, f"{text}box.cfg.read_only is true").hint == HINTS[7]
    orphan = error_of(7, f"{text}it is an orphan")
    assert "box.info.replication of that peer" in str(orphan)
    assert "box.cfg.read_only" not in str(orphan)


@pytest.mark.parametrize("what", ["snapshots", "followers"])
def test_refusal_from_an_expelled_server_has_a_hint_about_the_expulsion(what: str) -> None:
    error = error_of(5, f"Instance that was expelled from its replica set does not support {what}")
    assert error.hint == HINT_OF_EXPELLED
    assert "expelled" in HINT_OF_EXPELLED
    assert error_of(5, "Vinyl does not support this").hint == HINTS[5]


def test_error_raised_locally_has_no_hint() -> None:
    error = TupleFound("Duplicate key exists")
    assert error.hint is None
    assert str(error) == "Duplicate key exists (ER_TUPLE_FOUND, 3)"


def test_unknown_error_code_is_preserved() -> None:
    error = error_of(9999, "from the future")
    assert type(error) is TarantoolError
    assert (error.code, error.name, str(error)) == (9999, "ER_9999", "from the future (ER_9999, 9999)")
    assert TarantoolError.code == 0


def test_replication_error_codes_equal_those_of_real_servers() -> None:
    expected = {7: "Readonly", 42: "AccessDenied", 47: "CredsMismatch", 63: "ReplicasetUuidMismatch"}
    expected |= {
        116: "Loading",
        219: "XlogGap",
        228: "SyncQueueForeign",
        244: "SplitBrain",
        303: "XlogNotFound",
    }
    assert {code: CLASSES[code].__name__ for code in expected} == expected
    assert AccessDenied is CLASSES[42]


def test_unknown_error_name_is_not_an_attribute() -> None:
    with pytest.raises(AttributeError):
        errors.NoSuchThing


@pytest.mark.parametrize("code", [3, 9999])
def test_errors_can_be_pickled(code: int) -> None:
    error = error_of(code, "Duplicate key exists")
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is type(error)
    assert (restored.code, restored.name, str(restored)) == (code, error.name, str(error))
