"""Higress's prefix_cache: a conversation goes where its longest known beginning went; a new one to the least loaded.

Source: github.com/alibaba/higress, plugins/wasm-go/extensions/ai-load-balancer/prefix_cache. The prompt is cut at
user turns, one chained hash a turn; the longest chain that is known names the host; the turns beyond it are recorded
for that host. Every known turn of the chain lives on for another 1800 s. Nothing known: least request, ties at
random.

Memory: turn → endpoint. `cost` is called once a decision and its only lowest cost is the choice, so it records it.

Choices: Higress needs a chat. Token ids, block hashes and plain text show no turns; there the end of each earlier
prompt stands for one, cut to whole index blocks. As its last block may have been cut by its trace, its last 4 blocks
all count as its end, but none of the first 7 (`least_blocks` 8: 1,024 tokens): at that depth all conversations may
still look the same, as their true first turns would not. A host that may not be chosen now counts as unknown, and the
turns are recorded for the new one. Hashes are of no tenant, as there.
"""

from typing import ClassVar

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View
from pydantic import Field

from headway_sim.policies.choice import only, random_ties
from headway_sim.policies.turns import Ends, TurnMemory, turn_ends

__all__ = ["HigressPrefix"]


class HigressPrefixParameters(Parameters):
    """What can be tuned."""

    ttl_s: float = Field(1800.0, gt=0.0, le=1e6, description="Seconds a turn is known after its last use")
    least_blocks: int = Field(
        8, ge=1, le=4096, description="Blocks before which no turn can end, if turns are unmarked"
    )


class HigressPrefix:
    """Cost: 0 for the host of the longest known chain, else for the least loaded endpoint."""

    name: ClassVar[str] = "higress_prefix"
    parameters_type: ClassVar[type[Parameters]] = HigressPrefixParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: HigressPrefixParameters) -> None:
        self.parameters = parameters
        self._hosts: TurnMemory[int] = TurnMemory(parameters.ttl_s)

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate, and record the choice."""
        self._hosts.expire(now)
        ends = turn_ends(request)
        known = self._hosts.longest(ends.hashes)
        if known >= 0:
            at = np.flatnonzero(view.slots == self._hosts.get(ends.hashes[known]))
            if len(at):
                self._extend(ends, known, int(view.slots[at[0]]), now)
                return only(int(at[0]), len(view))
        position = int(random_ties(view.inflight, view).argmin())
        self._extend(ends, -1, int(view.slots[position]), now)
        return only(position, len(view))

    def _extend(self, ends: Ends, known: int, slot: int, now: float) -> None:
        """Turns up to index `known` keep their hosts and live on; the others are recorded for `slot`."""
        hashes = ends.hashes
        if ends.marked:
            for index, value in enumerate(hashes):
                self._hosts.keep(value, self._hosts.get(value) if index <= known else slot, now)
            return
        if known >= 0:
            self._hosts.touch(hashes[known], now)
        for value in ends.own(self.parameters.least_blocks):
            self._hosts.keep(value, slot, now)
