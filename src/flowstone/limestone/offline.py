"""A data directory in the hands of a tool: locked, its manifest understood, and put aside before it is changed.

Through the Outside one is handed, and blocking. Unlike `directory.py`, which makes a directory fit for a datastore,
this takes one as it is, damage included, and changes nothing of it but on request.
"""

from __future__ import annotations

import errno
import string
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from flowstone.limestone import blobs, catalog, copying, lineage, manifest, names, replica_seeding
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.manifest import Manifest
from flowstone.outside import Disk, Outside

_LETTERS: Final = string.ascii_letters + string.digits
_SUFFIX_LENGTH: Final = 6
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextmanager
def held(disk: Disk, directory: str, *, only_looks: bool = False) -> Iterator[Manifest]:
    """The directory, locked against us and the real programs, while the block runs; AlreadyLocked if one has it.

    `only_looks`: then one on a read-only file system, where nobody can have it open, goes without the lock."""
    if disk.kind(directory) != "directory":
        raise LimestoneError(f"{directory}: there is no such directory")
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
                f"the data of {directory} is in {directory}/{replica_seeding.ASIDE}: a master was sending it anew",
                hint="start the replica, or open a store there: that puts it back",
            )
        yield found


def no_directory(directory: str) -> LimestoneError:
    """What to say of another directory."""
    return LimestoneError(
        f"{directory} is no data directory: it has no {names.MANIFEST}",
        hint="name the directory that holds it, which is log_location in tsurugi.ini",
    )


def migrate(outside: Outside, directory: str, found: Manifest) -> None:
    """Give a directory of an older format a manifest of ours. Its log files must have been put aside, or be gone."""
    if not found.is_current:
        manifest.migrate(outside.disk, directory, found.migrated(str(outside.random.uuid())))


def rename_instance(outside: Outside, directory: str) -> None:
    """Give a directory a manifest of ours with another identity, for one that has lost what others know it by."""
    found = manifest.read(outside.disk, directory)
    lineage.add(outside.disk, directory, [found.instance_uuid if found is not None else None])
    manifest.migrate(outside.disk, directory, Manifest(str(outside.random.uuid())))


def beside(outside: Outside, directory: str, kind: str) -> str:
    """A path beside a directory that nothing has: `<directory>.<kind>_XXXXXX`, as the real tools name them."""
    while True:
        letters = (_LETTERS[outside.random.randrange(len(_LETTERS))] for _ in range(_SUFFIX_LENGTH))
        path = f"{directory}.{kind}_{''.join(letters)}"
        if outside.disk.kind(path) is None:
            return path


def put_aside(
    outside: Outside, directory: str, changed: AbstractSet[str], tell: Callable[[int, str], None] | None = None
) -> str:
    """A copy of a directory beside it, made durably; its path. Files that are not going to change are shared with it.

    `changed`: the names of log files that are; an empty one may be, it is what a channel goes on with. The manifest
    comes last: without one a directory is none, so that a copy that was cut short is not mistaken for a whole one."""
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
