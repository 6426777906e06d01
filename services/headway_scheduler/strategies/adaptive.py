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

from typing import ClassVar, Final

import numpy as np
from pydantic import Field

from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.learning.priors import FREE_TOKENS
from headway_scheduler.strategies.base import SLOWED_DOWN, Costs, Parameters, SoftGuard, View

__all__ = ["Adaptive"]

_STEPS_SEEN: Final = 1.5
"""Steps that a request meets before its first token: its own, and half of the one it arrives in."""


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
        inflight, decoding, queued, queued_ms, step, busy, tok, base, pair, ctx, budget = view.load()
        prompt, ones = request.prompt_tokens, _filled(len(view), 1.0)
        hit = np.minimum(view.hit_tokens, _filled(len(view), max(0, prompt - 1)))
        uncached = prompt - hit
        work = tok * uncached + pair * uncached * (hit + uncached / 2)
        prefill = work + base * np.maximum(ones, uncached / budget)
        # When the first token will be there.
        steps = np.maximum(ones, (queued + uncached) / budget)
        free = (FREE_TOKENS - decoding) * tok * steps
        ttft = np.maximum(_filled(len(view), 0.0), queued_ms + work - free) + step * (steps + 0.5 * busy)
        transfer = view.transfer_ms
        if transfer is not None:
            ttft, prefill = ttft + transfer, prefill + transfer
        delays = self.parameters.externality * prefill + _STEPS_SEEN * (ctx * prompt + tok)
        cost = ttft + delays * inflight
        invested = view.invested_tokens(self.parameters.replication) if self.parameters.replication else None
        if invested is not None:
            cost = cost - tok * np.minimum(invested, uncached)
        return Costs(cost, ttft, prefill)


def _filled(count: int, value: float) -> FloatColumn:
    """An array of one value: numpy compares two arrays several times as fast as an array and a number."""
    found = np.empty(count)
    found.fill(value)
    return found
