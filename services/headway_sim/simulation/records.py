"""What a run leaves behind: a record a request, and the fleet's load over time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Record", "Run", "Timeline"]

_MOST_POINTS: Final = 2000


@dataclass(slots=True)
class Record:
    """One request. Times in virtual milliseconds, None until they happen; `refused` holds the reason, or nothing.

    `held_ms` is how long the scheduler kept it before it answered.
    """

    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    held_ms: float = 0.0
    engine: int | None = None
    first_token_ms: float | None = None
    finished_ms: float | None = None
    cached_tokens: int = 0
    predicted_ttft_ms: float | None = None
    refused: str = ""
    tenant: str = "default"


@dataclass(slots=True)
class Timeline:
    """In-flight requests by engine at regular times: at most 2,000 points, however long the run."""

    engines: int
    interval_ms: float
    times_ms: list[float] = field(default_factory=list)
    loads: list[Sequence[int]] = field(default_factory=list)
    kv_uses: list[float] = field(default_factory=list)

    def add(self, now_ms: float, loads: Sequence[int], kv_use: float) -> float:
        """Note a point; returns how long to wait for the next one."""
        self.times_ms.append(now_ms)
        self.loads.append(loads)
        self.kv_uses.append(kv_use)
        if len(self.times_ms) >= _MOST_POINTS:
            for series in (self.times_ms, self.loads, self.kv_uses):
                del series[1::2]
            self.interval_ms *= 2
        return self.interval_ms


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run; `duration_ms` from the first arrival's clock zero to the last end."""

    records: list[Record]
    timeline: Timeline
    duration_ms: float
