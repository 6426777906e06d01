"""NVIDIA Dynamo's KV router: blocks still to prefill there, and blocks being decoded there.

Source: github.com/ai-dynamo/dynamo, docs of the KV router and lib/kv-router: weight · prefill blocks + active blocks,
the lowest wins; weight 1, temperature 0 (deterministic but for ties, which are broken at random). Prefill blocks are
those of the prompts in prefill there and of the new one, less its cached ones (whole blocks); a block has 16 tokens.

Choices: active blocks are the contexts in decode there. Dynamo counts a prompt's blocks as active from its choice on;
the columns know, of a prompt in prefill, only the uncached tokens, so these count here as active too. The new
request's own blocks are the same everywhere and left out. What requests have generated since is not counted, as by
default there.
"""

from typing import ClassVar

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View
from pydantic import Field

from headway_sim.policies.choice import random_ties

__all__ = ["Dynamo"]


class DynamoParameters(Parameters):
    """What can be tuned."""

    overlap_weight: float = Field(1.0, ge=0.0, le=1000.0, description="Weight of prefill against decode")
    block_tokens: int = Field(16, ge=1, le=4096, description="Tokens a block")


class Dynamo:
    """Cost: blocks."""

    name: ClassVar[str] = "dynamo"
    parameters_type: ClassVar[type[Parameters]] = DynamoParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: DynamoParameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        block = self.parameters.block_tokens
        queued = view.queued_prefill_tokens
        credit = np.floor(np.minimum(view.hit_tokens, request.prompt_tokens) / block) * block
        prefill = (queued + request.prompt_tokens - credit) / block
        active = np.ceil((view.context_tokens + queued) / block)
        return Costs(random_ties(self.parameters.overlap_weight * prefill + active, view))
