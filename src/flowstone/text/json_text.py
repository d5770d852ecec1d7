"""The column of JSON texts for Arrow: many MessagePack values as JSON, in one buffer.

`json_text_kernels` writes the texts; `json_plain` writes the values that the kernels do not support.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.limits import NESTING_MAX
from flowstone.text.json_limits import FULL, OK, ROOM
from flowstone.text.json_plain import json_value
from flowstone.text.json_text_kernels import write_column

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]

GROWTH = 2
"""Factor by which a full output grows."""


def grown(out: Bytes, used: int, more: int) -> Bytes:
    """A larger copy of `out`, whose first `used` bytes matter, with room for at least `more` bytes."""
    larger: Bytes = np.empty(GROWTH * out.size + more + ROOM, np.uint8)
    larger[:used] = out[:used]
    return larger


def json_column(buf: Bytes, starts: Integers, ends: Integers) -> tuple[Integers, Bytes]:
    """Return the JSON texts of the values at `starts` to `ends` of `buf` as (offsets, text).

    Text i is `text[offsets[i]:offsets[i + 1]]`, and empty if `starts[i]` is negative. Raise JsonError for an invalid
    value.
    """
    buf, starts, ends = (
        np.ascontiguousarray(buf),
        starts.astype(np.int64, copy=False),
        ends.astype(np.int64, copy=False),
    )
    size = int(np.sum(np.where(starts < 0, 0, ends - starts)))
    out: Bytes = np.empty(2 * size + 4 * starts.size + ROOM, np.uint8)
    offsets: Integers = np.zeros(starts.size + 1, np.int64)
    stack: Integers = np.empty(NESTING_MAX, np.int64)
    done = 0
    while True:
        done, status = write_column(buf, starts, ends, done, out, offsets, stack)
        if status == OK:
            return offsets, out[: offsets[-1]]
        used = int(offsets[done])
        if status == FULL:
            out = grown(out, used, 0)
            continue
        text = json_value(buf[starts[done] : ends[done]].tobytes()).encode()
        if used + len(text) > out.size:
            out = grown(out, used, len(text))
        out[used : used + len(text)] = np.frombuffer(text, np.uint8)
        done += 1
        offsets[done] = used + len(text)
