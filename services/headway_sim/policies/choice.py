"""From a peer's rule to costs: the core takes the lowest, so what the rule chooses must be the lowest.

The core itself breaks equal costs by fewest in flight, then longest not chosen. A peer that breaks them at random, or
must know what it chose, says so in its costs.
"""

import numpy as np
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.strategies.base import Costs
from headway_scheduler.strategies.view import View

__all__ = ["least", "only", "random_ties"]


def random_ties(cost: FloatColumn, view: View) -> FloatColumn:
    """The same order as `cost`, with equal ones in random order: the number of lower ones, plus less than 1."""
    ranked: FloatColumn = np.sort(cost).searchsorted(cost) + view.random()
    return ranked


def least(cost: FloatColumn, view: View) -> int:
    """Position of the lowest; equal ones as the core would: fewest in flight, then longest not chosen."""
    lowest = np.flatnonzero(cost == cost.min())
    if len(lowest) == 1:
        return int(lowest[0])
    order = np.lexsort((view.last_chosen[lowest], view.inflight[lowest]))
    return int(lowest[order[0]])


def only(position: int, count: int) -> Costs:
    """`position` and none of the other candidates."""
    cost = np.ones(count)
    cost[position] = 0.0
    return Costs(cost)
