"""MessagePack values as JSON text in plain Python: the model for the kernels (`json_text.py`, `json_extension.py`), and
values without a kernel.

`json_text` states the rules; its kernels write the same text for all values that they support, and tests compare the
two. Only this module writes intervals, errors (as objects), containers as map keys and years of more than four digits.
An extension of an unknown type, or with content that is invalid for its type, keeps its bytes.
"""

from __future__ import annotations

import json
import re
import struct
from base64 import b64encode
from collections.abc import Callable

import msgpack

from flowstone.errors import RemoteProtocolError
from flowstone.iproto.extensions import (
    Datetime,
    ExtensionError,
    ExtensionType,
    decimal_text,
    decode_datetime,
    decode_decimal,
    decode_interval,
    decode_uuid,
)
from flowstone.iproto.limits import NESTING_MAX


class JsonError(RemoteProtocolError):
    """The bytes are not one whole MessagePack value, or nest deeper than we go."""


_SURROGATE = re.compile("[\udc80-\udcff]")
_FIXED = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"} | {
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"
}  # fmt: skip
_WIDTH = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4} | {
    0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4
}  # fmt: skip
NANOSECONDS = 1_000_000_000
_NAMES = {0xC0: "null", 0xC2: "false", 0xC3: "true"}


def json_value(data: bytes) -> str:
    """The JSON text of the one value that `data` holds."""
    text, at = _value(data, 0, 0)
    if at != len(data):
        raise JsonError(f"{len(data) - at} bytes follow the value")
    return text


def json_pairs(data: bytes) -> list[tuple[str, str]]:
    """The texts of key and value of each pair of the one map that `data` holds."""
    marker = _take(data, 0, 1)[0]
    if not (0x80 <= marker < 0x90 or marker in (0xDE, 0xDF)):
        raise JsonError(f"byte 0x{marker:02x} does not start a map")
    count, at = _length(data, 1, marker)
    pairs = []
    for _ in range(count):
        key, at = _value(data, at, 0)
        value, at = _value(data, at, 0)
        pairs.append((key, value))
    if at != len(data):
        raise JsonError(f"{len(data) - at} bytes follow the map")
    return pairs


def json_string(data: bytes) -> str:
    """A JSON string of UTF-8 bytes; each byte that is none becomes \\udcXX."""
    text = json.dumps(data.decode("utf-8", "surrogateescape"), ensure_ascii=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _take(data: bytes, at: int, count: int) -> bytes:
    if at + count > len(data):
        raise JsonError("a value is cut off")
    return data[at : at + count]


def _length(data: bytes, at: int, marker: int) -> tuple[int, int]:
    """Return the length or count that follows a marker, and the end offset of it."""
    if marker < 0xA0:
        return marker & 0x0F, at
    if marker < 0xC0:
        return marker & 0x1F, at
    if 0xD4 <= marker <= 0xD8:
        return 1 << (marker - 0xD4), at
    width = _WIDTH[marker]
    return int.from_bytes(_take(data, at, width), "big"), at + width


def _value(data: bytes, at: int, depth: int) -> tuple[str, int]:
    """Return the text of the value at `at` and the end offset of the value. Recurses once per level of nesting."""
    marker = _take(data, at, 1)[0]
    at += 1
    if not (0x80 <= marker < 0xA0 or 0xDC <= marker < 0xE0):
        return _scalar(data, at, marker)
    if depth >= NESTING_MAX:
        raise JsonError(f"arrays and maps nest deeper than {NESTING_MAX}")
    count, at = _length(data, at, marker)
    parts = []
    if 0x90 <= marker < 0xA0 or marker in (0xDC, 0xDD):
        for _ in range(count):
            text, at = _value(data, at, depth + 1)
            parts.append(text)
        return f"[{','.join(parts)}]", at
    for _ in range(count):
        key, at = _value(data, at, depth + 1)
        text, at = _value(data, at, depth + 1)
        parts.append(f"{json_key(key)}:{text}")
    return "{" + ",".join(parts) + "}", at


def json_key(text: str) -> str:
    """Return the JSON key for a map key with this text: a string unchanged, any other text quoted."""
    return text if text[0] == '"' else json.dumps(text, ensure_ascii=False)


def _scalar(data: bytes, at: int, marker: int) -> tuple[str, int]:
    if marker < 0x80 or marker >= 0xE0:
        return str(marker if marker < 0x80 else marker - 256), at
    if marker in _NAMES:
        return _NAMES[marker], at
    if marker in _FIXED:
        layout = _FIXED[marker]
        number = struct.unpack(layout, _take(data, at, struct.calcsize(layout)))[0]
        text = json_double(number) if isinstance(number, float) else str(number)
        return text, at + struct.calcsize(layout)
    if marker == 0xC1:
        raise JsonError("byte 0xc1 does not start a value")
    count, at = _length(data, at, marker)
    if 0xC7 <= marker <= 0xC9 or 0xD4 <= marker <= 0xD8:
        payload = _take(data, at, count + 1)
        return _extension(payload[0], payload[1:]), at + 1 + count
    payload = _take(data, at, count)
    if 0xC4 <= marker <= 0xC6:
        return f'"{b64encode(payload).decode()}"', at + count
    return json_string(payload), at + count


def json_double(value: float) -> str:
    """The shortest text that reads back to the same double."""
    text = repr(float(value))
    return {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}.get(text, text)


def _extension(code: int, payload: bytes) -> str:
    code = code - 256 if code >= 128 else code
    try:
        if code in _EXTENSIONS:
            return _EXTENSIONS[code](payload)
    except (ExtensionError, ValueError, LookupError, TypeError, AttributeError, msgpack.UnpackException):
        pass  # content that its type does not allow: kept as bytes
    return f'{{"ext":{code},"data":"{b64encode(payload).decode()}"}}'


def _decimal(payload: bytes) -> str:
    return f'"{decimal_text(decode_decimal(payload))}"'


def _uuid(payload: bytes) -> str:
    return f'"{decode_uuid(payload)}"'


def _datetime(payload: bytes) -> str:
    """Format as Tarantool does: the fraction in groups of three digits, the offset without a colon."""
    value = decode_datetime(payload)
    carry, nanoseconds = divmod(value.nsec, NANOSECONDS)
    text = str(Datetime(value.seconds + carry, 0, value.tz_offset))
    date, zone = (text[:-6], text[-6:-3] + text[-2:]) if value.tz_offset else (text[:-1], "Z")
    digits = f"{nanoseconds:09d}"
    while digits.endswith("000"):
        digits = digits[:-3]
    return f'"{date}{"." if digits else ""}{digits}{zone}"'


def _interval(payload: bytes) -> str:
    return f'"{decode_interval(payload)}"'


def _error(payload: bytes) -> str:
    """The newest error of the stack: message, type and code (`docs/spec/iproto.md#error-bodies`)."""
    error = msgpack.unpackb(payload, raw=True, strict_map_key=False)[0][0]
    if type(error[5]) is not int:
        raise ValueError("not an error")
    return f'{{"message":{json_string(error[3])},"type":{json_string(error[0])},"code":{error[5]}}}'


_EXTENSIONS: dict[int, Callable[[bytes], str]] = {
    ExtensionType.DECIMAL: _decimal,
    ExtensionType.UUID: _uuid,
    ExtensionType.ERROR: _error,
    ExtensionType.DATETIME: _datetime,
    ExtensionType.INTERVAL: _interval,
}
