"""Times as people write them: `90s`, `1h`, `7d`, or a moment."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from headway_cli.errors import UsageProblem

__all__ = ["duration", "moment"]

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])")


def duration(text: str, option: str) -> timedelta:
    """`1h` or `0`. Raises UsageProblem."""
    match = _DURATION.fullmatch(text)
    if match is None and text != "0":
        raise UsageProblem(f"{option}: {text!r} must look like 90s, 15m, 1h or 7d")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]]) if match else timedelta()


def moment(text: str, option: str, now: datetime) -> datetime:
    """So long ago, or that very time. Raises UsageProblem."""
    if _DURATION.fullmatch(text):
        return now - duration(text, option)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageProblem(f"{option}: {text!r} must look like 2h, 7d or 2027-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
