"""SGLang's (and vLLM's) router, policy cache_aware: affinity while the load is balanced, else the least loaded.

Source: github.com/sgl-project/sglang, the router's cache_aware policy. Imbalanced means max − min > 64 requests in
flight and max > 1.5 · min. Balanced: the longest prefix match, if match/length > 0.3 (the command's default; 0.5 in
the library); else the least loaded. The older router sent that last case to the smallest tree, `fallback =
"smallest_tree"` here: the endpoint that was given the fewest new prompt tokens so far, up to the size at which the
router evicts (2^24 characters).

Choices: the router's tree names any one of several equal holders, here at random; equal loads are left to the core,
which rotates. Memory, of the older fallback alone: tokens per endpoint. `cost` is called once a decision, so it
records them.
"""

from enum import StrEnum
from typing import ClassVar, Final

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View
from pydantic import Field

from headway_sim.policies.choice import least, only, random_ties
from headway_sim.policies.prefill import hit_ratio, uncached_tokens

__all__ = ["Fallback", "Sglang"]

_BYTES_PER_TOKEN: Final = 4.0


class Fallback(StrEnum):
    """Where a request goes that matches too little."""

    LEAST_LOADED = "least_loaded"
    SMALLEST_TREE = "smallest_tree"


class SglangParameters(Parameters):
    """What can be tuned."""

    cache_threshold: float = Field(0.3, ge=0.0, le=1.0, description="Matched part of the prompt above which it counts")
    balance_abs_threshold: float = Field(64.0, ge=0.0, le=1e6, description="Most requests over least, still balanced")
    balance_rel_threshold: float = Field(1.5, ge=1.0, le=1e6, description="Most requests by least, still balanced")
    fallback: Fallback = Field(Fallback.LEAST_LOADED, description="Where a request goes that matches too little")
    max_tree_bytes: int = Field(2**24, ge=1, description="Size at which a tree is evicted")


class Sglang:
    """Cost: less matched prefix first, in a balanced fleet with a good match; else requests in flight, or tree size."""

    name: ClassVar[str] = "sglang"
    parameters_type: ClassVar[type[Parameters]] = SglangParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: SglangParameters) -> None:
        self.parameters = parameters
        self._tree_tokens: dict[int, float] = {}

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate, and record the choice if tree sizes matter."""
        cost = self._cost(request, view)
        if self.parameters.fallback is not Fallback.SMALLEST_TREE:
            return Costs(cost)
        position = least(cost, view)
        slot = int(view.slots[position])
        grown = self._tree_tokens.get(slot, 0.0) + float(uncached_tokens(request, view)[position])
        self._tree_tokens[slot] = min(grown, self.parameters.max_tree_bytes / _BYTES_PER_TOKEN)
        return only(position, len(view))

    def _cost(self, request: Request, view: View) -> FloatColumn:
        load, p = view.inflight, self.parameters
        most, fewest = float(load.max()), float(load.min())
        if most - fewest > p.balance_abs_threshold and most > p.balance_rel_threshold * fewest:
            return load
        matched = hit_ratio(request, view)
        if matched.max() > p.cache_threshold:
            return random_ties(-matched, view)
        if p.fallback is Fallback.SMALLEST_TREE:
            return np.array([self._tree_tokens.get(slot, 0.0) for slot in view.slots.tolist()])
        return load
