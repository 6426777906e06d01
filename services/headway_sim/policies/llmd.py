"""llm-d's (Gateway API Inference Extension's) default scorers: prefix, queue and KV use, weighted.

Source: github.com/llm-d/llm-d-inference-scheduler and kubernetes-sigs/gateway-api-inference-extension, default
profile: prefix match ratio × 3, (max − queue)/(max − min) × 2, (1 − KV use) × 2; the highest sum, ties at random.
Equal queues all score 1.

Queue and KV use are what the engines reported, up to a second ago. Choice: unknown counts as 0, as an endpoint that
was not scraped yet has there: an empty queue and a free cache.
"""

from typing import ClassVar

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View
from pydantic import Field

from headway_sim.policies.choice import random_ties
from headway_sim.policies.prefill import hit_ratio

__all__ = ["Llmd", "queue_score"]


class LlmdParameters(Parameters):
    """What can be tuned."""

    prefix_weight: float = Field(3.0, ge=0.0, le=1000.0, description="Weight of the prompt's cached part")
    queue_weight: float = Field(2.0, ge=0.0, le=1000.0, description="Weight of a short queue")
    kv_weight: float = Field(2.0, ge=0.0, le=1000.0, description="Weight of a free KV cache")


class Llmd:
    """Cost: the negative score."""

    name: ClassVar[str] = "llmd"
    parameters_type: ClassVar[type[Parameters]] = LlmdParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: LlmdParameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        p = self.parameters
        free = 1.0 - _known(view.kv_use)
        score = p.prefix_weight * hit_ratio(request, view) + p.queue_weight * queue_score(view) + p.kv_weight * free
        return Costs(random_ties(-score, view))


def queue_score(view: View) -> FloatColumn:
    """1 for the shortest queue, 0 for the longest."""
    queue = _known(view.waiting)
    longest, shortest = queue.max(), queue.min()
    if longest == shortest:
        return np.ones(len(view))
    score: FloatColumn = (longest - queue) / (longest - shortest)
    return score


def _known(column: FloatColumn) -> FloatColumn:
    return np.where(np.isnan(column), 0.0, column)
