"""Log files of real servers (tests/vectors/tarantool-*), and their contents by independent listings.

The listings were printed by an independent decoder at recording time: the text header of each file; a line with offset,
fixheader and checksum per block; header and bytes in hex per row (of a long row the first 300, then dots); and the end
marker. Because listings are long, their content is stored as gzipped JSON lines, `NAME.rows.gz` next to `NAME`, with
one object per header, block, row and marker. `python -m tests.vectors.recorded LISTINGS TARGET` creates these files:
LISTINGS is a directory tree with `NAME` and `NAME.txt`.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowstone.iproto.constants import Key

HERE = Path(__file__).parent
SUFFIX = ".rows.gz"

_BLOCK = re.compile(r"@(\d+) block \d+ (ROW|ZROW\(zstd\)) fixheader (\w+) len=(\d+) crc32prev=0 crc32=(\d+) \(ok\)")
_MARKER = re.compile(r"@(\d+) EOF marker d510aded; (\d+) bytes after")
_META = re.compile(r"META \((\d+) bytes\)")
_HEADER = re.compile(r"   \w+ header \{(.*)\}")
_PAIR = re.compile(r"\w+\((0x\w\w)\): ([0-9.e+-]+)")


def files() -> list[Path]:
    """Return every recorded file that has a listing."""
    return sorted(path.with_name(path.name.removesuffix(SUFFIX)) for path in HERE.rglob("*" + SUFFIX))


def listing(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the listing of a recorded file, in order."""
    text = gzip.decompress(path.with_name(path.name + SUFFIX).read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def compacted(text: str) -> Iterator[dict[str, Any]]:
    """Parse a printed listing. A line of unknown form is an error, so that nothing is dropped silently."""
    lines = iter(text.splitlines())
    for line in lines:
        if found := _META.fullmatch(line):
            meta = []
            while (line := next(lines)).strip():
                meta.append(line.strip())
            yield {"meta": meta, "size": int(found[1])}
        elif found := _BLOCK.fullmatch(line):
            at, kind, fixheader, size, crc = found.groups()
            yield {
                "block": int(at),
                "zstd": kind != "ROW",
                "fixheader": fixheader,
                "size": int(size),
                "crc": int(crc),
            }
        elif found := _HEADER.fullmatch(line):
            pairs = ((int(key, 16), value) for key, value in _PAIR.findall(found[1]))
            header = {key: float(value) if key == Key.TIMESTAMP else int(value) for key, value in pairs}
            body, row = next(lines), next(lines)
            if not body.startswith("      body ") or not row.startswith("      hex  "):
                raise ValueError(f"a row without body or bytes: {line}")
            yield {"header": header, "row": row.removeprefix("      hex  ")}
        elif found := _MARKER.fullmatch(line):
            yield {"end": int(found[1]), "after": int(found[2])}
        elif line.strip():
            raise ValueError(f"unknown line in a listing: {line}")


def main(listings: Path, target: Path) -> None:
    for printed in sorted(listings.rglob("*.txt")):
        source = printed.with_suffix("")
        if source.suffix not in (".snap", ".xlog"):
            continue
        copy = target / source.relative_to(listings)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
        lines = [json.dumps(entry, separators=(",", ":")) for entry in compacted(printed.read_text())]
        packed = gzip.compress("\n".join(lines).encode(), mtime=0)
        copy.with_name(copy.name + SUFFIX).write_bytes(packed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
