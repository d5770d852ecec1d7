"""MessagePack values to and from Python: the one codec for wire, files and commands.

Arrays are tuples, maps are dicts, extensions are the classes of `extensions.py`. A string that is not UTF-8 decodes to
surrogates and is written back unchanged. An extension with content that is invalid for its type decodes to
`Extension`, so one odd value does not hide its neighbours. Sizes that a peer claims are checked before memory is
allocated for them, and any malformed input raises MessagePackError. MessagePack's own timestamp (code -1), which
Tarantool never writes, decodes to `msgpack.Timestamp`.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import partial
from itertools import chain
from typing import Any

import msgpack
import numpy as np

from flowstone.errors import LocalProtocolError, RemoteProtocolError
from flowstone.iproto.extensions import (
    Datetime,
    ErrorRecord,
    ErrorStack,
    Extension,
    ExtensionType,
    Interval,
    decode_datetime,
    decode_decimal,
    decode_interval,
    decode_uuid,
    encode_datetime,
    encode_decimal,
    encode_interval,
)
from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.scan_kernels import skip_value


class MessagePackError(RemoteProtocolError):
    """The bytes are not the expected MessagePack."""


ERROR_DEPTH_MAX = 8
"""Depth of errors inside the details of errors. Each level is a call of the C decoder, with 40 KiB of stack."""

BUFFER_SIZE = 512
"""First size of the buffer for a packed value. The default of the library, 256 KiB, takes longer to allocate than most
values to pack."""

SMALL = 512
"""Size up to which claimed lengths are not checked: so short a value cannot claim a harmful amount of memory."""


def pack(value: Any) -> bytes:
    """Return the MessagePack of `value`. Raise LocalProtocolError if MessagePack or Tarantool cannot represent it.

    A standard datetime with a timezone is accepted; it decodes as `Datetime`.
    """
    try:
        data: bytes = msgpack.packb(value, default=_encode, unicode_errors="surrogateescape", buf_size=BUFFER_SIZE)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"cannot encode as MessagePack: {error}") from error
    return data


class SmallPacker:
    """Packs many small values like `pack`, several times as fast: it keeps its buffer. For one thread."""

    def __init__(self) -> None:
        self._packer = _plain_packer()

    def pack(self, value: Any) -> bytes:
        """Return the MessagePack of `value`, as `pack` does."""
        try:
            data: bytes = self._packer.pack(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return pack(value)  # which has extensions, and the error texts
        if len(data) > SMALL_BUFFER:
            self._packer = _plain_packer()
        return data


SMALL_BUFFER = 64 * 1024
"""Size of a value from which on a `SmallPacker` does not keep its buffer."""


def _plain_packer() -> msgpack.Packer:
    return msgpack.Packer(unicode_errors="surrogateescape", buf_size=4096)


def unpack(data: bytes | memoryview) -> Any:
    """Return the one value in `data`. Raise MessagePackError if `data` is anything else."""
    return _unpack(data, 0, NESTING_MAX)


def unpack_body(data: bytes | memoryview) -> dict[int, Any]:
    """Return the map in `data`, the body of a row or packet; no bytes are an empty map."""
    if not len(data):
        return {}
    body = _unpack(data, 0, NESTING_MAX + 1)  # the limit applies to the values in the map
    if type(body) is not dict:
        raise MessagePackError(f"body is {_name(body)}, not a map")
    for key in body:
        if type(key) is not int:
            raise MessagePackError(f"body key is {_name(key)}, not a number")
    return body


def _unpack(data: bytes | memoryview, error_depth: int, nesting_max: int) -> Any:
    if len(data) > SMALL:
        _check(data)
    try:
        value = msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=False,
            unicode_errors="surrogateescape",
            ext_hook=_EXTENSION_HOOKS[error_depth],
        )
    except msgpack.ExtraData as error:
        raise MessagePackError(f"{len(error.extra)} bytes follow the value") from None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessagePackError(f"malformed MessagePack: {str(error) or type(error).__name__}") from error
    if len(data) > nesting_max and _is_too_deep(value, nesting_max):
        raise MessagePackError(f"value is nested deeper than {NESTING_MAX} levels")
    return value


def _name(value: object) -> str:
    return {"tuple": "array", "NoneType": "nil"}.get(type(value).__name__, type(value).__name__)


def _encode(value: object) -> msgpack.ExtType:
    if isinstance(value, datetime.datetime):
        value = Datetime.from_datetime(value)
    encoder = _ENCODERS.get(type(value))
    if isinstance(value, int):
        raise OverflowError("integer is outside the range of -2^63 to 2^64 - 1")
    if encoder is None:
        raise TypeError(f"type {type(value).__name__} is not supported")
    code, data = encoder(value)
    # The constructor of ExtType rejects the negative codes that MessagePack reserves; they must survive too.
    return tuple.__new__(msgpack.ExtType, (code, data))


def error_map(stack: ErrorStack) -> dict[int, Any]:
    """Return the map of an error stack, in the order of real servers: the payload of extension 3 and of key ERROR."""
    return {0: [_record_map(record) for record in stack.errors]}


def _record_map(record: ErrorRecord) -> dict[int, Any]:
    entry: dict[int, Any] = {0: record.type, 2: record.line, 1: record.file}
    entry.update({3: record.message, 4: record.errno, 5: record.code})
    if record.fields:
        entry[6] = dict(record.fields)
    return entry


_RECORD_KEYS: dict[int, tuple[str, type]] = {
    0: ("type", str),
    1: ("file", str),
    2: ("line", int),
    3: ("message", str),
    4: ("errno", int),
    5: ("code", int),
    6: ("fields", dict),
}


def error_stack(body: object) -> ErrorStack:
    """Return the error stack of a map as in `error_map`. Keys of newer servers are ignored, as in real clients."""
    stack = body.get(0) if isinstance(body, dict) else None
    if not isinstance(stack, tuple):
        raise MessagePackError("error object has no error stack")
    return ErrorStack(tuple(_record(entry) for entry in stack))


def _record(entry: object) -> ErrorRecord:
    if not isinstance(entry, dict):
        raise MessagePackError(f"entry of an error stack is {_name(entry)}, not a map")
    found: dict[str, Any] = {}
    for key, (name, kind) in _RECORD_KEYS.items():
        if key in entry:
            if type(entry[key]) is not kind:
                raise MessagePackError(f"{name} of an error is {_name(entry[key])}, not {kind.__name__}")
            found[name] = entry[key]
    missing = [name for name in ("type", "message", "file") if name not in found]
    if missing:
        raise MessagePackError(f"entry of an error stack has no {missing[0]}")
    return ErrorRecord(**found)


def _decode(error_depth: int, code: int, data: bytes) -> Any:
    try:
        if code in _DECODERS:
            return _DECODERS[code](data)
        if code == ExtensionType.ERROR and error_depth < ERROR_DEPTH_MAX:
            return error_stack(_unpack(data, error_depth + 1, NESTING_MAX))
    except RemoteProtocolError:
        pass  # content is invalid for its type: keep the bytes, as in JSON
    return Extension(code, data)


_DECODERS: dict[int, Callable[[bytes], Any]] = {
    ExtensionType.DECIMAL: decode_decimal,
    ExtensionType.UUID: decode_uuid,
    ExtensionType.DATETIME: decode_datetime,
    ExtensionType.INTERVAL: decode_interval,
}
_ENCODERS: dict[type, Callable[[Any], tuple[int, bytes]]] = {
    Decimal: lambda value: (1, encode_decimal(value)),
    uuid.UUID: lambda value: (2, value.bytes),
    ErrorStack: lambda value: (3, pack(error_map(value))),
    Datetime: lambda value: (4, encode_datetime(value)),
    Interval: lambda value: (6, encode_interval(value)),
    Extension: lambda value: (value.code, value.data),
}
_EXTENSION_HOOKS = tuple(partial(_decode, depth) for depth in range(ERROR_DEPTH_MAX + 1))


def _check(data: bytes | memoryview) -> None:
    """Check that `data` holds everything that its lengths claim.

    The decoder allocates what the head of an array claims, so a short packet could claim gigabytes.
    """
    end = skip_value(np.frombuffer(data, np.uint8), 0, len(data))
    if end < 0:
        raise MessagePackError("malformed MessagePack: truncated, or an invalid type byte")
    if end < len(data):
        raise MessagePackError(f"{len(data) - end} bytes follow the value")


def _is_too_deep(value: object, nesting_max: int) -> bool:
    level = [value]
    for _ in range(nesting_max):
        level = [child for parent in level for child in _children(parent) if type(child) in (tuple, dict)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    return value if isinstance(value, tuple) else ()
