"""The compaction catalog: which files are compacted, and which log files they replace.

`parse` and `encode` are pure; reading and writing use the Disk that is passed in
(`docs/spec/limestone.md#compaction-catalog`). Never checks whether the listed files exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import copying, names
from flowstone.limestone.format.files import read_or_back, read_whole, replace
from flowstone.outside import Disk

HEADER: Final = "COMPACTION_CATALOG_HEADER"
FOOTER: Final = "COMPACTION_CATALOG_FOOTER"
COMPACTED_VERSION: Final = 1
NUMBER_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True)
class Catalog:
    """`compacted`: names and versions of compacted files. `detached` lists log files whose content is in the compacted
    files."""

    compacted: tuple[tuple[str, int], ...] = ()
    detached: tuple[str, ...] = ()
    max_epoch_id: int = 0
    max_blob_id: int = 0


def encode(catalog: Catalog) -> bytes:
    """Encode the catalog in the order of the original, both lists sorted."""
    every_name = [*(name for name, _ in catalog.compacted), *catalog.detached]
    if any(not name or name.split() != [name] for name in every_name):
        raise LocalProtocolError("file name in catalog must be a single word")
    lines = [HEADER]
    lines += [f"COMPACTED_FILE {name} {version}" for name, version in sorted(catalog.compacted)]
    lines += [f"DETACHED_PWAL {name}" for name in sorted(catalog.detached)]
    lines += [f"MAX_EPOCH_ID {catalog.max_epoch_id}", f"MAX_BLOB_ID {catalog.max_blob_id}", FOOTER]
    return ("\n".join(lines) + "\n").encode()


def parse(data: bytes, path: str) -> Catalog:
    """Parse a catalog; `path` is for messages only. Lines may be in any order, and blank lines are skipped."""
    compacted: list[tuple[str, int]] = []
    detached: list[str] = []
    numbers: dict[str, int] = {}
    offset, is_ended = 0, False
    for index, line in enumerate(data.split(b"\n")):
        words = _words(line, path, offset)
        if index == 0:
            if line != HEADER.encode():
                raise DamagedFile(path, 0, "catalog header is missing")
        elif words and is_ended:
            raise DamagedFile(path, offset, "unexpected content after the footer")
        elif line == FOOTER.encode():
            is_ended = True
        elif words[:1] == ["COMPACTED_FILE"] and len(words) == 3:
            compacted.append((words[1], _number(words[2], path, offset)))
        elif words[:1] == ["DETACHED_PWAL"] and len(words) == 2:
            detached.append(words[1])
        elif words[:1] in (["MAX_EPOCH_ID"], ["MAX_BLOB_ID"]) and len(words) == 2:
            numbers[words[0]] = _number(words[1], path, offset)
        elif words:
            raise DamagedFile(path, offset, f"unknown line {line[:40]!r}")
        offset += len(line) + 1
    if not is_ended:
        raise DamagedFile(path, len(data), "footer is missing")
    if "MAX_EPOCH_ID" not in numbers:
        raise DamagedFile(path, len(data), "MAX_EPOCH_ID is missing")
    compacted_files, detached_files = tuple(sorted(compacted)), tuple(sorted(detached))
    return Catalog(compacted_files, detached_files, numbers["MAX_EPOCH_ID"], numbers.get("MAX_BLOB_ID", 0))


def _words(line: bytes, path: str, offset: int) -> list[str]:
    try:
        return line.decode().split()
    except UnicodeDecodeError:
        raise DamagedFile(path, offset, "line is not UTF-8") from None


def _number(text: str, path: str, offset: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= NUMBER_MAX):
        raise DamagedFile(path, offset, f"{text[:40]!r} is not a 64-bit number")
    return int(text)


def read(disk: Disk, directory: str) -> Catalog | None:
    """Return the catalog, or the previous one if it cannot be read; None if neither exists."""
    return read_or_back(disk, f"{directory}/{names.CATALOG}", f"{directory}/{names.CATALOG_BACK}", parse)


def write(disk: Disk, directory: str, catalog: Catalog) -> None:
    """Replace the catalog; the previous one is kept as `.back` if it can be read.

    The main file exists and is complete at every moment: the original treats a missing file as an empty catalog and
    ignores `.back`. `.back` is a copy, not a hard link: the original renames the main file to it and then truncates the
    main file, which would empty both."""
    path, back = f"{directory}/{names.CATALOG}", f"{directory}/{names.CATALOG_BACK}"
    current = read_whole(disk, path)
    if current is not None and _is_sound(current, path):
        copying.write(disk, back, current)
    replace(disk, directory, names.CATALOG, names.CATALOG_TEMPORARY, encode(catalog))


def settle(disk: Disk, directory: str) -> None:
    """Restore the main file from `.back` if it is missing or unreadable; delete the temporary file of a torn write.

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
