"""Flowstone: Python as a full member of a replicated log.

This is the public surface; everything below it may move. Importing it loads nothing heavy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    import pyarrow

__version__ = "0.1.0"
__all__ = ["FlowstoneError", "__version__", "read_log"]


def read_log(
    *paths: str,
    space: int | str | None = None,
    settled: bool = True,
    columns: Collection[str] | None = None,
    replicas: Sequence[int] = (),
    show_system: bool = False,
    force: bool = False,
) -> Iterator[pyarrow.RecordBatch]:
    """Rows of `.xlog` and `.snap` files, or of directories of them, as Arrow record batches, in log order.

    With `space`, an id or a name, its fields are typed columns beside `_lsn`, `_type`, `_timestamp` and so on; a
    change of its format changes the schema of the batches from there on. Without, keys and tuples are MessagePack.
    Rows that were rolled back, or are not decided yet, are left out unless `settled` is off. Damage and gaps are
    errors unless `force` is on. Memory is bounded by a few batches, whatever the size of the log.
    """
    from flowstone.history.batches import generic_batches, typed_batches
    from flowstone.history.files import find_logs
    from flowstone.history.reading import Reading
    from flowstone.history.selection import Selection
    from flowstone.outside import production

    if columns is not None and space is None:
        raise FlowstoneError("columns can be chosen of one space only", hint="name it with space=")
    outside = production()
    selection = Selection(spaces=() if space is None else (space,), replicas=tuple(replicas), show_system=show_system)
    files = find_logs(outside.disk, paths)
    reading = Reading(outside, files, selection=selection, settled=settled, force=force)
    if space is None:
        return generic_batches(reading)
    return typed_batches(reading, space, wanted=columns)
