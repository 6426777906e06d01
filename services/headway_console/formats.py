"""Numbers and times as people read them. Unknown is a dash, never zero."""

from collections.abc import Callable
from datetime import UTC, datetime
from math import isfinite
from typing import Final

__all__ = ["FILTERS", "amount", "clock_time", "duration_ms", "duration_s", "moment", "percent", "rate"]

DASH: Final = "\N{EN DASH}"
_THIN: Final = "\N{NARROW NO-BREAK SPACE}"


def _known(value: float | None) -> bool:
    return value is not None and isfinite(value)


def amount(value: float | None, digits: int = 0) -> str:
    """`12 345` with narrow spaces; from a million on, `1.2 M`."""
    if value is None or not isfinite(value):
        return DASH
    for limit, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{_THIN}{unit}"
    return f"{value:,.{digits}f}".replace(",", _THIN)


def percent(value: float | None, digits: int = 0) -> str:
    """A share of 0 to 1 as `72 %`."""
    return DASH if value is None or not isfinite(value) else f"{value * 100:.{digits}f}{_THIN}%"


def duration_ms(value: float | None) -> str:
    """Milliseconds as `8.4 ms`, `310 ms` or `2.1 s`."""
    if value is None or not isfinite(value):
        return DASH
    if abs(value) >= 1000:
        return f"{value / 1000:.1f}{_THIN}s"
    return f"{value:.1f}{_THIN}ms" if 0 < abs(value) < 10 else f"{value:.0f}{_THIN}ms"


def duration_s(value: float | None) -> str:
    """Seconds as `8 s`, `5 min`, `3 h` or `2 d`."""
    if value is None or not isfinite(value):
        return DASH
    for limit, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if value >= 2 * limit:
            return f"{value / limit:.0f}{_THIN}{unit}"
    return f"{value:.0f}{_THIN}s"


def rate(value: float | None) -> str:
    """So many a second: `0`, `0.4`, `12.3`, `1 234`."""
    return amount(value, 1 if _known(value) and 0 < abs(value or 0.0) < 100 else 0)


def moment(value: datetime | float | None) -> str:
    """A point in time, in UTC: `2026-11-30 16:42:07 UTC`."""
    if value is None:
        return DASH
    at = value if isinstance(value, datetime) else datetime.fromtimestamp(value, UTC)
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock_time(value: datetime | float | None) -> str:
    """The time of day, in UTC: `16:42:07`."""
    if value is None:
        return DASH
    at = value if isinstance(value, datetime) else datetime.fromtimestamp(value, UTC)
    return at.astimezone(UTC).strftime("%H:%M:%S")


def naive(value: datetime) -> str:
    """A time in UTC that does not say so itself, as protobuf gives it."""
    return moment(value.replace(tzinfo=UTC))


def words(value: str) -> str:
    """`device_failed` as `device failed`."""
    return value.replace("_", " ")


FILTERS: Final[dict[str, Callable[..., str]]] = {
    "amount": amount,
    "percent": percent,
    "ms": duration_ms,
    "seconds": duration_s,
    "rate": rate,
    "moment": moment,
    "clock": clock_time,
    "naive": naive,
    "words": words,
}
