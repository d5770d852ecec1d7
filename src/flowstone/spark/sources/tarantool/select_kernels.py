"""Compiled: the scan of an answer to SELECT for the tuples in it."""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.constants import Key
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import read_array, read_map, read_uint, value_end
    from flowstone.native.words import source


def tuple_spans(buf: Bytes, edges: Cells) -> int:
    """Find the tuples in the body of an answer; `edges` receives the offset of each and the end. Return their number.

    Returns -1 if the body is no answer with data, and -2 - n if `edges` has no room for the n tuples.
    """
    data, end, room = source(buf), buf.shape[0], edges.shape[0]
    with cython.nogil:
        pairs, at = read_map(data, 0, end)
        for _ in range(pairs):
            key, at = read_uint(data, at, end)
            if at < 0:
                return -1
            if key != Key.DATA:
                at = value_end(data, at, end)
                if at < 0:
                    return -1
                continue
            count, at = read_array(data, at, end)
            if count < 0:
                return -1
            if count >= room:
                return -2 - count
            for number in range(count):
                edges[number] = at
                at = value_end(data, at, end)
                if at < 0:
                    return -1
            edges[count] = at
            return count
    return -1
