"""Figures as people read them."""

import pytest
from headway_bench.commands import Output, _print

FIGURES = {"requests_per_s": 12345.6, "p50_us": 1234.5, "p99_us": 12345.6, "server_cpu_us": 123.4}
ROUTE = {
    "settings": {"endpoints": 100},
    "route": FIGURES,
    "echo": FIGURES,
    "vs_echo": 0.123,
    "one_caller": FIGURES | {"echo_p50_us": 321.0, "vs_echo": 1.5},
}
MANY = {f"part_{number}": {"cpu_us": 1.5} for number in range(20)}


@pytest.mark.parametrize("found", [ROUTE, MANY])
def test_a_table_of_80_columns_has_every_name_and_figure_whole(found, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _print(found, Output.TABLE)
    printed = capsys.readouterr().out
    words = set(printed.split())
    parts = {name: part for name, part in found.items() if isinstance(part, dict) and name != "settings"}
    expected = {*parts, *(str(each) for part in parts.values() for pair in part.items() for each in pair)}
    assert expected <= words
    assert max(map(len, printed.splitlines())) <= 80
    assert "settings" not in words
