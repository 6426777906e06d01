"""What tenants consumed, by the minute."""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

__all__ = ["Interval", "Usage"]


class Interval(StrEnum):
    """What usage is added up over."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one tenant consumed of one model in the minute that starts at `minute` (UTC), or in a longer interval.

    `requests` ended well, or were given up after they had used something; `fail_open` of them were placed without a
    scheduler. `refusals` were given no endpoint, `failures` one that failed them.
    """

    tenant: str
    model: str
    minute: datetime
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    refusals: int = 0
    failures: int = 0
    fail_open: int = 0

    def plus(self, other: "Usage") -> "Usage":
        """Both together; `other` is of the same tenant, model and minute."""
        return replace(
            self,
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            refusals=self.refusals + other.refusals,
            failures=self.failures + other.failures,
            fail_open=self.fail_open + other.fail_open,
        )
