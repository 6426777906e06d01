"""What is counted at each decision and each end: plain lists, read when scraped (ADR 41).

A labelled histogram of prometheus_client costs a microsecond an observation; these cost a fifth.
"""

from bisect import bisect_left
from typing import Final

from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.report import Finished
from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.values import Reservation

__all__ = ["OTHER", "Counts", "Histogram", "Series"]

OTHER: Final = "_other"
"""The label of all that have none of their own."""

_Bounds = tuple[float, ...]
_DECISION_S: Final[_Bounds] = (2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05)
_HOLD_S: Final[_Bounds] = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0)
_TTFT_S: Final[_Bounds] = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TPOT_S: Final[_Bounds] = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_RATIO: Final[_Bounds] = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Histogram:
    """Observations by bucket: `counts[n]` of those up to `bounds[n]` and above the bound before; the last: of more."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)


class Series:
    """What one tenant got of one model. Tokens are as engines counted them; `matched` as decisions believed."""

    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "hold",
        "matched_tokens",
        "model",
        "outcomes",
        "prediction",
        "prompt_tokens",
        "refusals",
        "routed",
        "tenant",
        "tpot",
        "ttft",
    )

    def __init__(self, tenant: str, model: str) -> None:
        self.tenant, self.model = tenant, model
        self.routed = self.matched_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.refusals: dict[str, int] = {}
        self.outcomes: dict[str, int] = {}
        self.hold, self.ttft, self.tpot = Histogram(_HOLD_S), Histogram(_TTFT_S), Histogram(_TPOT_S)
        self.prediction = Histogram(_RATIO)


class Counts:
    """All of it. Of pairs of tenant and model the first `limit` have series of their own, the others share one."""

    def __init__(self, limit: int = 100) -> None:
        self.decision = Histogram(_DECISION_S)
        self.series: dict[tuple[str, str], Series] = {}
        self._limit = limit
        self._others = Series(OTHER, OTHER)

    def all_series(self) -> list[Series]:
        """Those with a name, and then the others' if there are any."""
        others = self._others
        shared = [others] if others.routed or others.refusals or others.outcomes else []
        return [*self.series.values(), *shared]

    def routed(self, request: Request, decision: Decision) -> None:
        """A request was given an endpoint."""
        series = self.series.get((request.tenant, request.model)) or self._new(request.tenant, request.model)
        series.routed += 1
        why = decision.why
        series.matched_tokens += why.matched_tokens
        if why.held_ms > 0.0:
            series.hold.observe(why.held_ms / 1e3)

    def refused(self, request: Request, reason: str) -> None:
        """A request was refused."""
        refusals = self._of(request.tenant, request.model).refusals
        refusals[reason] = refusals.get(reason, 0) + 1

    def ended(self, reservation: Reservation, report: Finished, ttft_ms: float | None) -> None:
        """A request's data plane said how it ended."""
        tenant, model = reservation.tenant, reservation.model
        series = self.series.get((tenant, model)) or self._new(tenant, model)
        outcome, usage = report.outcome, report.usage
        series.outcomes[outcome] = series.outcomes.get(outcome, 0) + 1
        completion = usage.completion_tokens or 0
        series.prompt_tokens += usage.prompt_tokens or 0
        series.cached_tokens += usage.cached_tokens or 0
        series.completion_tokens += completion
        if ttft_ms is None:
            return
        series.ttft.observe(ttft_ms / 1e3)
        predicted_ms = reservation.predicted_ttft_ms
        if predicted_ms:
            series.prediction.observe(ttft_ms / predicted_ms)
        if completion > 1 and report.duration_ms is not None:
            series.tpot.observe((report.duration_ms - ttft_ms) / (1e3 * (completion - 1)))

    def lost(self, reservation: Reservation, cause: str) -> None:
        """A request ended, and nobody reported it."""
        outcomes = self._of(reservation.tenant, reservation.model).outcomes
        outcomes[cause] = outcomes.get(cause, 0) + 1

    def _of(self, tenant: str, model: str) -> Series:
        return self.series.get((tenant, model)) or self._new(tenant, model)

    def _new(self, tenant: str, model: str) -> Series:
        """The first time that a pair is seen. Beyond the limit it is not even remembered: pairs may be without end."""
        if len(self.series) >= self._limit:
            return self._others
        found = self.series[tenant, model] = Series(tenant, model)
        return found
