"""Power of two choices: draw two endpoints at random, take the one with fewer requests in flight.

Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001); Envoy, NGINX, Ray Serve and the
SGLang router offer it. Two draws, without replacement; equal loads: either, at random.
"""

from typing import ClassVar

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

from headway_sim.policies.choice import only

__all__ = ["PowerOfTwo"]


class PowerOfTwo:
    """Cost: 0 for the less loaded of two random endpoints."""

    name: ClassVar[str] = "power_of_two"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        first, *others = np.argsort(view.random())[:2].tolist()
        load = view.inflight
        for second in others:
            if load[second] < load[first]:
                first = second
        return only(first, len(view))
