"""Tuples, keys and operations of many rows as YAML in flow style, with field names, written by kernels.

`flow_text_kernels` says which values the kernels leave to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowstone.iproto.limits import NESTING_MAX
from flowstone.text.flow_shapes import Shape
from flowstone.text.flow_text_kernels import write_texts
from flowstone.text.json_limits import OK, ROOM
from flowstone.text.json_text import Bytes, Integers, grown


def flow_texts(
    buf: Bytes, starts: Integers, ends: Integers, shape: Shape, names: Sequence[str] = (), bases: Integers | None = None
) -> list[str]:
    """Return the text of each row's array; "" if the kernel leaves it to the caller, or if `starts` is negative.

    `names` are written as they are: pass them with a colon for a MAP, and quoted for OPERATIONS. `bases` has the number
    of the first field for the operations of each row.
    """
    bases = np.zeros(starts.size, np.int64) if bases is None else bases
    encoded = [name.encode() for name in names]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    offsets[1:] = np.cumsum([len(name) for name in encoded])
    texts = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
    size = int(np.sum(ends - starts))
    out: Bytes = np.empty(2 * size + (int(offsets[-1]) + 8) * starts.size + 2 * ROOM, np.uint8)
    stack: Integers = np.empty(NESTING_MAX, np.int64)
    done = used = 0
    while True:
        done, used, status = write_texts(buf, starts, ends, bases, done, shape, offsets, texts, out, used, stack)
        if status == OK:
            return str(out[:used].data, "utf-8").split("\n")[:-1]
        out = grown(out, used, 0)
