"""Who watches decisions: told of each, never asked. One object, so that a decision makes one call, or none."""

from collections.abc import Callable
from typing import Protocol

from headway_scheduler.admission.values import Choice, Work
from headway_scheduler.domain.report import Finished
from headway_scheduler.domain.request import Request
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.values import Reservation

__all__ = ["Observer"]


class Observer(Protocol):
    """Keeps what it is told, within 5 µs a request in all: it sits on the decision's path. It must not raise.

    `Work.seen` is its own, to find again at a request's end what it kept at its decision.
    """

    timer: Callable[[], float]
    """Seconds; of what a decision takes."""

    def decided(self, work: Work, choice: Choice, now: float) -> None:
        """A place was reserved: `work.decision`. The candidates' arrays are nobody else's and may be kept."""
        ...

    def submitted(self, took_s: float) -> None:
        """A request was decided, held or found again, without what it waited."""
        ...

    def refused(self, request: Request, error: HeadwayError, held_ms: float) -> None:
        """It was refused, at once or after a hold."""
        ...

    def finished(self, reservation: Reservation, work: Work, report: Finished) -> None:
        """Its data plane said how it ended. Ends that nobody reported come by the ledger."""
        ...
