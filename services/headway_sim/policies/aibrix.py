"""AIBrix's prefix-cache: the best prefix match among endpoints that are not much busier than the rest.

Source: github.com/vllm-project/aibrix, pkg/plugins/gateway/algorithms (prefix_cache.go and its README). If max − min
running > 8: the least loaded. Else, of those that hold any of the prefix and run at most mean + 1 σ: the highest
percentage matched, then the fewest running. None such: the least loaded. Ties at random.

Choices: "running" is the count that AIBrix's gateway keeps itself, so requests in flight here, never unknown. σ is
the population's. Percentages are whole numbers, as there. Newer versions gate by max > 2 · (mean + 1) as well;
FIELD.md section 1 and the documentation have the plain 8.
"""

from typing import ClassVar

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View
from pydantic import Field

from headway_sim.policies.choice import random_ties
from headway_sim.policies.prefill import hit_ratio

__all__ = ["Aibrix"]


class AibrixParameters(Parameters):
    """What can be tuned."""

    imbalance: float = Field(8.0, ge=0.0, le=1e6, description="Most running over least that is still balanced")
    deviations: float = Field(1.0, ge=0.0, le=100.0, description="Standard deviations over the mean still allowed")


class Aibrix:
    """Cost: percentage not matched, then requests in flight; or these alone."""

    name: ClassVar[str] = "aibrix"
    parameters_type: ClassVar[type[Parameters]] = AibrixParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: AibrixParameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        load = view.inflight
        most = float(load.max())
        if most - float(load.min()) > self.parameters.imbalance:
            return Costs(random_ties(load, view))
        percent = np.floor(hit_ratio(request, view) * 100.0)
        mean = load.sum() / len(load)
        deviation = np.sqrt(np.square(load - mean).sum() / len(load))
        usable = load <= mean + self.parameters.deviations * deviation
        # One percent outweighs any load; what matches nothing has its load alone.
        return Costs(random_ties(load - np.where(usable, percent * (most + 1.0), 0.0), view))
