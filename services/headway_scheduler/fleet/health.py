"""Endpoints that keep failing are ejected for a while, so that a fast 5xx never looks like low load."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["EjectionConfig", "Ejections"]


@dataclass(frozen=True, slots=True)
class EjectionConfig:
    """Consecutive failures that eject, for how long (times the ejections in a row), and the largest share ejected."""

    failures: int = 5
    base_s: float = 5.0
    max_s: float = 120.0
    max_share: float = 0.5


@dataclass(slots=True)
class _Record:
    failures: int = 0
    ejections: int = 0
    until: float | None = None


class Ejections:
    """Consecutive failures by endpoint. A 4xx is the request's fault: callers do not record it as a failure."""

    def __init__(self, config: EjectionConfig | None = None) -> None:
        self._config = config or EjectionConfig()
        self._records: dict[str, _Record] = {}

    @property
    def max_share(self) -> float:
        """The largest share of a pool that may be out at once."""
        return self._config.max_share

    def record(self, endpoint: str, failed: bool, now: float, spared: Callable[[], bool]) -> bool:
        """Count an outcome; True if the endpoint is ejected by it, which never happens while `spared()`.

        What requests sent before the ejection come to while it lasts changes nothing.
        """
        record = self._records.get(endpoint)
        if record is not None and record.until is not None:
            return False
        if not failed:
            self._records.pop(endpoint, None)
            return False
        if record is None:
            record = self._records[endpoint] = _Record()
        record.failures += 1
        if record.failures < self._config.failures or spared():
            return False
        record.ejections += 1
        record.until = now + min(self._config.base_s * record.ejections, self._config.max_s)
        return True

    def ejected(self, endpoint: str) -> bool:
        """Is it out now?"""
        record = self._records.get(endpoint)
        return record is not None and record.until is not None

    def expire(self, now: float) -> list[str]:
        """Let those back in whose time is over; one more failure ejects them again, for longer."""
        back = [name for name, r in self._records.items() if r.until is not None and r.until <= now]
        for name in back:
            record = self._records[name]
            record.until, record.failures = None, self._config.failures - 1
        return back

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone."""
        self._records.pop(endpoint, None)
