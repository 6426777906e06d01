"""Numbers as people read them; what is unknown is a dash and never a zero."""

from math import inf, nan

import pytest
from headway_console import formats


@pytest.mark.parametrize(
    ("form", "value", "told"),
    [
        (formats.amount, 0, "0"),
        (formats.amount, 12_345, "12 345"),
        (formats.amount, 1_200_000, "1.2 M"),
        (formats.amount, 3.2e9, "3.2 G"),
        (formats.percent, 0.724, "72 %"),
        (formats.percent, 0.0, "0 %"),
        (formats.duration_ms, 0.0, "0 ms"),
        (formats.duration_ms, 8.42, "8.4 ms"),
        (formats.duration_ms, 310.4, "310 ms"),
        (formats.duration_ms, 2100, "2.1 s"),
        (formats.duration_s, 8, "8 s"),
        (formats.duration_s, 300, "5 min"),
        (formats.duration_s, 3 * 86_400, "3 d"),
        (formats.rate, 0.0, "0"),
        (formats.rate, 12.34, "12.3"),
        (formats.rate, 1234.5, "1 234"),
        (formats.moment, 0.0, "1970-01-01 00:00:00 UTC"),
        (formats.clock_time, 3661.0, "01:01:01"),
        (formats.words, "device_failed", "device failed"),
    ],
)
def test_values(form, value, told):
    assert form(value).replace("\u202f", " ") == told


@pytest.mark.parametrize(
    "form", [formats.amount, formats.percent, formats.duration_ms, formats.duration_s, formats.rate]
)
@pytest.mark.parametrize("value", [None, nan, inf])
def test_unknown(form, value):
    assert form(value) == formats.DASH
