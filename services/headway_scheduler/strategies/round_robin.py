"""Round robin: the endpoint not chosen for longest. A new endpoint joins the rotation; the others keep their turn."""

from typing import ClassVar

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

__all__ = ["RoundRobin"]


class RoundRobin:
    """Cost: the number of the decision that chose the endpoint last."""

    name: ClassVar[str] = "round_robin"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = True
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        return Costs(view.last_chosen.astype(float))
