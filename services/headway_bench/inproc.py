"""What a decision costs without a wire: decide, reserve, first token, end, on the scheduler's own objects.

The clock is virtual, so that loads and learned speeds are those of a fleet that answers in a second or two, however
fast this machine decides.
"""

import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headway_scheduler.core import Core, CoreConfig
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, DesiredState, GpuGroup, StrategyBinding, StrategyConfig, Tenant
from headway_scheduler.domain.endpoint import EndpointSpec, EngineSample
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, Usage
from headway_scheduler.domain.request import Request, TextPrompt
from headway_scheduler.domain.telemetry import Hello, Sample
from headway_scheduler.fleet.values import Owner
from headway_scheduler.metrics.counts import Counts
from headway_scheduler.record.recorder import observe
from headway_scheduler.record.ring import Record
from headway_scheduler.strategies.catalog import BUILT_IN

from headway_bench.figures import BenchError, Json, percentile
from headway_bench.prompts import prompts_of

__all__ = ["InprocSettings", "VirtualFleet", "measure_inproc"]

_MODEL: Final = "m"
_DURATION_S: Final = 1.5
_TTFT_MS: Final = 80.0
_OUTPUT_TOKENS: Final = 100
_TURN_S: Final = 0.05
_FEWEST_ROUNDS: Final = 5
_WARM_UP: Final = 0.2
_SELDOM: Final = 10_000
"""A host that is busy with others makes one decision in so many overrun its time budget."""
_WITH: Final = "decide, reserve, first token, end"
_WITHOUT: Final = "the same, unobserved"
_SAMPLE_S: Final = 1.0
_KV_TOKENS: Final = 141_000.0
_BYTES_PER_TOKEN: Final = 4.0


@dataclass(frozen=True, slots=True)
class InprocSettings:
    """How it is measured. `concurrency`: requests in flight, all the time; `seconds`: of CPU, for all rounds.

    `observability`: with the record and the metrics, without them, or (None) both in turns.
    """

    endpoints: int = 100
    prompt_bytes: int = 2048
    concurrency: int = 64
    strategy: str = "adaptive"
    seconds: float = 5.0
    observability: bool | None = True


class VirtualFleet:
    """A core with engines that always answer alike, on a clock that requests move."""

    def __init__(self, endpoints: int, strategy: str, prompt_bytes: int, seed: int = 1) -> None:
        self.now = 1000.0
        kv_tokens = max(_KV_TOKENS, 10.0 * prompt_bytes / _BYTES_PER_TOKEN)
        self.core = Core(
            CoreConfig(name="bench", epoch="e", seed=seed),
            algorithms={each.name: each for each in BUILT_IN},
            clock=lambda: self.now,
            timer=time.thread_time,
            wall=time.perf_counter,
            record_usage=lambda _tenant, _model, _usage: None,
        )
        if strategy not in self.core.registry.algorithms:
            raise BenchError(f"{strategy!r} is none of {', '.join(self.core.registry.algorithms)}")
        self._sampled_at = self.now
        self._sequence = 0
        self._specs = [_spec(number, kv_tokens) for number in range(endpoints)]
        self._desire(strategy)
        self._node = self.core.fleet.connect(Hello("bench", "1", endpoints=tuple(self._specs)), self.now)
        self._tenant = self.core.desired.tenants["default"]
        self._owner = Owner("p", stream=True)

    def route(self, prompt: bytes, owner: Owner | None = None) -> Decision:
        """One decision that must not be held."""
        core = self.core
        text = TextPrompt(prompt)
        request = Request(
            core.ledger.new_id(),
            self._tenant.id,
            self._tenant.domain,
            _MODEL,
            text,
            core.intake.prompt_tokens(_MODEL, text),
            max_tokens=_OUTPUT_TOKENS,
        )
        outcome = core.dispatcher.submit(request, self._tenant, owner or self._owner, self.now)
        if not isinstance(outcome, Decision):
            raise BenchError("a request was held: too many are in flight for so few endpoints")
        return outcome

    def first_token(self, decision: Decision) -> None:
        """Its answer begins."""
        self.core.reporting.apply(self._owner, decision.reservation_id, FirstToken(_TTFT_MS), self.now)

    def finish(self, decision: Decision) -> None:
        """Its answer ends."""
        usage = Usage(decision.why.prompt_tokens, _OUTPUT_TOKENS, decision.why.matched_tokens)
        report = Finished(Outcome.SUCCESS, usage, _DURATION_S * 1e3, _TTFT_MS)
        self.core.reporting.apply(self._owner, decision.reservation_id, report, self.now)

    def pass_time(self, seconds: float, running: Mapping[str, int] | None = None) -> None:
        """Move the clock, and have the agent say every second how many requests engines run: by id, or as we count."""
        self.now += seconds
        if self.now - self._sampled_at >= _SAMPLE_S:
            self._sampled_at = self.now
            self._sequence += 1
            engines = (
                EngineSample(
                    spec.address,
                    running=Measurement(float(self._counted(spec) if running is None else running.get(spec.id, 0))),
                    waiting=Measurement(0.0),
                )
                for spec in self._specs
            )
            self.core.fleet.apply_sample(self._node, Sample(self._sequence, (), tuple(engines)), self.now)
            self.core.tick(self.now)

    def _counted(self, spec: EndpointSpec) -> int:
        fleet = self.core.fleet
        return int(fleet.columns.inflight[fleet.endpoints[spec.id].slot])

    def _desire(self, strategy: str) -> None:
        self.core.set_desired(
            DesiredState(
                version=1,
                tenants={"default": Tenant("default")},
                groups={"all": GpuGroup("all", all=True)},
                bindings=(Binding("default", "all"),),
                strategies={strategy: StrategyConfig(strategy, strategy)},
                strategy_bindings=(StrategyBinding("default", strategy),),
            )
        )


def measure_inproc(settings: InprocSettings) -> Json:
    """CPU a request, the median of several rounds, and how long single ones took.

    By name of what was measured. Both in turns, it also says what observability adds: the median over the rounds.
    """
    wanted = (False, True) if settings.observability is None else (settings.observability,)
    loads = [_Load(settings, observability=each) for each in wanted]
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    for load in loads:  # until all that is kept has its size
        load.run(settings.seconds * _WARM_UP / len(loads))
        load.forget()
    for _ in range(max(_FEWEST_ROUNDS, round(settings.seconds * (1 - _WARM_UP) / _TURN_S / len(loads)))):
        for load in loads:
            load.run(_TURN_S)
    found: Json = {load.name: load.found() for load in loads}
    if len(loads) == 2:
        off, on = loads
        added = [with_it - without for without, with_it in zip(off.costs, on.costs, strict=True)]
        found["added_us"] = round(statistics.median(added), 2)
    return found


class _Load:
    """A fleet with as many requests in flight as are wanted, and what they cost."""

    def __init__(self, settings: InprocSettings, *, observability: bool) -> None:
        self.name = _WITH if observability else _WITHOUT
        self.costs: list[float] = []
        self._latencies: list[float] = []
        self._fleet = VirtualFleet(settings.endpoints, settings.strategy, settings.prompt_bytes)
        if observability:
            observe(self._fleet.core, Record(), Counts(), time.perf_counter, time.time)
        self._strategy = settings.strategy
        self._prompts = prompts_of(settings.prompt_bytes)
        random.Random(11).shuffle(self._prompts)  # the same order in every run
        self._number = 0
        self._running = deque(self._fleet.route(prompt) for prompt in self._prompts[: settings.concurrency])
        self._waiting: deque[Decision] = deque()
        self._step_s = _DURATION_S / settings.concurrency
        self._first_after = max(1, round(settings.concurrency * _TTFT_MS / 1e3 / _DURATION_S))
        for decision in self._running:
            self._fleet.first_token(decision)

    def run(self, until_s: float) -> None:
        """Decide for so many seconds of CPU."""
        fleet, prompts, running, waiting = self._fleet, self._prompts, self._running, self._waiting
        count, spent = 0, 0.0
        while spent < until_s:
            began, began_wall = time.process_time(), time.perf_counter()
            for _ in range(50):
                self._number += 1
                decision = fleet.route(prompts[self._number % len(prompts)])
                waiting.append(decision)
                running.append(decision)
                if len(waiting) >= self._first_after:
                    fleet.first_token(waiting.popleft())
                fleet.finish(running.popleft())
                fleet.now += self._step_s
            spent += time.process_time() - began
            self._latencies.append((time.perf_counter() - began_wall) / 50 * 1e6)
            count += 50
            fleet.pass_time(0.0)
        self.costs.append(spent / count * 1e6)

    def forget(self) -> None:
        """So far it warmed up."""
        self.costs.clear()
        self._latencies.clear()

    def found(self) -> Json:
        """The figures. Raises BenchError if another strategy stood in."""
        fell_back = self._fleet.core.registry.installed[self._strategy].failures
        if fell_back * _SELDOM > self._number:
            raise BenchError(f"the strategy failed {fell_back} times")
        cpu_us = statistics.median(self.costs)
        return {
            "requests_per_s": round(1e6 / cpu_us),
            "cpu_us": round(cpu_us, 1),
            "cpu_us_worst_round": round(max(self.costs), 1),
            "p50_us": round(percentile(self._latencies, 0.5), 1),
            "p99_us": round(percentile(self._latencies, 0.99), 1),
        }


def _spec(number: int, kv_tokens: float) -> EndpointSpec:
    return EndpointSpec(
        f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000",
        engine="vllm",
        models=(_MODEL,),
        kv_capacity_tokens=Measurement(kv_tokens),
        hardware="a100-40g-8b",
    )
