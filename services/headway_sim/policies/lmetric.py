"""LMetric: prefill there × requests there.

Source: Zhang et al., "LMetric: Simple is Better – Multiplication May Be All You Need for LLM Request Scheduling"
(arXiv 2603.15202). argmin (queued new-prefill tokens + input − hit) × (in flight + 1), no parameters. The + 1 counts
the request itself: with the raw count an idle endpoint scores 0 and the cache is ignored. Ties are left to the core.
"""

from typing import ClassVar

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

from headway_sim.policies.prefill import uncached_tokens

__all__ = ["LMetric"]


class LMetric:
    """Cost: tokens × requests."""

    name: ClassVar[str] = "lmetric"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        return Costs((view.queued_prefill_tokens + uncached_tokens(request, view)) * (view.inflight + 1.0))
