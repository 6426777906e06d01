"""Lengths of time as people write them: `90s`, `5m`, `24h`, `7d`, `1h30m`; a bare number is seconds."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from headway_cli.errors import UsageProblem

__all__ = ["moment_of", "seconds_of"]

_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_WHOLE: Final = re.compile(rf"(?:{_PART.pattern})+")
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")


def seconds_of(text: str, option: str) -> float:
    """How many seconds. Raises UsageProblem, naming the option."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _WHOLE.fullmatch(text):
        raise UsageProblem(f"{option}: {text!r} must look like 90s, 5m, 24h or 7d")
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def moment_of(text: str, option: str, now: datetime) -> datetime:
    """That very time (RFC 3339; UTC unless it says otherwise), or so long before `now`. Raises UsageProblem."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        seconds = seconds_of(text, option)
    else:
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    try:
        return now - timedelta(seconds=seconds)
    except OverflowError:
        raise UsageProblem(f"{option}: {text!r} is before the beginning of time") from None
