"""The simulator against the real-time emulator: the same sessions on the same engines, by the engines' own clocks.

The emulator runs the article's workload over HTTP; the simulator replays the arrivals that its engines saw.
"""

import asyncio
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

import numpy as np
import pytest
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_sim.driver import Target, run_closed_loop
from headway_sim.emulator import Emulator, EmulatorConfig
from headway_sim.engine import HARDWARE
from headway_sim.simulation import Policy, SessionSource, Setup, simulate
from headway_sim.workloads import ArticleWorkload

A100 = HARDWARE["a100-40g-8b"]
SPEEDUP = 40.0
# The article's 60 sessions of 5 turns, 20 at a time, dealt out to eight engines: each has sessions of its own.
WORKLOADS = [ArticleWorkload(sessions=7 + n % 2, concurrency=2 + n % 2, seed=n) for n in range(8)]


class Pinned:
    """A session's engine is written in front of its name."""

    name: ClassVar[str] = "pinned"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = True
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()

    def __init__(self, parameters):
        self.parameters = parameters

    def cost(self, request, view, now):
        engine = int(request.session_id.partition("/")[0])
        return Costs((view.slots != engine).astype(np.float64))


@dataclass(frozen=True)
class OneSession:
    """A workload of a single session of another."""

    workload: ArticleWorkload
    session: int
    concurrency: ClassVar[None] = None

    @property
    def requests(self):
        return self.workload.turns

    def schedule(self):
        yield 0.0, self.workload.conversation(self.session)


class Replay:
    """Jobs at given times."""

    def __init__(self, jobs):
        self.jobs = sorted(jobs, key=lambda each: each[0])
        self.total = len(jobs)

    def arrivals(self):
        return iter(self.jobs)

    def after(self, job, now_ms, *, answered):
        return None


def turns(engine, session):
    """The jobs of one session, its turns in order."""
    source = SessionSource(OneSession(WORKLOADS[engine], session))
    job = next(source.arrivals())[1]
    while True:
        request = replace(job.engine, request_id=f"{engine}/{session}/{job.engine.request_id}")
        yield replace(job, session_id=f"{engine}/session-{session}", engine=request)
        following = source.after(job, 0.0, answered=True)
        if following is None:
            return
        job = following[1]


async def emulated():
    """Every engine's outcomes."""
    config = EmulatorConfig(A100, ("demo",), "127.0.0.1", (0,) * len(WORKLOADS), speedup=SPEEDUP)
    async with Emulator(config) as running:
        loads = await asyncio.gather(
            *(
                run_closed_loop(
                    Target(f"http://{address}", "demo"), workload.conversations(), concurrency=workload.concurrency
                )
                for address, workload in zip(running.addresses, WORKLOADS, strict=True)
            )
        )
    return [load.outcomes for load in loads]


def simulated(emulated_outcomes):
    """Every request's record, when it arrives as it did there."""
    jobs = []
    for engine, outcomes in enumerate(emulated_outcomes):
        for session in range(WORKLOADS[engine].sessions):
            own = [each for each in outcomes if each.session_id == f"session-{session}"]
            arrivals_ms = sorted(each.virtual.arrival_ms for each in own)
            jobs += zip(arrivals_ms, turns(engine, session), strict=True)
    policy = Policy("pinned", "pinned")
    return simulate(
        policy, {"pinned": Pinned, "least_request": Pinned, "round_robin": Pinned}, Replay(jobs), Setup([A100] * 8)
    ).records


async def test_means_of_the_article_workload_agree():
    by_engine = await emulated()
    outcomes = [outcome for each in by_engine for outcome in each]
    records = simulated(by_engine)
    assert len(outcomes) == len(records) == 300
    ttft_ms = fmean(record.first_token_ms - record.arrival_ms for record in records)
    e2e_ms = fmean(record.finished_ms - record.arrival_ms for record in records)
    assert ttft_ms == pytest.approx(fmean(outcome.virtual.ttft_ms for outcome in outcomes), rel=0.001)
    assert e2e_ms == pytest.approx(fmean(outcome.virtual.e2e_ms for outcome in outcomes), rel=0.001)
    assert sum(outcome.cached_tokens for outcome in outcomes) == sum(record.cached_tokens for record in records)
