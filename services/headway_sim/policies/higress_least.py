"""Higress's global_least_request: fewest requests in flight, counted for all gateways together.

Source: github.com/alibaba/higress, plugins/wasm-go/extensions/ai-load-balancer/global_least_request. The count is
shared (there: in Redis; here: the scheduler's own), every request counts 1, ties are broken at random.
"""

from typing import ClassVar

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

from headway_sim.policies.choice import random_ties

__all__ = ["HigressLeast"]


class HigressLeast:
    """Cost: requests in flight."""

    name: ClassVar[str] = "higress_least"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        return Costs(random_ties(view.inflight, view))
