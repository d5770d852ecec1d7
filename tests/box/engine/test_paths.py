"""JSON paths: their targets, and the position of errors."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.engine.paths import EVERY, PathError, Step, find, format_path, parse_path


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("", ()),
        ("name", ("name",)),
        (".name", ("name",)),
        ("a.b_1._c", ("a", "b_1", "_c")),
        ("[1][20]", (0, 19)),
        ("['a b'][\"c'd\"]", ("a b", "c'd")),
        ("[2].b[*].c", (1, "b", EVERY, "c")),
        ("имя.名前", ("имя", "名前")),
        ("[*]", (EVERY,)),
    ],
)
def test_path_is_parsed_into_steps(path: str, steps: tuple[Step, ...]) -> None:
    assert parse_path(path) == steps


@pytest.mark.parametrize(
    ("path", "position"),
    [
        ("[", 1),
        ("[1", 3),
        ("[0]", 2),
        ("[a]", 2),
        ("[]", 2),
        ("['a", 4),
        ("['a'", 5),
        ("['']", 3),
        ("a.", 3),
        ("a..b", 3),
        ("a.1", 3),
        ("1a", 1),
        ("a b", 2),
        ("[1]a", 4),
        ("a[*", 4),
        ("-", 1),
    ],
)
def test_invalid_path_has_the_position_of_the_error(path: str, position: int) -> None:
    with pytest.raises(PathError, match=f"invalid character at position {position}$") as error:
        parse_path(path)
    assert error.value.position == position


@given(st.lists(st.one_of(st.integers(0, 10**6), st.text("ab_ .[é", min_size=1), st.just(EVERY))))
def test_path_in_a_message_parses_to_the_same_steps(steps: list[Step]) -> None:
    assert parse_path(format_path(steps)) == tuple(steps)


@given(st.text("[]'\".*a1_é ", max_size=12))
def test_any_text_yields_a_path_or_an_error(text: str) -> None:
    with contextlib.suppress(PathError):
        assert parse_path(format_path(parse_path(text))) == parse_path(text)


def test_absent_path_yields_none() -> None:
    document = {"a": (1, {"b": 2})}
    assert find(document, ("a", 1, "b")) == 2
    assert find(document, ()) == document
    for steps in (("a", 2), ("b",), ("a", "b"), (0,), ("a", 0, "x")):
        assert find(document, steps) is None


@pytest.mark.real
def test_path_errors_are_at_the_position_reported_by_the_real_server(tarantool: ModuleType, tmp_path: Path) -> None:
    paths = "f[|g[1|g[0]|g[a]|g[]|f['a|f['a'|f['']|f.a.|f.a..b|f.a.1|f.a b|g[1]a|g[*|f-|[|[a|.|f.é.-|f.aé b".split("|")
    script = (
        "box.cfg{log_level=1, wal_mode='none'} local s = box.schema.space.create('t', {format={{'id'}, {'f'}, {'g'}}})"
        " s:create_index('pk') s:insert{1, {a={b=1}, ['é']={b=1}, ['aé']={b=1}}, {{b=1}, 2}}"
        f" for _, path in ipairs{{{', '.join(f'[=[{path}]=]' for path in paths)}}} do"
        " print(select(2, pcall(s.update, s, 1, {{'=', path, 1}}))) end os.exit(0)"
    )
    answers = tarantool.run(script, tmp_path).splitlines()
    for path, answer in zip(paths, answers, strict=True):
        with pytest.raises(PathError) as error:
            parse_path(path)
        assert answer == f"Field '{path}' UPDATE error: invalid JSON in position {error.value.position}"
