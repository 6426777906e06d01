"""One decision or refusal as it is remembered: rendered only when somebody looks at it."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from headway_scheduler.admission.guards import marked
from headway_scheduler.admission.marking import Marks
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.report import Usage
from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import FloatColumn, Slots
from headway_scheduler.index.values import Chain
from headway_scheduler.strategies.base import Costs

__all__ = ["IN_FLIGHT", "REFUSED", "Candidate", "Entry", "Refusal", "Table"]

IN_FLIGHT: Final = "in_flight"
"""The outcome of a request that has not ended."""
REFUSED: Final = "refused"

_NO_USAGE: Final = Usage()


class Candidate(msgspec.Struct, frozen=True):
    """One endpoint as the decision saw it. `soft_guards`: what forbade dispatch there, of what its strategy heeds."""

    endpoint: str
    chosen: bool
    cost: float
    predicted_ttft_ms: float | None
    matched_tokens: int
    soft_guards: tuple[str, ...]


class Table(msgspec.Struct, frozen=True, gc=False):
    """The candidates' arrays, as the decision made them. `names` are endpoints by slot, as they were then."""

    slots: Slots
    hits: FloatColumn
    costs: Costs
    marks: Marks
    bits: int
    names: Sequence[str]
    chosen: int
    size_bytes: int

    def candidates(self) -> list[Candidate]:
        """All of them, cheapest first."""
        costs, ttft = self.costs.cost, self.costs.predicted_ttft_ms
        order = np.argsort(costs, kind="stable").tolist()
        return [
            Candidate(
                endpoint=self.names[self.slots.item(number)],
                chosen=number == self.chosen,
                cost=costs.item(number),
                predicted_ttft_ms=None if ttft is None else ttft.item(number),
                matched_tokens=int(self.hits.item(number)),
                soft_guards=marked(self.marks.item(number), self.bits),
            )
            for number in order
        ]


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """Why a request got no endpoint."""

    reason: str
    message: str
    retry_after_s: float | None
    held_ms: float


class Entry(msgspec.Struct, eq=False, gc=False):
    """A decision, or a refusal, and what came of it. Unix times in seconds.

    `number` counts entries, of decisions and refusals together, since the scheduler's start. `request` is without its
    prompt. `slot` is the chosen endpoint's; `served_by` is the one that had it at its end, `moved`: another than was
    chosen. Times of the end are by the data plane's clock, None where nobody reported them. `table` is None once it was
    dropped for newer ones.
    """

    number: int
    at: float
    request: Request
    decision: Decision | None = None
    slot: int = -1
    table: Table | None = None
    refusal: Refusal | None = None
    outcome: str = IN_FLIGHT
    ended_at: float | None = None
    ttft_ms: float | None = None
    duration_ms: float | None = None
    usage: Usage = _NO_USAGE
    served_by: str = ""
    moved: bool = False
    chain: Chain | None = None
    """Of its prompt, while an export waits for its end."""

    @property
    def endpoint(self) -> str:
        """The id of the endpoint chosen; empty: refused."""
        return "" if self.decision is None else self.decision.endpoint.spec.id

    @property
    def reservation_id(self) -> str:
        """Empty: refused."""
        return "" if self.decision is None else self.decision.reservation_id

    @property
    def is_over(self) -> bool:
        """Has it ended?"""
        return self.outcome is not IN_FLIGHT

    def candidates(self) -> list[Candidate] | None:
        """Every endpoint that was priced, cheapest first; None: the table was dropped, or there was none."""
        return None if self.table is None else self.table.candidates()
