"""Shared by the commands on Limestone directories: names of entry types as in the recorded listings, paths."""

from __future__ import annotations

import re

from flowstone.cli.limestone import options as options
from flowstone.limestone.format.entries import EntryType
from tests.limestone import recorded


def test_every_entry_type_has_its_name_in_the_original() -> None:
    assert sorted(options.NAMES) == sorted(EntryType)
    text = (recorded.HERE / "dirs-master/before.txt").read_text()
    found = re.findall(r"^ +\d+ (\w+) .*\| (\w\w)", text, re.MULTILINE)
    assert len(found) > 20
    for name, first_byte in found:
        assert options.NAMES[int(first_byte, 16)] == name
    assert options.counts_by_name({EntryType.REMOVE: 2}) == {"remove_entry": 2}


def test_paths_are_quoted_as_the_original_does() -> None:
    assert options.quoted('/a "b" & c') == '"/a &"b&" && c"'
    assert (options.plain("/data//"), options.plain("/")) == ("/data", "/")
