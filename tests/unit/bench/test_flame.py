"""Flame graphs: what was sampled, and how it is drawn."""

import time
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from headway_bench.flame import flame_graph, sampled

SVG = "{http://www.w3.org/2000/svg}"


def busy():
    return sum(number * number for number in range(2000))


def root(until):
    while time.process_time() < until:
        busy()


def test_what_runs_below_the_root_is_sampled():
    with sampled("root") as stacks:
        root(time.process_time() + 0.2)
        busy()
    assert stacks.total() > 10
    assert {stack[0] for stack in stacks} == {"test_flame.root"}
    assert any("test_flame.busy" in stack for stack in stacks)


def test_boxes_are_as_wide_as_their_share():
    stacks = Counter({("a.root", "a.left"): 30, ("a.root", "b.right<>"): 70})
    tree = ET.fromstring(flame_graph(stacks, "title"))
    width = {box.find(f"{SVG}title").text: float(box.find(f"{SVG}rect").get("width")) for box in tree.iter(f"{SVG}g")}
    assert width == {"a.root: 100.0%": 1200.0, "a.left: 30.0%": 360.0, "b.right<>: 70.0%": 840.0}


def test_nothing_is_no_graph():
    with pytest.raises(ValueError, match="nothing"):
        flame_graph(Counter(), "title")
