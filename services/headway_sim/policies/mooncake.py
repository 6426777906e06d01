"""Mooncake's Conductor: the lowest predicted TTFT.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation" (FAST '25), KVCache-centric scheduling.
argmin predicted queue time + prefill time given the hit. Both come from the endpoint's coefficients. Ties are left to
the core.

Choices: engines here share no cache pool, so the paper's transfer of a better prefix from another host, and its
balancing threshold, have no place; nor has its choice of a decode host, or its early rejection.
"""

from typing import ClassVar

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

from headway_sim.policies.prefill import own_prefill_ms

__all__ = ["Mooncake"]


class Mooncake:
    """Cost: milliseconds."""

    name: ClassVar[str] = "mooncake"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        return Costs(view.queued_prefill_ms + own_prefill_ms(request, view))
