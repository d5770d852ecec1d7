"""`replication_synchro_quorum`: a number, or a formula over N, the number of registered members.

The formula is a Lua expression, as in Tarantool: `N / 2 + 1`, `math.max(2, N - 1)`, `N > 3 and 3 or 1`. It is parsed
into closures and has access to N and eight functions of `math` only. Invalid values are rejected with the errors of
real servers (docs/spec/synchro.md#quorum): the result, rounded down, must be 1..31 for every N in 1..31.
Random numbers, for `math.random`, are passed in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final, NoReturn

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import VCLOCK_MAX

OPTION: Final = "replication_synchro_quorum"
DEFAULT: Final = "N / 2 + 1"

QUORUM_MAX: Final = VCLOCK_MAX - 1
DEPTH_MAX: Final = 100
"""Nesting depth of a formula. Lua itself stops at 200."""

LENGTH_MAX: Final = 4096
"""Characters of a formula, which bounds the work of the parser."""

_CHUNK: Final = '[string "local expr, N = ......"]'
_NUMBER: Final = r"0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_TOKEN: Final = re.compile(rf"\s*(?:({_NUMBER})|([A-Za-z_]\w*)|(==|~=|<=|>=|[-+*/^%()<>.,])|(\Z)|(.))", re.DOTALL)
_PLAIN_NUMBER: Final = re.compile(rf"\s*-?(?:{_NUMBER})\s*\Z")

Value = float | bool | None
Random = Callable[[], float]
"""Returns a new random number in [0, 1) on each call."""

Node = Callable[[int], Value]

# Precedence of operators, to the left and to the right: only `^` is right-associative.
_BINDING: Final[dict[str, tuple[int, int]]] = {
    "or": (1, 1),
    "and": (2, 2),
    **dict.fromkeys(("<", ">", "<=", ">=", "~=", "=="), (3, 3)),
    **dict.fromkeys(("+", "-"), (4, 4)),
    **dict.fromkeys(("*", "/", "%"), (5, 5)),
    "^": (8, 7),
}
_UNARY: Final = 6

_WORDS: Final = frozenset(
    "and break do else elseif end false for function if in local nil not or repeat return then true until while".split()
)


class FormulaError(FlowstoneError):
    """The formula is invalid: Lua would fail to load or to evaluate it."""


class Quorum:
    """A valid value of the option."""

    def __init__(self, value: int | str, *, random: Random | None = None) -> None:
        """Check `value`; raise ER_CFG if it is invalid. Formulas with `math.random` require `random`."""
        self.value: Final = value
        self._formula: Node | None = None
        self._number = 0
        if isinstance(value, str) and not _PLAIN_NUMBER.match(value):
            self._formula = _load(value, random)
            for members in range(1, VCLOCK_MAX):
                self._evaluate(self._formula, members)
        else:
            self._number = _whole(value if isinstance(value, int) else _number(value))
            if not 0 < self._number <= QUORUM_MAX:
                _refuse("the value must be greater than zero and less than maximal number of replicas")

    def of(self, members: int) -> int:
        """Return the quorum of a replica set with this number of registered `members`; 0 counts as 1."""
        if self._formula is None:
            return self._number
        return self._evaluate(self._formula, max(1, members))

    def _evaluate(self, formula: Node, members: int) -> int:
        try:
            value = formula(members)
        except FormulaError as error:
            _refuse(error.message)
        if value is None or isinstance(value, bool):
            _refuse(f"{_CHUNK}:7: Expression should return a number")
        quorum = _whole(value)
        if not 0 < quorum <= QUORUM_MAX:
            _refuse(
                f"the formula is evaluated to the quorum {quorum} for replica number {members},"
                f" which is out of range [1;{QUORUM_MAX}]"
            )
        return quorum


def _refuse(what: str) -> NoReturn:
    raise errors.Cfg(f"Incorrect value for option '{OPTION}': {what}")


def _number(text: str) -> float:
    text = text.strip()
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    return sign * float(int(digits, 16) if digits[:2] in ("0x", "0X") else float(digits))


def _whole(value: float) -> int:
    """Return `value` rounded down. Numbers that do not fit an int64 become out-of-range values, as in C."""
    if math.isnan(value):
        return -(2**63)
    return math.floor(value) if abs(value) < 2.0**63 else int(math.copysign(2.0**63, value))


def _load(text: str, random: Random | None) -> Node:
    try:
        if len(text) > LENGTH_MAX:
            raise FormulaError(f"chunk has too many characters (limit is {LENGTH_MAX})")
        return _Parser(f"({text})", random).whole()
    except FormulaError as error:
        _refuse(f"{_CHUNK}:3: Failed to load {text[:80]}:{error.message}")


# --- grammar ----------------------------------------------------------------------------------------------------------


class _Parser:
    """A precedence-climbing parser of one expression."""

    def __init__(self, text: str, random: Random | None) -> None:
        self._text = text
        self._random = random
        self._at = 0
        self._depth = 0
        self._kind, self._token = "", ""
        self._next()

    def _next(self) -> None:
        match = _TOKEN.match(self._text, self._at)
        assert match is not None  # the last two alternatives match anything
        self._at = match.end()
        for kind, token in zip(("number", "name", "sign", "end", "unknown"), match.groups(), strict=True):
            if token is not None:
                self._kind, self._token = kind, token
        if self._kind == "unknown":
            raise FormulaError(f"unexpected symbol near '{self._token}'")
        if self._kind == "number" and self._text[self._at : self._at + 1].isalnum():
            raise FormulaError(f"malformed number near '{self._token}{self._text[self._at]}'")

    def _fail(self) -> NoReturn:
        raise FormulaError(f"unexpected symbol near '{self._token or '<eof>'}'")

    def _take(self, sign: str) -> None:
        if self._token != sign or self._kind == "end":
            raise FormulaError(f"'{sign}' expected near '{self._token or '<eof>'}'")
        self._next()

    def whole(self) -> Node:
        node = self._expression(0)
        if self._kind != "end":
            raise FormulaError(f"'<eof>' expected near '{self._token}'")
        return node

    def _expression(self, limit: int) -> Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise FormulaError(f"chunk has too many syntax levels (limit is {DEPTH_MAX})")
        if self._token in ("-", "not"):
            operator = self._token
            self._next()
            node = _negate(self._expression(_UNARY)) if operator == "-" else _not(self._expression(_UNARY))
        else:
            node = self._primary()
        while (binding := _BINDING.get(self._token)) is not None and binding[0] > limit:
            operator = self._token
            self._next()
            node = _binary(operator, node, self._expression(binding[1]))
        self._depth -= 1
        return node

    def _primary(self) -> Node:
        kind, token = self._kind, self._token
        if kind == "number":
            self._next()
            number = _number(token)
            return lambda members: number
        if token == "(":
            self._next()
            node = self._expression(0)
            self._take(")")
            return node
        if kind != "name":
            self._fail()
        self._next()
        if token == "N":
            return float
        if token in ("true", "false", "nil"):
            constant = {"true": True, "false": False, "nil": None}[token]
            return lambda members: constant
        if token in _WORDS:
            raise FormulaError(f"unexpected symbol near '{token}'")
        return self._call() if token == "math" else self._unknown(token)

    def _unknown(self, name: str) -> Node:
        """Parse an unknown global name: nil, as in Lua, which is an error only if it is called or indexed."""
        if self._token in ("(", "."):
            what = "call" if self._token == "(" else "index"
            raise FormulaError(f"attempt to {what} global '{name}' (a nil value)")
        return lambda members: None

    def _call(self) -> Node:
        self._take(".")
        name = self._token
        if self._kind != "name":
            self._fail()
        self._next()
        if self._token != "(":
            return lambda members: None  # a function or nil: not a number in either case
        self._take("(")
        arguments: list[Node] = []
        while self._token != ")" or self._kind != "sign":
            if arguments:
                self._take(",")
            arguments.append(self._expression(0))
        self._next()
        if name == "random":
            return _chance(arguments, self._random)
        function = _FUNCTIONS.get(name)
        if function is None:
            return _raising(f"attempt to call field '{name}' (a nil value)")
        return _applied(name, function, arguments)


# --- evaluation -------------------------------------------------------------------------------------------------------


def _raising(what: str) -> Node:
    def node(members: int) -> Value:
        raise FormulaError(what)

    return node


def _operand(value: Value, what: str) -> float:
    if value is None or isinstance(value, bool):
        kind = "nil" if value is None else "boolean"
        raise FormulaError(f"attempt to {what} a {kind} value")
    return value


def _is_true(value: Value) -> bool:
    """Return the truth value as in Lua: only nil and false are false, 0 is true."""
    return value is not None and value is not False


def _negate(inner: Node) -> Node:
    return lambda members: -_operand(inner(members), "perform arithmetic on")


def _not(inner: Node) -> Node:
    return lambda members: not _is_true(inner(members))


def _binary(operator: str, left: Node, right: Node) -> Node:
    if operator == "and":
        return lambda members: right(members) if _is_true(value := left(members)) else value
    if operator == "or":
        return lambda members: value if _is_true(value := left(members)) else right(members)
    if operator in ("==", "~="):
        return lambda members: _is_same(left(members), right(members)) == (operator == "==")
    if operator in _COMPARISONS:
        compare = _COMPARISONS[operator]
        return lambda members: compare(_operand(left(members), "compare"), _operand(right(members), "compare"))
    calculate, what = _ARITHMETIC[operator], "perform arithmetic on"
    return lambda members: calculate(_operand(left(members), what), _operand(right(members), what))


def _is_same(left: Value, right: Value) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if not a or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def _modulo(a: float, b: float) -> float:
    return a % b if b and math.isfinite(a) else math.nan


def _power(a: float, b: float) -> float:
    try:
        return math.pow(a, b)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def _round(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda value: float(function(value)) if math.isfinite(value) else value


_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}
_ARITHMETIC: Final[dict[str, Callable[[float, float], float]]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "%": _modulo,
    "^": _power,
}
# Functions with the number of arguments that they require; only `min` and `max` use further ones.
_FUNCTIONS: Final[dict[str, tuple[int, Callable[..., float]]]] = {
    "ceil": (1, _round(math.ceil)),
    "floor": (1, _round(math.floor)),
    "abs": (1, abs),
    "min": (1, lambda *values: min(values)),
    "max": (1, lambda *values: max(values)),
    "sqrt": (1, lambda value: math.sqrt(value) if value >= 0 else math.nan),
    "fmod": (2, lambda a, b: math.fmod(a, b) if b and math.isfinite(a) else math.nan),
}


def _applied(name: str, function: tuple[int, Callable[..., float]], arguments: list[Node]) -> Node:
    count, compute = function

    def node(members: int) -> Value:
        values = [argument(members) for argument in arguments]
        for number in range(max(count, len(values) if name in ("min", "max") else 0)):
            _check_argument(name, number, values)
        return compute(*(values if name in ("min", "max") else values[:count]))

    return node


def _check_argument(name: str, number: int, values: list[Value]) -> None:
    value = values[number] if number < len(values) else None
    if value is None or isinstance(value, bool):
        kind = "no value" if number >= len(values) else "nil" if value is None else "boolean"
        raise FormulaError(f"bad argument #{number + 1} to '{name}' (number expected, got {kind})")


def _chance(arguments: list[Node], random: Random | None) -> Node:
    """Return the node of `math.random()`: [0, 1), `math.random(m)`: 1..m, or `math.random(m, n)`: m..n."""
    if random is None:
        return _raising("math.random is not available")

    def node(members: int) -> Value:
        values = [argument(members) for argument in arguments]
        for number in range(min(2, len(values))):
            _check_argument("random", number, values)
        if not values:
            return random()
        bounds = [math.floor(float(value or 0)) for value in values[:2]]
        low, high = (1, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        if low > high:
            raise FormulaError(f"bad argument #{len(bounds)} to 'random' (interval is empty)")
        return float(low + math.floor(random() * (high - low + 1)))

    return node
