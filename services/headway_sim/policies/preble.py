"""Preble's E2: exploit a cached prefix where most of the prompt is cached, else explore; move load off the busiest.

Source: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving" (ICLR 2025), and
github.com/WukLab/preble. If cached > uncached tokens: the least-loaded holder of the longest prefix. Else argmin load
+ own prefill. If that is the busiest endpoint, and its load > 1.5 × the least: the least-loaded one instead, once the
window has 50 requests. Load is what an endpoint was given in the last 3 minutes: each request's prefill of what was
not cached, and its decode, in ms.

Choices: decode counts 45 output tokens (Preble's default where no limit is given) at one step each. The cost of what
a placement evicts is left out, as FIELD.md section 1 does, and a popular prefix is copied only by rebalancing. Ties:
fewest in flight, then longest not chosen.

Memory: the window. `cost` is called once a decision and its only lowest cost is the choice, so it records it.
"""

from collections import deque
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View
from pydantic import Field

from headway_sim.policies.choice import least, only
from headway_sim.policies.prefill import own_prefill_ms

__all__ = ["Preble"]


class PrebleParameters(Parameters):
    """What can be tuned."""

    window_s: float = Field(180.0, gt=0.0, le=1e5, description="Seconds a placed request counts as load")
    imbalance: float = Field(1.5, ge=1.0, le=1000.0, description="Most load by least that moves requests away")
    rebalance_after: int = Field(50, ge=0, le=100_000, description="Requests in the window before load is moved")
    output_tokens: float = Field(45.0, ge=0.0, le=1e6, description="Output a request is expected to have")


class Preble:
    """Cost: 0 for the endpoint chosen."""

    name: ClassVar[str] = "preble"
    parameters_type: ClassVar[type[Parameters]] = PrebleParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters: PrebleParameters) -> None:
        self.parameters = parameters
        self._window: deque[tuple[float, int, int]] = deque()
        # In whole microseconds, so that what is added and taken away again leaves nothing.
        self._load_us: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate, and record the choice."""
        self._expire(now, view.columns.capacity)
        load_ms = self._load_us[view.slots] / 1e3
        prefill = own_prefill_ms(request, view)
        position = self._choose(request, view, load_ms, prefill)
        self._record(int(view.slots[position]), float(prefill[position]) + self._decode_ms(view, position), now)
        return only(position, len(view))

    def _choose(self, request: Request, view: View, load_ms: FloatColumn, prefill: FloatColumn) -> int:
        hit = view.hit_tokens
        longest = float(hit.max())
        if longest > request.prompt_tokens - longest:
            position = least(np.where(hit == longest, load_ms, np.inf), view)
        else:
            position = least(load_ms + prefill, view)
        most, fewest = float(load_ms.max()), float(load_ms.min())
        busy = load_ms[position] == most and most > self.parameters.imbalance * fewest
        if busy and len(self._window) >= self.parameters.rebalance_after:
            return least(load_ms, view)
        return position

    def _decode_ms(self, view: View, position: int) -> float:
        step_ms = float(view.columns.base_ms[view.slots[position]])
        return 0.0 if np.isnan(step_ms) else self.parameters.output_tokens * step_ms

    def _record(self, slot: int, work_ms: float, now: float) -> None:
        work_us = round(work_ms * 1e3)
        self._load_us[slot] += work_us
        self._window.append((now + self.parameters.window_s, slot, work_us))

    def _expire(self, now: float, capacity: int) -> None:
        if len(self._load_us) < capacity:
            self._load_us = np.concatenate([self._load_us, np.zeros(capacity - len(self._load_us), np.int64)])
        while self._window and self._window[0][0] <= now:
            _, slot, work_us = self._window.popleft()
            self._load_us[slot] -= work_us
