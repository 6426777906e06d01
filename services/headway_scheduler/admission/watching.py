"""Watching: what would have been done with requests that somebody else placed, and what came of them.

A request is priced when it is seen, as Route would, and counted once it is known where it went. Both places'
predictions come from the same view of the same moment. What cannot be known is what the fleet would look like, had all
the requests before it been routed: sums are what one request at a time would have gained.
"""

import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from headway_scheduler.domain.desired import Tenant
from headway_scheduler.domain.request import Request

__all__ = ["Observations", "Tally", "Verdict", "is_routed"]

_MAX_PENDING: Final = 10_000
"""Verdicts whose request has not been seen to go anywhere yet; the oldest goes first."""


def is_routed(tenant: Tenant, session_id: str, request_id: str) -> bool:
    """Is this one of the requests that the tenant lets Headway route?

    By session where there is one, so that a conversation keeps its router. Who was routed at a lower percentage is at a
    higher one, too. Data planes compute the same (routing.proto, FailOpenView).
    """
    if tenant.routed_percent >= 100:
        return True
    return zlib.crc32((session_id or request_id).encode()) % 100 < tenant.routed_percent


@dataclass(slots=True)
class Verdict:
    """What Route would have done with a request at `at`.

    `slots`, `hits` and `ttft_ms` are of the candidates; `chosen` is a position in them. `refusal`: its reason, and then
    there are no candidates. `held`: it would have waited for the chosen one.
    """

    request: Request
    at: float
    slots: list[int] = field(default_factory=list)
    chosen: int = 0
    hits: list[float] = field(default_factory=list)
    ttft_ms: list[float] | None = None
    held: bool = False
    refusal: str = ""
    served: int | None = None
    """The position of the candidate that it went to, once that is known."""

    @property
    def predicted_served_ms(self) -> float | None:
        """The TTFT predicted for it where it went."""
        return None if self.ttft_ms is None or self.served is None else self.ttft_ms[self.served]

    @property
    def matched_tokens(self) -> int:
        """What of the prompt was believed cached where it went."""
        return 0 if self.served is None else int(self.hits[self.served])


@dataclass(slots=True)
class Tally:
    """Sums of one tenant's requests for one model; fleet.proto, Observation, says what each is."""

    requests: int = 0
    agreed: int = 0
    elsewhere: int = 0
    held: int = 0
    refused: int = 0
    compared: int = 0
    predicted_served_ms: float = 0.0
    predicted_chosen_ms: float = 0.0
    prompt_tokens: int = 0
    hit_tokens_served: int = 0
    hit_tokens_chosen: int = 0
    timed: int = 0
    actual_ms: float = 0.0
    predicted_timed_ms: float = 0.0


class Observations:
    """All of them, by tenant and model, since the start. Few: both are names that admins gave or agents announced."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.unpriced: dict[str, int] = {}
        """Requests that were seen and could not be priced, by reason."""
        self._pending: OrderedDict[str, Verdict] = OrderedDict()

    def wait(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict until somebody tells under this key where its request went."""
        self._pending[key] = verdict
        if len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def take(self, key: str) -> Verdict | None:
        """The verdict that waits under this key, once."""
        return self._pending.pop(key, None)

    def count_unpriced(self, reason: str) -> None:
        """A request went by that nothing can be said of: its model is unknown, or its body no request."""
        self.unpriced[reason] = self.unpriced.get(reason, 0) + 1

    def count(self, verdict: Verdict, slot: int | None) -> None:
        """It went to `slot`; None: to where nobody knows. Once for each verdict."""
        tally = self._tally(verdict)
        tally.requests += 1
        tally.held += verdict.held
        if verdict.refusal:
            tally.refused += 1
            return
        if slot is None or slot not in verdict.slots:
            tally.elsewhere += 1
            return
        served = verdict.served = verdict.slots.index(slot)
        chosen = verdict.chosen
        tally.agreed += served == chosen and not verdict.held
        longest = verdict.request.prompt_tokens
        tally.prompt_tokens += longest
        tally.hit_tokens_served += min(longest, int(verdict.hits[served]))
        tally.hit_tokens_chosen += min(longest, int(verdict.hits[chosen]))
        if verdict.ttft_ms is not None:
            tally.compared += 1
            tally.predicted_served_ms += verdict.ttft_ms[served]
            tally.predicted_chosen_ms += verdict.ttft_ms[chosen]

    def first_token(self, verdict: Verdict, ttft_ms: float) -> None:
        """Its first token came so long after it was seen."""
        predicted = verdict.predicted_served_ms
        if predicted is not None:
            tally = self._tally(verdict)
            tally.timed += 1
            tally.actual_ms += ttft_ms
            tally.predicted_timed_ms += predicted

    def _tally(self, verdict: Verdict) -> Tally:
        key = (verdict.request.tenant, verdict.request.model)
        found = self.tallies.get(key)
        if found is None:
            found = self.tallies[key] = Tally()
        return found
