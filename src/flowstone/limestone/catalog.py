"""The compaction catalog: which files compaction made, and which log files it has made superfluous.

`parse` and `encode` are pure; reading and writing go through the Disk one is handed (reference: compaction catalog).
Never looks whether the files that it names exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowstone.errors import LocalProtocolError
from flowstone.limestone import copying, names
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.files import read_or_back, read_whole, replace
from flowstone.outside import Disk

HEADER: Final = "COMPACTION_CATALOG_HEADER"
FOOTER: Final = "COMPACTION_CATALOG_FOOTER"
COMPACTED_VERSION: Final = 1
NUMBER_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True)
class Catalog:
    """`compacted`: names and versions of compacted files. `detached`: log files whose content those have."""

    compacted: tuple[tuple[str, int], ...] = ()
    detached: tuple[str, ...] = ()
    max_epoch_id: int = 0
    max_blob_id: int = 0


def encode(catalog: Catalog) -> bytes:
    """The text in the order of the real writer, both lists sorted."""
    every_name = [*(name for name, _ in catalog.compacted), *catalog.detached]
    if any(not name or name.split() != [name] for name in every_name):
        raise LocalProtocolError("the name of a file in a catalog is one word")
    lines = [HEADER]
    lines += [f"COMPACTED_FILE {name} {version}" for name, version in sorted(catalog.compacted)]
    lines += [f"DETACHED_PWAL {name}" for name in sorted(catalog.detached)]
    lines += [f"MAX_EPOCH_ID {catalog.max_epoch_id}", f"MAX_BLOB_ID {catalog.max_blob_id}", FOOTER]
    return ("\n".join(lines) + "\n").encode()


def parse(data: bytes, path: str) -> Catalog:
    """What these bytes say; `path` is for the messages only. Lines come in any order, blank ones are skipped."""
    compacted: list[tuple[str, int]] = []
    detached: list[str] = []
    numbers: dict[str, int] = {}
    offset, is_ended = 0, False
    for index, line in enumerate(data.split(b"\n")):
        words = _words(line, path, offset)
        if index == 0:
            if line != HEADER.encode():
                raise DamagedFile(path, 0, "it has no header of a catalog")
        elif words and is_ended:
            raise DamagedFile(path, offset, "there is something behind its footer")
        elif line == FOOTER.encode():
            is_ended = True
        elif words[:1] == ["COMPACTED_FILE"] and len(words) == 3:
            compacted.append((words[1], _number(words[2], path, offset)))
        elif words[:1] == ["DETACHED_PWAL"] and len(words) == 2:
            detached.append(words[1])
        elif words[:1] in (["MAX_EPOCH_ID"], ["MAX_BLOB_ID"]) and len(words) == 2:
            numbers[words[0]] = _number(words[1], path, offset)
        elif words:
            raise DamagedFile(path, offset, f"line {line[:40]!r} is none of a catalog")
        offset += len(line) + 1
    if not is_ended:
        raise DamagedFile(path, len(data), "it has no footer")
    if "MAX_EPOCH_ID" not in numbers:
        raise DamagedFile(path, len(data), "it has no line MAX_EPOCH_ID")
    compacted_files, detached_files = tuple(sorted(compacted)), tuple(sorted(detached))
    return Catalog(compacted_files, detached_files, numbers["MAX_EPOCH_ID"], numbers.get("MAX_BLOB_ID", 0))


def _words(line: bytes, path: str, offset: int) -> list[str]:
    try:
        return line.decode().split()
    except UnicodeDecodeError:
        raise DamagedFile(path, offset, "it is no text") from None


def _number(text: str, path: str, offset: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= NUMBER_MAX):
        raise DamagedFile(path, offset, f"{text[:40]!r} is no number of 64 bits")
    return int(text)


def read(disk: Disk, directory: str) -> Catalog | None:
    """What the catalog says, or the one before it where it cannot be read; None where there is neither."""
    return read_or_back(disk, f"{directory}/{names.CATALOG}", f"{directory}/{names.CATALOG_BACK}", parse)


def write(disk: Disk, directory: str, catalog: Catalog) -> None:
    """Replace the catalog; the previous one is kept as `.back` if it can be read.

    The main file exists and is complete at every moment: the original treats a missing file as an empty catalog,
    whatever `.back` says. `.back` is a copy, not a hard link: the original renames the main file to it and then
    truncates the main file, which would empty both."""
    path, back = f"{directory}/{names.CATALOG}", f"{directory}/{names.CATALOG_BACK}"
    current = read_whole(disk, path)
    if current is not None and _is_sound(current, path):
        copying.write(disk, back, current)
    replace(disk, directory, names.CATALOG, names.CATALOG_TEMPORARY, encode(catalog))


def settle(disk: Disk, directory: str) -> None:
    """Restore the main file from `.back` if it is missing or unreadable; delete the temporary file of a cut write.

    The original leaves such a directory if it dies between renaming the main file and writing a new one. The caller
    holds the lock of the directory. If neither file can be read, both stay, and `read` raises DamagedFile."""
    path, back = f"{directory}/{names.CATALOG}", f"{directory}/{names.CATALOG_BACK}"
    copying.remove(disk, f"{directory}/{names.CATALOG_TEMPORARY}")
    current, kept = read_whole(disk, path), read_whole(disk, back)
    if (current is None or not _is_sound(current, path)) and kept is not None and _is_sound(kept, back):
        replace(disk, directory, names.CATALOG, names.CATALOG_TEMPORARY, kept)


def _is_sound(data: bytes, path: str) -> bool:
    try:
        parse(data, path)
    except DamagedFile:
        return False
    return True
