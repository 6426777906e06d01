"""Random: each endpoint with the same chance."""

from typing import ClassVar

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

__all__ = ["Random"]


class Random:
    """Cost: a random number."""

    name: ClassVar[str] = "random"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = True
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        return Costs(view.random())
