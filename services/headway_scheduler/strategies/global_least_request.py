"""Global least request: in-flight requests weighted by task complexity (ARTICLE.md, algorithm 1).

A has 5 long tasks (15 units), B has 10 short ones (10 units): the next request goes to B.
"""

from typing import ClassVar

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard, View

__all__ = ["GlobalLeastRequest"]


class GlobalLeastRequest:
    """Cost: the sum of the task weights in flight."""

    name: ClassVar[str] = "global_least_request"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset({SoftGuard.HEAT})

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        return Costs(view.weighted_inflight)
