"""What a request's own prefill is: tokens not cached there, and the time they take there."""

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.learning.cost_model import prefill_ms
from headway_scheduler.strategies.view import View

__all__ = ["hit_ratio", "own_prefill_ms", "uncached_tokens"]


def uncached_tokens(request: Request, view: View) -> FloatColumn:
    """Prompt tokens that each endpoint would have to compute: `max(0, input − hit)`."""
    tokens: FloatColumn = np.maximum(0.0, request.prompt_tokens - view.hit_tokens)
    return tokens


def hit_ratio(request: Request, view: View) -> FloatColumn:
    """Part of the prompt cached on each endpoint, 0 to 1; 0 where the prompt's length is unknown."""
    ratio: FloatColumn = np.minimum(1.0, view.hit_tokens / max(1, request.prompt_tokens))
    return ratio


def own_prefill_ms(request: Request, view: View) -> FloatColumn:
    """Time to prefill the uncached tokens on each endpoint.

    An endpoint of unknown speed counts as the mean of the known ones, or as 1 ms a token if none is known.
    """
    uncached = uncached_tokens(request, view)
    found = prefill_ms(view.columns, view.slots, uncached, np.minimum(view.hit_tokens, request.prompt_tokens))
    unknown = np.isnan(found)
    if not unknown.any():
        return found
    if unknown.all():
        return uncached
    return np.where(unknown, found[~unknown].mean(), found)
