"""Global least request: in-flight requests weighted by task complexity (ARTICLE.md, algorithm 1).

A has 5 long tasks (15 units), B has 10 short ones (10 units): the next request goes to B.

A class weighs its mean cost over that of SHORT, learned from history (`History.weight`), and the hand-set 1, 1.5 and 3
before there is any. A request keeps the weight it was given when it was placed.
"""

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import SLOWED_DOWN, Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

__all__ = ["GlobalLeastRequest", "WeightMode"]


class WeightMode(StrEnum):
    """How far learned weights may go: the article's 1 to 3, or as far as the history says."""

    ARTICLE = "article"
    LEARNED = "learned"


class GlobalLeastRequestParameters(Parameters):
    """What can be tuned."""

    mode: WeightMode = Field(
        WeightMode.ARTICLE, description="article: weights stay within 1 to 3; learned: as the history says"
    )


class GlobalLeastRequest:
    """Cost: the sum of the task weights in flight."""

    name: ClassVar[str] = "global_least_request"
    parameters_type: ClassVar[type[Parameters]] = GlobalLeastRequestParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = SLOWED_DOWN

    def __init__(self, parameters: GlobalLeastRequestParameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        learned = self.parameters.mode is WeightMode.LEARNED
        return Costs(view.uncapped_inflight if learned else view.weighted_inflight)
