"""The lower bound: no request ever waits, and every earlier prefix is cached everywhere."""

import heapq
from collections.abc import Sequence

import numpy as np

from headway_sim.engine import BLOCK_TOKENS, EngineRequest, Hardware
from headway_sim.simulation.jobs import Job, Source
from headway_sim.simulation.metrics import Distribution, distribution

__all__ = ["lower_bound"]


def lower_bound(source: Source, engines: Sequence[Hardware]) -> dict[str, Distribution | float]:
    """TTFT, TPOT, E2E and hit ratio if each request had the fleet's fastest engine for itself.

    Prefixes count as cached from their arrival on, in a memory without end; as in the engine, a full hit still
    recomputes its last block.
    """
    kinds = sorted(set(engines), key=lambda each: each.name)
    seen: set[int] = set()
    ttft, tpot, e2e = [], [], []
    prompt_tokens = cached_tokens = 0
    arrivals = source.arrivals()
    heap: list[tuple[float, int, Job, bool]] = []
    serial = 0

    def push(arrival: tuple[float, Job] | None, by_itself: bool) -> None:
        nonlocal serial
        if arrival is not None:
            serial += 1
            heapq.heappush(heap, (arrival[0], serial, arrival[1], by_itself))

    push(next(arrivals, None), True)
    while heap:
        now_ms, _, job, by_itself = heapq.heappop(heap)
        if by_itself:
            push(next(arrivals, None), True)
        request = job.engine
        cached = _cached(request, seen)
        seen.update(request.keys)
        first, last = min(_alone(request, cached, each) for each in kinds)
        ttft.append(first)
        e2e.append(last)
        if request.output_tokens > 1:
            tpot.append((last - first) / (request.output_tokens - 1))
        prompt_tokens += request.prompt_tokens
        cached_tokens += cached
        push(source.after(job, now_ms + last, answered=True), False)
    return {
        "ttft_ms": distribution(np.array(ttft)),
        "tpot_ms": distribution(np.array(tpot)),
        "e2e_ms": distribution(np.array(e2e)),
        "hit_ratio": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
    }


def _cached(request: EngineRequest, seen: set[int]) -> int:
    """Tokens of the longest prefix seen before."""
    limit = (request.prompt_tokens - 1) // BLOCK_TOKENS
    blocks = 0
    for key in request.keys:
        if key not in seen or blocks >= limit:
            break
        blocks += request.blocks_per_key
    return min(blocks, limit) * BLOCK_TOKENS


def _alone(request: EngineRequest, cached: int, hardware: Hardware) -> tuple[float, float]:
    """When its first and last token come on an engine that does nothing else."""
    computed, ms = cached, 0.0
    while computed < request.prompt_tokens:
        count = min(request.prompt_tokens - computed, hardware.step_budget_tokens)
        ms += hardware.step_ms(count, count * (computed + count / 2), 0)
        computed += count
    steps = request.output_tokens - 1
    context = steps * request.prompt_tokens + steps * (steps - 1) // 2
    return ms, ms + steps * hardware.base_ms + hardware.context_ms * context
