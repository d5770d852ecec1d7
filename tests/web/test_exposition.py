"""The check of metrics finds the problems that `promtool check metrics` would."""

from __future__ import annotations

import pytest

from tests.web.exposition import checked

GOOD = """# HELP a_total Some.
# TYPE a_total counter
a_total{x="1"} 5.0
a_total{x="2\\n\\"\\\\"} 0.0
# HELP b Other.
# TYPE b gauge
b -1.5
# HELP c_seconds Took.
# TYPE c_seconds histogram
c_seconds_bucket{le="0.1"} 1.0
c_seconds_bucket{le="+Inf"} 3.0
c_seconds_count 3.0
c_seconds_sum 1.5
"""


def test_valid_exposition_is_parsed() -> None:
    found = checked(GOOD)
    assert found.value("a_total", x="1") == 5
    assert found.value("b") == -1.5
    assert found.labels("a_total") == [{"x": "1"}, {"x": '2\\n\\"\\\\'}]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("# HELP b Other.\n", "", "b has no HELP"),
        ("# TYPE b gauge\n", "", "b has no TYPE"),
        ("# TYPE b gauge\n", "# TYPE b counter\n", "end in _total"),
        ("# TYPE a_total counter\n", "# TYPE a_total gauge\n", "end in _total"),
        ('a_total{x="1"}', 'a_total{y="1"}', "other labels"),
        ('a_total{x="1"}', 'a_total{__x="1"}', "may not be called"),
        ("} 5.0", "} -5.0", "not negative"),
        ("b -1.5\n", "b -1.5\nb 2.0\n", "there twice"),
        ("b -1.5\n", "", "has no samples"),
        ("b -1.5\n", "d -1.5\n", "stands with b"),
        ("c_seconds_count 3.0", "c_seconds_count 2.0", "count is not"),
        ("c_seconds_sum 1.5\n", "", "no sum"),
        ('{le="0.1"} 1.0', '{le="0.1"} 9.0', "less than one below"),
        ('c_seconds_bucket{le="+Inf"} 3.0\n', "", r"without \+Inf"),
        ("b -1.5\n", "b -1.5\n# HELP a_total Again.\n", "in two places"),
        ("b -1.5", "b", "not a sample"),
    ],
)
def test_violations_are_found(old: str, new: str, problem: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(AssertionError, match=problem):
        checked(GOOD.replace(old, new))
