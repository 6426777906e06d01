"""Adaptive, the default: predicted TTFT there, plus what the request costs the others there (FIELD.md section 1).

p    = tok·n + pair·n·(hit + n/2) + base·max(1, n/budget)     this request's prefill, n uncached tokens
       + transfer                                             of cached tokens that are not on the GPU
rho  = (base + ctx·decode context) / (budget·tok)             how much decoding slows prefill there
cost = (queued prefill + p)·(1 + rho) + externality·p·inflight
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from headway_scheduler.domain.request import Request
from headway_scheduler.learning.cost_model import prefill_ms
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard, View

__all__ = ["Adaptive"]


class AdaptiveParameters(Parameters):
    """What can be tuned."""

    externality: float = Field(
        0.1, ge=0.0, le=10.0, description="What a millisecond of prefill costs each request there"
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
    guards: ClassVar[frozenset[SoftGuard]] = frozenset({SoftGuard.HEAT, SoftGuard.KV_ROOM})

    def __init__(self, parameters: AdaptiveParameters) -> None:
        self.parameters = parameters

    @property
    def window_ms(self) -> float | None:
        """How much prefill an engine may have queued before requests for it wait in the scheduler."""
        return self.parameters.window_ms or None

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        c, slots = view.columns, view.slots
        hit = np.minimum(view.hit_tokens, max(0, request.prompt_tokens - 1))
        prefill = prefill_ms(c, slots, request.prompt_tokens - hit, hit)
        transfer = view.transfer_ms
        if transfer is not None:
            prefill = prefill + transfer
        slowed = (c.base_ms[slots] + c.ctx_ms[slots] * view.context_tokens) / (c.budget_tokens[slots] * c.tok_ms[slots])
        ttft = (view.queued_prefill_ms + prefill) * (1.0 + slowed)
        return Costs(ttft + self.parameters.externality * prefill * view.inflight, ttft, prefill)
