"""What a workload is to those who drive it."""

from collections.abc import Iterator
from typing import Protocol

from headway_sim.workloads.article import SessionTurns

__all__ = ["Workload"]


class Workload(Protocol):
    """Sessions, and when they start: by themselves, or as `concurrency` allows (closed loop)."""

    @property
    def concurrency(self) -> int | None:
        """Sessions at a time; None: each starts at its own time."""
        ...

    @property
    def requests(self) -> int:
        """Requests in all."""
        ...

    def schedule(self) -> Iterator[tuple[float, SessionTurns]]:
        """Every session and its start in milliseconds, in that order."""
        ...
