"""Adaptive, the default: predicted TTFT there, plus what the request costs the others there (after FIELD.md section 1).

An engine computes all that is queued, and a token for each request that decodes, in steps of at most `budget` tokens;
prompts in one step share its fixed time. n uncached tokens after `hit` cached ones, q tokens and W ms of work queued,
B requests decoding over C tokens of context:

w     = tok·n + pair·n·(hit + n/2)                       this request's work, ms
step  = base + ctx·C                                     a step without new tokens, ms
steps = max(1, (q + n)/budget)
TTFT  = max(0, W + w − (128 − B)·tok·steps) + steps·step + step/2 if the engine is busy
cost  = TTFT
      + externality·p·inflight                           its prefill p = w + base·max(1, n/budget) delays the others
      + 1.5·inflight·(ctx·prompt + tok)                  its decoding lengthens a step and a half of those to come
      − tok·invested                                     what it prefills there for others, too
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from headway_scheduler.domain.request import Request
from headway_scheduler.learning.priors import FREE_TOKENS
from headway_scheduler.strategies.base import SLOWED_DOWN, Costs, Parameters, SoftGuard
from headway_scheduler.strategies.pricing import COST, NONE, PREFILL, STEPS_SEEN, TTFT, price
from headway_scheduler.strategies.view import View

__all__ = ["Adaptive"]


class AdaptiveParameters(Parameters):
    """What can be tuned."""

    externality: float = Field(
        0.1, ge=0.0, le=10.0, description="What a millisecond of prefill costs each request there"
    )
    replication: float = Field(
        2.0,
        ge=0.0,
        le=100.0,
        description="Requests to come that each one in flight with the same prefix stands for; 0: never replicate",
    )
    window_ms: float = Field(
        200.0,
        ge=0.0,
        le=60_000.0,
        description="Prefill queued on an engine beyond which requests wait here; 0: never wait",
    )


class Adaptive:
    """Cost: milliseconds."""

    name: ClassVar[str] = "adaptive"
    parameters_type: ClassVar[type[Parameters]] = AdaptiveParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = SLOWED_DOWN | {SoftGuard.KV_ROOM}

    def __init__(self, parameters: AdaptiveParameters) -> None:
        self.parameters = parameters

    @property
    def window_ms(self) -> float | None:
        """How much prefill an engine may have queued before requests for it wait in the scheduler."""
        return self.parameters.window_ms or None

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        c, tentative = view.columns, view.tentative
        ahead, ahead_ms = (NONE, NONE) if tentative is None else (tentative.inflight, tentative.prefill_ms)
        depths, asking = view.demand if self.parameters.replication else (NONE, NONE)
        transfer_ms = view.transfer_ms
        found = np.empty((3, len(view)))
        price(
            c.inflight,
            c.decoding,
            c.prefill_tokens,
            c.prefill_work_us,
            c.context_tokens,
            c.external,
            c.tok_ms,
            c.base_ms,
            c.pair_ms,
            c.ctx_ms,
            c.budget_tokens,
            view.slots,
            view.hit_tokens,
            NONE if transfer_ms is None else transfer_ms,
            ahead,
            ahead_ms,
            depths,
            asking,
            request.prompt_tokens,
            FREE_TOKENS,
            self.parameters.externality,
            self.parameters.replication,
            found,
        )
        if c.handicapped:  # seldom; the phantom requests cost what real ones do, and make no TTFT longer
            step_ms = view.read(c.ctx_ms) * request.prompt_tokens + view.read(c.tok_ms)
            delays = self.parameters.externality * found[PREFILL] + STEPS_SEEN * step_ms
            found[COST] += delays * view.read(c.handicap)
        return Costs(found[COST], found[TTFT], found[PREFILL])
