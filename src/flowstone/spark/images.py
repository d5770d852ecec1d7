"""Rows as the tuples that they changed: what an archive with images says about each, in place of operations.

Pure: a slab in, a slab out whose rows are images, each a tuple as if it had been replaced. So everything that decodes
tuples decodes images. Rows that changed nothing (the DELETE of a key that was not there) have none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.scan import Cells
from flowstone.xlog.columns import text_array
from flowstone.xlog.reader import Slab

Images = Literal["ops", "post", "full"]
"""ops: operations as they are. post: the tuple after the change, of a DELETE the one before. full: both."""

CHANGE_TYPES: Final = text_array(["insert", "update_preimage", "update_postimage", "delete"])
_INSERT, _PREIMAGE, _POSTIMAGE, _DELETE = range(4)


def with_images(slab: Slab, rows: Cells, *, preimages: bool) -> tuple[Slab, Cells, pa.Array]:
    """The images of the given rows, changes of user spaces, as a slab; the place in `rows` of each, and what it is.

    Of a row that replaced a tuple, the old one comes first, if `preimages` are wanted at all.
    """
    images: Cells = np.empty((scan.IMAGE_LINES, len(rows)), np.int64)
    scan.scan_images(slab.buf, slab.cells, rows, images)
    old_at, old_end, new_at, new_end = images
    kinds = slab.cells[scan.TYPE, rows]
    # INSERT and REPLACE have the new tuple themselves.
    has_tuple = (kinds == RequestType.INSERT) | (kinds == RequestType.REPLACE)
    new_at = np.where(has_tuple, slab.cells[scan.TUPLE_AT, rows], new_at)
    new_end = np.where(has_tuple, slab.cells[scan.TUPLE_END, rows], new_end)
    has_old, has_new = old_at >= 0, new_at >= 0
    before = np.flatnonzero(has_old & (~has_new | preimages))
    after = np.flatnonzero(has_new)
    places = np.concatenate([before, after])
    change = np.concatenate(
        [np.where(has_new[before], _PREIMAGE, _DELETE), np.where(has_old[after], _POSTIMAGE, _INSERT)]
    )
    # Stable: the old image of a row stays before its new one.
    order = np.argsort(places, kind="stable")
    places, change = places[order], change[order]
    cells = slab.cells[:, rows[places]]
    cells[scan.TUPLE_AT] = np.concatenate([old_at[before], new_at[after]])[order]
    cells[scan.TUPLE_END] = np.concatenate([old_end[before], new_end[after]])[order]
    cells[scan.TYPE] = RequestType.REPLACE
    cells[[scan.KEY_AT, scan.KEY_END, scan.OPS_AT, scan.OPS_END]] = -1
    cells[[scan.INDEX_ID, scan.INDEX_BASE]] = 0
    return replace(slab, cells=cells), places, CHANGE_TYPES.take(pa.array(change))
