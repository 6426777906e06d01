"""Load on the local stack: the article's workload under a strategy, a flip under load, a replayed trace."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headway_sim.driver import (
    LoadResult,
    OnOutcome,
    Summary,
    Target,
    run_closed_loop,
    summarise,
)
from headway_sim.workloads import ArticleWorkload

from headway_cli.local.stack import LocalStack

__all__ = ["Run", "flip_under_load", "reservations_left", "run_article", "target_of"]

FLIP_EVERY_S: Final = 0.25
_SETTLE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run, in the engines' time. `overhead_ms`: what the client saw over what the engines say."""

    strategy: str
    summary: Summary
    overhead_ms: float | None


def target_of(stack: LocalStack) -> Target:
    """The stack's gateway; sessions take the tenants in turn."""
    tenants = stack.options.tenants

    def headers(session_id: str | None) -> dict[str, str]:
        if not tenants or session_id is None:
            return {}
        number = int(session_id.rpartition("-")[2])
        return {"Authorization": f"Bearer {tenants[number % len(tenants)].key}", "x-headway-session": session_id}

    return Target(stack.gateway_url, stack.options.model, headers=headers)


def run_article(stack: LocalStack, strategy: str, workload: ArticleWorkload, on_outcome: OnOutcome) -> Run:
    """Play the workload under `strategy`, from empty caches."""
    stack.use_strategy(strategy)
    stack.clear_caches()
    target = target_of(stack)
    result = asyncio.run(
        run_closed_loop(target, workload.conversations(), concurrency=workload.concurrency, on_outcome=on_outcome)
    )
    return Run(strategy, summarise(result, speedup=stack.options.speedup), _overhead_ms(stack, result))


def flip_under_load(
    stack: LocalStack, strategies: Sequence[str], workload: ArticleWorkload, on_outcome: OnOutcome
) -> tuple[Summary, int]:
    """Play the workload while the default strategy changes all the time; returns how often it did."""

    async def run() -> tuple[LoadResult, int]:
        load = asyncio.create_task(
            run_closed_loop(
                target_of(stack), workload.conversations(), concurrency=workload.concurrency, on_outcome=on_outcome
            )
        )
        flips = 0
        while not load.done():
            await asyncio.to_thread(stack.use_strategy, strategies[flips % len(strategies)])
            flips += 1
            await asyncio.wait([load], timeout=FLIP_EVERY_S)
        return await load, flips

    result, flips = asyncio.run(run())
    return summarise(result, speedup=stack.options.speedup), flips


def reservations_left(count: Callable[[], int]) -> int:
    """How many reservations are still held once the last reports had time to arrive."""
    deadline = time.monotonic() + _SETTLE_S
    while count() and time.monotonic() < deadline:
        time.sleep(0.05)
    return count()


def _overhead_ms(stack: LocalStack, result: LoadResult) -> float | None:
    """Mean TTFT the client saw less the one the engines report, in the engines' milliseconds."""
    extra = [
        outcome.ttft_ms * stack.options.speedup - outcome.virtual.ttft_ms
        for outcome in result.outcomes
        if outcome.ttft_ms is not None and outcome.virtual is not None
    ]
    return sum(extra) / len(extra) if extra else None
