"""Quorum formulas: accepted and rejected ones, error messages, and arithmetic compared with Python's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import errors
from flowstone.replication.membership.quorum import DEFAULT, DEPTH_MAX, Quorum

EVERY_N = range(1, 32)


def refusal(value: int | str) -> str:
    with pytest.raises(errors.Cfg) as caught:
        Quorum(value)
    return caught.value.message.removeprefix("Incorrect value for option 'replication_synchro_quorum': ")


def test_default_quorum_is_a_majority() -> None:
    assert [Quorum(DEFAULT).of(members) for members in EVERY_N] == [members // 2 + 1 for members in EVERY_N]


def test_empty_set_counts_as_one_member() -> None:
    assert Quorum("N").of(0) == 1


@pytest.mark.parametrize("value", [2, "2", " 2 ", "0x2", "2.9"])
def test_numeric_quorum_is_independent_of_the_size(value: int | str) -> None:
    assert {Quorum(value).of(members) for members in (0, 1, 31)} == {2}


@pytest.mark.parametrize(
    ("formula", "of_four"),
    [
        ("N/2+1", 3),
        ("N", 4),
        ("math.ceil(N / 2 + 0.1)", 3),
        ("math.floor(N * 2 / 3) + 1", 3),
        ("math.max(2, N - 1)", 3),
        ("math.min(N, 3)", 3),
        ("math.max(1, 2, N, 3)", 4),
        ("math.sqrt(N)", 2),
        ("math.fmod(N, 5) + 1", 5),
        ("math.abs(-N)", 4),
        ("N % 3 + 1", 2),
        ("2 ^ (N % 3)", 2),
        ("-N + 2 * N", 4),
        ("N > 3 and 3 or 1", 3),
        ("N >= 2 and N <= 4 and 2 or 1", 2),
        ("N == 4 and 1 or 2", 1),
        ("N ~= 4 and 1 or 2", 2),
        ("not (N < 5) and 1 or 2", 2),
        ("nil or 3", 3),
        ("(N > 2) == true and 2 or 1", 2),
        ("((N))", 4),
        (".5e1", 5),
        ("0 and 2 or 1", 2),  # 0 is true in Lua
        ("10 - 4 - 3", 3),  # left-associative
        ("2 ^ 2 ^ 0 + 1", 3),  # right-associative
        ("-2 ^ 2 + 6", 2),  # ^ binds more strongly than the sign
        ("2 ^ -1 + 1", 1),
        ("N) + (1 - N) + (1", 2),  # real servers put it between parentheses, too
    ],
)
def test_lua_formulas_are_evaluated(formula: str, of_four: int) -> None:
    assert Quorum(formula).of(4) == of_four


def test_error_messages_equal_those_of_real_servers() -> None:
    number = "the value must be greater than zero and less than maximal number of replicas"
    assert {refusal(value) for value in (0, -1, 32, 4294967297, "0")} == {number}
    bounds = "the formula is evaluated to the quorum {} for replica number {}, which is out of range [1;31]"
    assert refusal("N+1") == bounds.format(32, 31)
    assert refusal("N-1") == bounds.format(0, 1)
    assert refusal("4294967296 + 1") == bounds.format(4294967297, 1)
    assert refusal("N + 4294967296") == bounds.format(4294967297, 1)
    for nothing in ("aaa", "N > 1", "nil", "math.floor", "math.huge"):
        assert refusal(nothing) == '[string "local expr, N = ......"]:7: Expression should return a number'


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        ("", "unexpected symbol near ')'"),
        ("N +", "unexpected symbol near ')'"),
        ("(N", "')' expected near '<eof>'"),
        ("N N", "')' expected near 'N'"),
        ("N; os.exit()", "unexpected symbol near ';'"),
        ("'2'", "unexpected symbol near '''"),
        ("3N", "malformed number near '3N'"),
        ("if", "unexpected symbol near 'if'"),
        ("math.max(1,)", "unexpected symbol near ')'"),
        ("math.max(1 2)", "',' expected near '2'"),
        ("math.3", "'.' expected near '.3'"),
        ("(" * (DEPTH_MAX + 1), "chunk has too many syntax levels"),
        ("-" * 10_000 + "N", "chunk has too many characters"),
    ],
)
def test_syntax_error_is_reported_with_its_position(formula: str, reason: str) -> None:
    assert f"Failed to load {formula[:80]}:{reason}" in refusal(formula)


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        ("N + aaa", "attempt to perform arithmetic on a nil value"),
        ("-true", "attempt to perform arithmetic on a boolean value"),
        ("N < nil and 1 or 2", "attempt to compare a nil value"),
        ("os.exit()", "attempt to index global 'os' (a nil value)"),
        ("print(1)", "attempt to call global 'print' (a nil value)"),
        ("math.pow(2, 1)", "attempt to call field 'pow' (a nil value)"),
        ("math.floor()", "bad argument #1 to 'floor' (number expected, got no value)"),
        ("math.max(1, nil)", "bad argument #2 to 'max' (number expected, got nil)"),
        ("math.random(3)", "math.random is not available"),
    ],
)
def test_run_time_error_is_rejected(formula: str, reason: str) -> None:
    assert reason in refusal(formula)


@pytest.mark.parametrize("formula", ["1 / 0", "-1 / 0", "0 / 0", "10 ^ 1000", "(-1) ^ 0.5", "math.sqrt(-1)", "1 % 0"])
def test_invalid_quorum_numbers_are_out_of_range(formula: str) -> None:
    assert "out of range [1;31]" in refusal(formula)


def test_random_source_is_an_argument() -> None:
    assert Quorum("math.random(2, 5)", random=lambda: 0.99).of(3) == 5
    assert Quorum("math.random(4)", random=lambda: 0.0).of(3) == 1
    assert Quorum("math.random() + 1", random=lambda: 0.5).of(3) == 1
    with pytest.raises(errors.Cfg, match="interval is empty"):
        Quorum("math.random(0)", random=lambda: 0.0)


EXPRESSIONS = st.recursive(
    st.one_of(st.just("N"), st.integers(0, 40).map(str), st.just("0.5")),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/%"), inner).map(" ".join).map("({})".format),
        st.tuples(st.sampled_from(["math.floor", "math.ceil", "abs"]), inner).map(
            lambda pair: f"{'math.abs' if pair[0] == 'abs' else pair[0]}({pair[1]})"
        ),
        inner.map("-({})".format),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_arithmetic_agrees_with_python(expression: str) -> None:
    """Compare only results that Python can compute: division by zero is a number in Lua."""
    names = {"math": math, "floor": math.floor, "ceil": math.ceil}
    text = expression.replace("math.abs", "math.fabs")
    try:
        expected = [math.floor(eval(text, {**names, "N": float(members)})) for members in EVERY_N]
    except (ArithmeticError, ValueError):
        return
    if all(1 <= quorum <= 31 for quorum in expected):
        assert [Quorum(expression).of(members) for members in EVERY_N] == expected
    else:
        members, quorum = next((n, q) for n, q in enumerate(expected, 1) if not 1 <= q <= 31)
        assert f"quorum {quorum} for replica number {members}," in refusal(f"({expression})")
