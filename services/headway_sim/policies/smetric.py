"""SMetric: stay with the session's endpoint while it still holds most of the session and is not too far behind.

Source: FIELD.md section 1. The endpoint with the longest hit keeps the request if its hit > half of what the session
could hit, and its queued + own prefill ≤ 1 s + 62.5 ms per 1,000 prompt tokens. Else argmin (queued + own prefill ms)
× load.

Choices: what a session could hit is its previous prompt; a session that is not known could hit nothing and is placed
by the second rule, however much of a shared system prompt is cached. A request that names no session belongs to the
longest earlier prompt that it extends (of at least 1,024 tokens, unless its text marks turns). Load is in flight + 1,
for LMetric's reason. Of equal hits, the one with less prefill.

Memory: the last prompt's tokens, per session, for 1800 s since its last request. It is written by `cost`, which is
called once a decision; what was chosen need not be known.
"""

from typing import ClassVar

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View
from pydantic import Field
from xxhash import xxh3_64_intdigest

from headway_sim.policies.choice import only
from headway_sim.policies.prefill import own_prefill_ms
from headway_sim.policies.turns import Ends, TurnMemory, turn_ends

__all__ = ["SMetric"]


class SMetricParameters(Parameters):
    """What can be tuned."""

    least_hit: float = Field(0.5, ge=0.0, le=1.0, description="Part of the session that must be cached to stay")
    patience_ms: float = Field(1000.0, ge=0.0, le=1e6, description="Prefill up to which it stays")
    patience_ms_per_1k: float = Field(62.5, ge=0.0, le=1e6, description="And for each 1,000 prompt tokens")
    ttl_s: float = Field(1800.0, gt=0.0, le=1e6, description="Seconds a session is known after its last request")


class SMetric:
    """Cost: 0 for the session's endpoint; else milliseconds × requests."""

    name: ClassVar[str] = "smetric"
    parameters_type: ClassVar[type[Parameters]] = SMetricParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: SMetricParameters) -> None:
        self.parameters = parameters
        self._sessions: TurnMemory[int] = TurnMemory(parameters.ttl_s)

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate, and remember the session's prompt."""
        p, tokens = self.parameters, request.prompt_tokens
        could_hit = min(tokens, self._previous(request, now))
        prefill = view.queued_prefill_ms + own_prefill_ms(request, view)
        if could_hit:
            hit = view.hit_tokens
            holders = np.flatnonzero(hit == hit.max())
            home = int(holders[prefill[holders].argmin()])
            patience = p.patience_ms + p.patience_ms_per_1k * tokens / 1000.0
            if hit[home] > p.least_hit * could_hit and prefill[home] <= patience:
                return only(home, len(view))
        return Costs(prefill * (view.inflight + 1.0))

    def _previous(self, request: Request, now: float) -> int:
        """Tokens of the session's previous prompt; 0: none known. Remembers this one's."""
        sessions = self._sessions
        sessions.expire(now)
        named = request.session_id.encode()
        ends = Ends((xxh3_64_intdigest(named),), True) if named else turn_ends(request)
        known = sessions.longest(ends.hashes)
        previous = sessions.get(ends.hashes[known]) if known >= 0 else 0
        for value in ends.own():
            sessions.keep(value, request.prompt_tokens, now)
        return previous
