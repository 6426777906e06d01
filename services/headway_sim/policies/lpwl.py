"""LPWL, least prefill work left: prefill tokens there, with this request's own.

Source: the agentic-kvc study of routing agents' requests (2026), which derives it from LMetric by dropping the factor.
argmin queued prefill tokens + max(0, input − hit); no parameters; ties by fewest requests, then rotating, which is what
the core does.
"""

from typing import ClassVar

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

from headway_sim.policies.prefill import uncached_tokens

__all__ = ["Lpwl"]


class Lpwl:
    """Cost: tokens."""

    name: ClassVar[str] = "lpwl"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        return Costs(view.queued_prefill_tokens + uncached_tokens(request, view))
