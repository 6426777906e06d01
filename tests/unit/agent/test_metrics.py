"""The metrics parser."""

import math

from headway_agent.engines.metrics import MetricsParser, Series, numbers
from hypothesis import given
from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"))


def test_reads_only_what_is_asked_for():
    text = '# HELP a:x help\na:x 1\na:x_total 2\nb:x{a="1"} 3 1700000000\n  a:x 9\na:x broken\n'
    assert MetricsParser(["a:x", "b:x"]).parse(text) == {
        "a:x": [Series({}, 1.0)],
        "b:x": [Series({"a": "1"}, 3.0)],
    }


def test_a_longer_name_is_not_a_shorter_one():
    text = 'n_total{x="}"} 5\nn 4\n'
    assert MetricsParser(["n", "n_total"]).parse(text) == {
        "n_total": [Series({"x": "}"}, 5.0)],
        "n": [Series({}, 4.0)],
    }


def test_numbers_leave_out_what_is_none():
    assert numbers([Series({}, 1.0), Series({}, math.nan), Series({}, math.inf)]) == [1.0]


@given(TEXT, st.floats(allow_nan=False))
def test_any_label_comes_back_as_it_was_written(value, number):
    written = value.replace("\\", "\\\\").replace('"', '\\"')
    assert MetricsParser(["m"]).parse(f'm{{a="{written}",b="2"}} {number!r}\n') == {
        "m": [Series({"a": value, "b": "2"}, number)]
    }


@given(st.text())
def test_no_text_is_an_error(text):
    MetricsParser(["m"]).parse(text)
    MetricsParser(["m"]).parse("m" + text)
