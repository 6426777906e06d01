"""Measure the engine model: a Mooncake trace, round robin over eight engines, on one core.

Usage: python tools/bench_engine.py TRACE [--limit 4000] [--rate 1.0]
"""

import argparse
import time
from pathlib import Path

from headway_sim.engine import HARDWARE, Engine, EngineRequest
from headway_sim.traces import HashedPrompt, TraceRequest, load_trace

ENGINES = 8
BLOCKS_PER_HASH_ID = 32


class Lane:
    """One engine and how far it has come."""

    def __init__(self) -> None:
        self.engine = Engine(HARDWARE["a100-40g-8b"])
        self.clock_ms = 0.0
        self.steps = 0

    def advance(self, until_ms: float) -> None:
        """Run every step that begins before `until_ms`."""
        while self.clock_ms < until_ms:
            step = self.engine.step(self.clock_ms, until_ms)
            if step is None:
                self.clock_ms = until_ms
                return
            self.clock_ms = step.end_ms
            self.steps += step.steps


def engine_request(index: int, request: TraceRequest) -> EngineRequest:
    """A hashed trace request as the engine takes it."""
    if not isinstance(request.prompt, HashedPrompt):
        raise SystemExit("the trace must give hash ids")
    return EngineRequest(
        str(index),
        request.prompt.tokens,
        request.output_tokens,
        keys=request.prompt.hash_ids,
        blocks_per_key=BLOCKS_PER_HASH_ID,
    )


def main() -> None:
    """Run the trace and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=1.0)
    given = parser.parse_args()
    trace = load_trace(given.trace, limit=given.limit)
    lanes = [Lane() for _ in range(ENGINES)]
    began = time.perf_counter()
    for index, request in enumerate(trace):
        lane = lanes[index % ENGINES]
        lane.advance(request.arrival_ms / given.rate)
        lane.engine.add(engine_request(index, request), request.arrival_ms / given.rate)
    for lane in lanes:
        lane.advance(float("inf"))
    took_s = time.perf_counter() - began
    steps = sum(lane.steps for lane in lanes)
    print(
        f"{len(trace)} requests, {steps} steps in {took_s:.2f} s: "
        f"{len(trace) / took_s:.0f} requests/s, {steps / took_s:.0f} steps/s"
    )


if __name__ == "__main__":
    main()
