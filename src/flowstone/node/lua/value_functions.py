"""What Lua may call besides the box: values of extensions, text forms, digests, clocks and randomness."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal, DecimalException, localcontext
from typing import Any, Final
from uuid import UUID

import crc32c
import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.extensions import (
    Datetime,
    decimal_text,
    decode_datetime,
    decode_decimal,
    decode_interval,
    decode_uuid,
    encode_datetime,
    encode_decimal,
)
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.scan_kernels import skip_value
from flowstone.node.lua.task import Answer, failure
from flowstone.outside import Outside
from flowstone.text.json_plain import json_value
from flowstone.text.yaml_rows import yaml_value
from flowstone.text.yaml_values import yaml_list

DECIMAL_DIGITS: Final = 38
RANDOM_SIZE_MAX: Final = 1024 * 1024

_PLAIN: Final = re.compile(r"[A-Za-z_][\w./-]*( [\w./-]+)*")
_WORDS: Final = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))
"""Texts that YAML does not read as strings unless they are quoted."""

_HASHES: Final = frozenset(("md5", "sha1", "sha224", "sha256", "sha384", "sha512"))
_OPERATIONS: Final[dict[bytes, Callable[[Decimal, Decimal], Decimal]]] = {
    b"add": lambda one, other: one + other,
    b"sub": lambda one, other: one - other,
    b"mul": lambda one, other: one * other,
    b"div": lambda one, other: one / other,
    b"mod": lambda one, other: one % other,
    b"pow": lambda one, other: one**other,
    b"neg": lambda one, other: -one,
    b"abs": lambda one, other: abs(one),
}


def value_functions(outside: Outside) -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in Lua."""
    checked: dict[str, Callable[..., Answer]] = {
        "extension_text": _extension_text,
        "decimal_of": lambda text: (True, encode_decimal(_decimal(text.decode()))),
        "decimal_operation": _decimal_operation,
        "decimal_compare": _decimal_compare,
        "random_uuid": lambda: (True, outside.random.uuid().bytes),
        "datetime_parts": _datetime_parts,
        "datetime_of": _datetime_of,
        "datetime_now": lambda: (True, encode_datetime(_moment(outside.clock.wall()))),
        "datetime_parse": _datetime_parse,
        "encode": _encode,
        "decode": _decode,
        "size_of_value": _size_of_value,
        "digest": lambda name, text: (True, hashlib.new(_hash(name), text, usedforsecurity=False).digest()),
        "hex_digest": lambda name, text: (
            True,
            hashlib.new(_hash(name), text, usedforsecurity=False).hexdigest().encode(),
        ),
        "base64": lambda text: (True, base64.b64encode(text)),
        "from_base64": lambda text: (True, base64.b64decode(text)),
        "crc32c": lambda text: (True, crc32c.crc32c(text) ^ 0xFFFF_FFFF),  # a real server leaves out the last step
        "random_bytes": lambda size: (True, outside.random.bytes(min(int(size), RANDOM_SIZE_MAX))),
        "utf8": _utf8,
    }
    return {name: _guarded(function) for name, function in checked.items()} | {
        "uuid_of": _uuid_of,
        "find": _find,
        "wall": outside.clock.wall,
        "monotonic": outside.clock.monotonic,
    }


def _guarded(function: Callable[..., Answer]) -> Callable[..., Answer]:
    def run(*arguments: Any) -> Answer:
        try:
            return function(*arguments)
        except FlowstoneError as error:
            return failure(errors.ProcLua(error.message))
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, OverflowError) as error:
            return failure(errors.ProcLua(str(error) or type(error).__name__))

    return run


def _find(text: bytes, part: bytes, start: int) -> int | None:
    at = text.find(part, start - 1)
    return at + 1 if at >= 0 else None


def _hash(name: bytes) -> str:
    text = name.decode()
    if text not in _HASHES:
        raise ValueError(f"unknown digest {text}")
    return text


def _utf8(what: bytes, raw: bytes) -> Answer:
    text = raw.decode("utf-8", "surrogateescape")
    if what == b"len":
        return True, len(text)
    changed = text.upper() if what == b"upper" else text.lower()
    return True, changed.encode("utf-8", "surrogateescape")


# --- extensions ---


def _extension_text(code: int, data: bytes) -> Answer:
    if code == 1:
        return True, decimal_text(decode_decimal(data)).encode()
    if code == 2:
        return True, str(decode_uuid(data)).encode()
    if code == 4:
        return True, str(decode_datetime(data)).encode()
    if code == 6:
        return True, str(decode_interval(data)).encode()
    return True, f"extension {code} of {len(data)} bytes".encode()


def _decimal(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except DecimalException:
        raise ValueError("incorrect value to convert to decimal as 1 argument") from None
    if not value.is_finite() or abs(value.adjusted()) >= DECIMAL_DIGITS:
        raise ValueError("incorrect value to convert to decimal as 1 argument")
    return value


def _decimal_operation(name: bytes, one: bytes, other: bytes) -> Answer:
    with localcontext(Context(prec=DECIMAL_DIGITS, rounding=ROUND_HALF_UP)):
        try:
            result = _OPERATIONS[name](decode_decimal(one), decode_decimal(other))
        except DecimalException:
            raise ValueError("decimal operation failed") from None
    if not result.is_finite() or abs(result.adjusted()) >= DECIMAL_DIGITS:
        raise ValueError("decimal operation failed")
    return True, encode_decimal(result)


def _decimal_compare(one: bytes, other: bytes) -> Answer:
    left, right = decode_decimal(one), decode_decimal(other)
    return True, (left > right) - (left < right)


def _uuid_of(text: bytes) -> bytes | None:
    try:
        return UUID(text.decode()).bytes if len(text) == 36 else None
    except ValueError:
        return None


def _moment(seconds: float) -> Datetime:
    whole = int(seconds // 1)
    return Datetime(whole, int((seconds - whole) * 1_000_000) * 1000)


def _datetime_parts(data: bytes) -> Answer:
    value = decode_datetime(data)
    moment = value.to_datetime()
    parts: dict[str, Any] = {name: getattr(moment, name) for name in ("year", "month", "day", "hour")}
    parts |= {"min": moment.minute, "sec": moment.second, "nsec": value.nsec, "tzoffset": value.tz_offset}
    parts |= {"wday": moment.isoweekday() % 7 + 1, "yday": moment.timetuple().tm_yday, "epoch": value.seconds}
    return True, pack(parts | {"timestamp": value.seconds + value.nsec / 1e9, "usec": value.nsec // 1000})


def _datetime_of(packed: bytes) -> Answer:
    parts = unpack(packed) or {}
    if "timestamp" in parts:
        moment = _moment(float(parts["timestamp"]))
        return True, encode_datetime(Datetime(moment.seconds, moment.nsec, int(parts.get("tzoffset", 0))))
    zone = datetime.timezone(datetime.timedelta(minutes=int(parts.get("tzoffset", 0))))
    given = [int(parts.get(name, least)) for name, least in (("year", 1970), ("month", 1), ("day", 1))]
    given += [int(parts.get(name, 0)) for name in ("hour", "min", "sec")]
    made = Datetime.from_datetime(datetime.datetime(*given, tzinfo=zone))  # type: ignore[misc, arg-type]
    return True, encode_datetime(Datetime(made.seconds, int(parts.get("nsec", 0)), made.tz_offset))


def _datetime_parse(text: bytes) -> Answer:
    moment = datetime.datetime.fromisoformat(text.decode())
    return True, encode_datetime(
        Datetime.from_datetime(moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC))
    )


# --- text forms ---


def _encode(form: bytes, raw: bytes) -> Answer:
    if form == b"json":
        return True, json_value(raw).encode("utf-8", "surrogateescape")
    if form == b"flow":
        return True, _flow(unpack(raw)).encode("utf-8", "surrogateescape")
    value = unpack(raw)
    if form == b"console":
        lines = "".join(f"- {item}\n" for item in map(_console_item, value))
        return True, f"---\n{lines}...\n".encode("utf-8", "surrogateescape")
    return True, f"---\n{yaml_list([value])[2:]}...\n".encode("utf-8", "surrogateescape")


def _console_item(value: Any) -> str:
    """Return a value as a console shows it, below `- `: a map with an entry per line."""
    if isinstance(value, dict) and value:
        return "\n  ".join(f"{_plain(key)}: {_plain(inner)}" for key, inner in value.items())
    return _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _flow(value)


def _flow(value: Any) -> str:
    """Return the text of a tuple, as `tostring` shows it: YAML in flow style, with single quotes."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str) and value.isprintable():
        doubled = value.replace("'", "''")
        return f"'{doubled}'"
    return yaml_value(value)


def _decode(form: bytes, text: bytes) -> Answer:
    if form == b"integer":
        return True, pack(int(text.decode().rstrip("UL"), 0))
    if form != b"json":
        raise ValueError("Flowstone does not decode YAML")
    try:
        value = json.loads(text.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise ValueError(f"Expected value but found invalid token: {error}") from None
    return True, pack(value)


def _size_of_value(text: bytes, at: int) -> Answer:
    """Return the size of the MessagePack value at this position, from 1; raise ValueError if it is not valid."""
    end = skip_value(np.frombuffer(text, np.uint8), at - 1, len(text)) if 0 < at <= len(text) else -1
    if end < 0:
        raise ValueError("msgpack.decode: invalid MsgPack")
    unpack(text[at - 1 : end])
    return True, end - at + 1
