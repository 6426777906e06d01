"""Charts: every line stays in its box, and what is unknown is a gap."""

import re
import xml.etree.ElementTree as ET
from math import nan

from headway_console.charts import Line, chart, sparkline
from hypothesis import given
from hypothesis import strategies as st

values = st.lists(st.one_of(st.just(nan), st.floats(0, 1e9)), max_size=150)


def points(path):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


@given(values)
def test_a_sparkline_stays_in_its_box(line):
    drawn = ET.fromstring(sparkline(line, "x"))
    for x, y in points(drawn[0].get("d")):
        assert 0 <= x <= 96
        assert 0 <= y <= 22


@given(st.lists(values, max_size=4))
def test_a_chart_stays_in_its_box(lines):
    drawn = ET.fromstring(chart([Line(f"l{n}", each, n + 1) for n, each in enumerate(lines)], "c", unit=" ms"))
    for each in drawn.iter("path"):
        for x, y in points(each.get("d")):
            assert 0 <= x <= 640
            assert 0 <= y <= 180


def test_what_is_unknown_is_a_gap_and_not_zero():
    path = ET.fromstring(sparkline([1.0, nan, 1.0], "x"))[0].get("d")
    assert path.count("M") == 2
    assert "L" not in path
    assert ET.fromstring(sparkline([nan, nan], "x"))[0].get("d") == ""


def test_names_are_escaped_and_latest_values_are_read_out():
    drawn = chart([Line("<b>", [1.0, 2.0])], 'a"b')
    assert ET.fromstring(drawn).get("aria-label") == 'a"b; now <b> 2'
    assert ET.fromstring(chart([Line("x", [nan])], "c")).get("aria-label") == "c; nothing yet"
