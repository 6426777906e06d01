"""Consistent hash with bounded loads: the same key to the same endpoint, unless that one has too much already.

Rendezvous hashing (Thaler and Ravishankar 1998) orders the endpoints for a key; one whose load is above
`(total + 1) / n · load_factor` is passed over for the next (Mirrokni, Thorup and Zadimoghaddam 2018).
"""

from typing import ClassVar

import numpy as np
from pydantic import Field
from xxhash import xxh3_64_intdigest

from headway_scheduler.domain.request import BlocksPrompt, Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

__all__ = ["ConsistentHash"]


class ConsistentHashParameters(Parameters):
    """What can be tuned."""

    load_factor: float = Field(1.25, ge=1.0, le=10.0, description="Load allowed over the mean")
    prefix_bytes: int = Field(
        100, ge=1, le=100_000, description="Bytes of the prompt in the key, if no session is named"
    )


class ConsistentHash:
    """Cost: the endpoint's place in the key's order; those over their bound come after all others."""

    name: ClassVar[str] = "consistent_hash"
    parameters_type: ClassVar[type[Parameters]] = ConsistentHashParameters
    classic: ClassVar[bool] = True
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: ConsistentHashParameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        key = np.uint64(xxh3_64_intdigest(self._key(request)))
        mixed = (view.ring ^ key) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        place = (mixed ^ (mixed >> np.uint64(32))) / 2.0**64
        load = view.inflight
        bound = (load.sum() + 1) / len(view) * self.parameters.load_factor
        return Costs(np.where(load > bound, 1.0 + place, place))

    def _key(self, request: Request) -> bytes:
        prompt = request.prompt
        if request.session_id:
            key = request.session_id.encode()
        elif prompt is None:
            key = request.request_id.encode()
        elif isinstance(prompt, BlocksPrompt):
            key = repr(prompt.hashes[:1]).encode()
        else:
            key = prompt.data[: self.parameters.prefix_bytes]
        return request.domain.encode() + b"\0" + key
