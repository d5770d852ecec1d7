"""A data directory used by a tool: locked, its manifest read, and backed up before it is changed.

Uses the Outside that is passed in, and blocks. Unlike `directory.py`, which prepares a directory for a datastore, this
module also opens damaged directories, and changes a directory only on request.
"""

from __future__ import annotations

import errno
import string
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import catalog, copying, lineage, manifest, names
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store import blobs
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.outside import Disk, Outside

_LETTERS: Final = string.ascii_letters + string.digits
_SUFFIX_LENGTH: Final = 6
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextmanager
def held(disk: Disk, directory: str, *, only_looks: bool = False) -> Iterator[Manifest]:
    """Lock the directory against Flowstone and the original while the block runs. Raise AlreadyLocked if it is in use.

    `only_looks`: read without the lock on a read-only file system, where no other process can write."""
    if disk.kind(directory) != "directory":
        raise LimestoneError(f"{directory}: no such directory")
    lock: AbstractContextManager[object] = nullcontext()
    try:
        lock = manifest.lock(disk, directory)
    except FileNotFoundError:
        raise no_directory(directory) from None
    except OSError as error:
        if not only_looks or error.errno not in _READ_ONLY:
            raise
    with lock:
        if not only_looks:
            manifest.settle(disk, directory)
            catalog.settle(disk, directory)
        found = manifest.read(disk, directory)
        if found is None:
            raise no_directory(directory)
        if replica_seeding.has_data_aside(disk, directory):
            raise LimestoneError(
                f"data of {directory} is in {directory}/{replica_seeding.ASIDE}: a seeding did not complete",
                hint="start the replica or open a store there to restore the data",
            )
        yield found


def no_directory(directory: str) -> LimestoneError:
    """Return the error for a directory that is not a data directory."""
    return LimestoneError(
        f"{directory} is not a data directory: {names.MANIFEST} is missing",
        hint="specify the directory that contains it (log_location in tsurugi.ini)",
    )


def migrate(outside: Outside, directory: str, found: Manifest) -> None:
    """Migrate the manifest of a directory of an older format. Its log files must have been rotated or deleted."""
    if not found.is_current:
        manifest.migrate(outside.disk, directory, found.migrated(str(outside.random.uuid())))


def rename_instance(outside: Outside, directory: str) -> None:
    """Give a directory a new identity if its peers' knowledge of its epochs is no longer valid."""
    found = manifest.read(outside.disk, directory)
    lineage.add(outside.disk, directory, [found.instance_uuid if found is not None else None])
    manifest.migrate(outside.disk, directory, Manifest(str(outside.random.uuid())))


def beside(outside: Outside, directory: str, kind: str) -> str:
    """Return an unused path beside a directory: `<directory>.<kind>_XXXXXX`, as the original tools name them."""
    while True:
        letters = (_LETTERS[outside.random.randrange(len(_LETTERS))] for _ in range(_SUFFIX_LENGTH))
        path = f"{directory}.{kind}_{''.join(letters)}"
        if outside.disk.kind(path) is None:
            return path


def put_aside(
    outside: Outside, directory: str, changed: AbstractSet[str], tell: Callable[[int, str], None] | None = None
) -> str:
    """Make a durable copy beside a directory, and return its path. Files that will not change are hard links.

    `changed`: names of log files that will change. Empty log files are copied, because channels append to them. The
    manifest comes last: an interrupted copy without a manifest is not mistaken for a data directory."""
    disk = outside.disk
    target = beside(outside, directory, "backup")
    disk.make_directory(target)
    kept = [name for name in disk.list_directory(directory) if disk.kind(f"{directory}/{name}") == "file"]
    for name in sorted(kept, key=lambda name: (name == names.MANIFEST, name)):
        is_shared = names.is_pwal(name) and name not in changed and disk.size(f"{directory}/{name}") > 0
        if name == names.MANIFEST:
            _put_blobs_aside(disk, directory, target)
            disk.sync_directory(target)
        copy = copying.link_or_copy if is_shared else copying.copy
        copy(disk, f"{directory}/{name}", f"{target}/{name}")
        if tell is not None:
            tell(disk.size(f"{directory}/{name}"), name)
    disk.sync_directory(target)
    disk.sync_directory(target.rpartition("/")[0] or ".")
    return target


def _put_blobs_aside(disk: Disk, directory: str, target: str) -> None:
    found = blobs.stored_ids(disk, directory)
    for blob_id in found:
        blobs.make_directory(disk, target, blob_id)
        copying.link_or_copy(disk, f"{directory}/{names.blob(blob_id)}", f"{target}/{names.blob(blob_id)}")
    for parent in sorted({names.blob_directory(blob_id) for blob_id in found}):
        disk.sync_directory(f"{target}/{parent}")
