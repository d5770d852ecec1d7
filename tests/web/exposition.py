"""The checks of `promtool check metrics`, and a few more: the text of metrics, line by line.

Problems are one line each. The text is also parsed by Prometheus' own parser, which accepts more than a scrape does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
LINE: Final = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL: Final = re.compile(r'(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)="(?P<value>(?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')
KINDS: Final = ("counter", "gauge", "histogram", "summary", "untyped")
SUFFIXES: Final = ("_bucket", "_count", "_sum")

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]


@dataclass
class Family:
    name: str
    help: str | None = None
    kind: str | None = None
    samples: Samples = field(default_factory=dict)


@dataclass
class Exposition:
    """Parsed metrics: the families by name, and the problems."""

    families: dict[str, Family] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def value(self, name: str, /, **labels: str) -> float:
        """Return the value of the only sample that has these labels."""
        found = [
            value
            for family in self.families.values()
            for (sample, given), value in family.samples.items()
            if sample == name and labels.items() <= dict(given).items()
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def labels(self, name: str) -> list[dict[str, str]]:
        """Return the values of all samples with this name."""
        pairs = [key for family in self.families.values() for key in family.samples]
        return [dict(labels) for sample, labels in pairs if sample == name]


def read(text: str) -> Exposition:
    """Parse and check the text."""
    found = Exposition()
    if not text.endswith("\n"):
        found.problems.append("the last line does not end")
    current: Family | None = None
    for line in text.splitlines():
        if line.startswith("# "):
            current = _comment(found, line, current)
        elif line:
            _sample(found, line, current)
    for family in found.families.values():
        found.problems += _judged(family)
    try:
        list(text_string_to_metric_families(text))
    except ValueError as error:
        found.problems.append(f"Prometheus cannot read it: {error}")
    return found


def checked(text: str) -> Exposition:
    """Parse the text, which must be valid."""
    found = read(text)
    assert not found.problems, "\n".join(found.problems)
    return found


def _comment(found: Exposition, line: str, current: Family | None) -> Family:
    _, what, name, rest = f"{line} ".split(" ", 3)
    if current is None or current.name != name:
        if name in found.families:
            found.problems.append(f"{name} is told of in two places")
        current = found.families.setdefault(name, Family(name))
    if what == "HELP":
        current.help = rest.strip()
    elif what == "TYPE":
        current.kind = rest.strip()
    else:
        found.problems.append(f"{line}: a comment that is none")
    return current


def _sample(found: Exposition, line: str, current: Family | None) -> None:
    parsed = LINE.fullmatch(line)
    if parsed is None or current is None:
        found.problems.append(f"{line}: not a sample")
        return
    name, text = parsed["name"], parsed["labels"] or ""
    labels = tuple(sorted((each["name"], each["value"]) for each in LABEL.finditer(text)))
    if "".join(each[0] for each in LABEL.finditer(text)) != text:
        found.problems.append(f"{line}: its labels cannot be read")
    if name != current.name and name not in [current.name + suffix for suffix in SUFFIXES]:
        found.problems.append(f"{line}: it stands with {current.name}")
    if (name, labels) in current.samples:
        found.problems.append(f"{line}: it is there twice")
    current.samples[name, labels] = float(parsed["value"])


def _judged(family: Family) -> Iterator[str]:
    name = family.name
    if not NAME.fullmatch(name):
        yield f"{name}: a name is of small letters, digits and _"
    if not family.help:
        yield f"{name} has no HELP"
    if family.kind not in KINDS:
        yield f"{name} has no TYPE"
    if (family.kind == "counter") != name.endswith("_total"):
        yield f"{name}: counters, and nothing else, end in _total"
    if family.kind != "histogram" and name.endswith(SUFFIXES):
        yield f"{name}: the end of its name is for histograms"
    if not family.samples:
        yield f"{name} has no samples"
    keys = {frozenset(key for key, _ in labels) - {"le"} for _, labels in family.samples}
    if len(keys) > 1:
        yield f"{name}: samples with other labels than others"
    for (sample, labels), value in family.samples.items():
        if any(key.startswith("__") or not NAME.fullmatch(key) for key, _ in labels):
            yield f"{sample}: a label may not be called so"
        if family.kind == "counter" and not value >= 0:
            yield f"{sample}: a counter is not negative"
    if family.kind == "histogram":
        yield from _of_histogram(family)


def _of_histogram(family: Family) -> Iterator[str]:
    series: dict[Labels, list[tuple[float, float]]] = {}
    for (sample, labels), value in family.samples.items():
        if sample == f"{family.name}_bucket":
            rest = tuple(pair for pair in labels if pair[0] != "le")
            series.setdefault(rest, []).append((float(dict(labels)["le"]), value))
    for labels, buckets in series.items():
        bounds, counts = zip(*buckets, strict=True)
        if list(bounds) != sorted(bounds) or bounds[-1] != float("inf"):
            yield f"{family.name}: buckets in no order, or without +Inf"
        if list(counts) != sorted(counts):
            yield f"{family.name}: a bucket has less than one below it"
        if family.samples.get((f"{family.name}_count", labels)) != counts[-1]:
            yield f"{family.name}: its count is not that of its last bucket"
        if (f"{family.name}_sum", labels) not in family.samples:
            yield f"{family.name} has no sum"
    if not series:
        yield f"{family.name} has no buckets"
