"""Rows of an archive with images, converted from operations to the tuples before and after each change.

Pure: a slab in, a slab out whose rows are images, each in the form of a REPLACE. Everything that decodes tuples can
therefore decode images. Rows that changed nothing (the DELETE of a missing key) have no images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from flowstone.columns.arrow_columns import text_array
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.scan import Cells
from flowstone.iproto.scan_kernels import scan_images
from flowstone.iproto.slab import Slab

Images = Literal["ops", "post", "full"]
"""ops: operations as logged. post: the tuple after the change; for a DELETE, the one before. full: both."""

CHANGE_TYPES: Final = text_array(["insert", "update_preimage", "update_postimage", "delete"])
_INSERT, _PREIMAGE, _POSTIMAGE, _DELETE = range(4)


def with_images(slab: Slab, rows: Cells, *, preimages: bool) -> tuple[Slab, Cells, pa.Array]:
    """Return the images of the given rows as a slab, the place of each image in `rows`, and its change type.

    The rows are changes of user spaces. If a row replaced a tuple and `preimages` is set, the old tuple comes first.
    """
    images: Cells = np.empty((scan.IMAGE_LINES, len(rows)), np.int64)
    scan_images(slab.buf, slab.cells, rows, images)
    old_at, old_end, new_at, new_end = images
    kinds = slab.cells[scan.TYPE, rows]
    # INSERT and REPLACE carry the new tuple themselves.
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
    # A stable sort keeps the old image of a row before its new one.
    order = np.argsort(places, kind="stable")
    places, change = places[order], change[order]
    cells = slab.cells[:, rows[places]]
    cells[scan.TUPLE_AT] = np.concatenate([old_at[before], new_at[after]])[order]
    cells[scan.TUPLE_END] = np.concatenate([old_end[before], new_end[after]])[order]
    cells[scan.TYPE] = RequestType.REPLACE
    cells[[scan.KEY_AT, scan.KEY_END, scan.OPS_AT, scan.OPS_END]] = -1
    cells[[scan.INDEX_ID, scan.INDEX_BASE]] = 0
    return replace(slab, cells=cells), places, CHANGE_TYPES.take(pa.array(change))
