"""Tables on narrow and wide screens."""

import io

import pytest
from headway_cli.output import cell, least_width, table
from rich.console import Console


def printed(width, rows, columns):
    shown = table(rows, columns)
    screen = Console(file=io.StringIO(), width=max(width, least_width(shown)))
    screen.print(shown)
    return screen.file.getvalue()


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_what_names_a_row_stays_whole_and_nothing_is_cut(width):
    rows = [{"name": "strategies/global", "algorithm": "global_least_request", "n": 12}]
    shown = printed(width, rows, ("name", "algorithm", "n"))
    assert "strategies/global" in shown
    assert "…" not in shown
    assert "12" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        ([], "-"),
        (0, "0"),
        (False, "no"),
        (0.123456, "0.1235"),
        (123456.7, "123457"),
        ({"a": 1, "b": True}, "a=1 b=yes"),
        (["x", "y"], "x,y"),
    ],
)
def test_a_cell_is_short_and_missing_is_not_zero(value, shown):
    assert cell(value) == shown


def test_markup_in_a_name_is_text():
    assert "[red]x" in printed(80, [{"name": "[red]x"}], ("name",))
