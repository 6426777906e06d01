"""Prefix match: similar prompts to the same GPU (ARTICLE.md, algorithm 2).

The holders of the nearest similar fingerprint come first, and among them the one with the longest chain of cached
blocks. Where nothing matches, or the holders are much more loaded than the rest, it is least request.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import SLOWED_DOWN, Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

__all__ = ["PrefixMatch"]


class PrefixMatchParameters(Parameters):
    """What can be tuned."""

    imbalance: float = Field(
        16.0, ge=0.0, le=10_000.0, description="In-flight over the least loaded that ends affinity"
    )


class PrefixMatch:
    """Cost: in flight, less a bonus for similar prompts and a larger one for the exact prefix."""

    name: ClassVar[str] = "prefix_match"
    parameters_type: ClassVar[type[Parameters]] = PrefixMatchParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = SLOWED_DOWN

    def __init__(self, parameters: PrefixMatchParameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        load = view.inflight
        matched = np.minimum(1.0, view.hit_tokens / max(1, request.prompt_tokens))
        bonus = np.where(view.similar, 1.0, 0.0) + 2.0 * matched
        balanced = load - load.min() <= self.parameters.imbalance
        # Bonuses outweigh any load within the bound; beyond it only the load counts.
        return Costs(load - np.where(balanced, bonus * (self.parameters.imbalance + 1.0), 0.0))
