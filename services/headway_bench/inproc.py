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
from headway_scheduler.fleet.ledger import Owner
from headway_scheduler.strategies.catalog import BUILT_IN

from headway_bench.figures import BenchError, Json, percentile
from headway_bench.prompts import prompts_of

__all__ = ["InprocSettings", "VirtualFleet", "measure_inproc"]

_MODEL: Final = "m"
_DURATION_S: Final = 1.5
_TTFT_MS: Final = 80.0
_OUTPUT_TOKENS: Final = 100
_ROUNDS: Final = 5
_SAMPLE_S: Final = 1.0
_KV_TOKENS: Final = 141_000.0
_BYTES_PER_TOKEN: Final = 4.0


@dataclass(frozen=True, slots=True)
class InprocSettings:
    """How it is measured. `concurrency`: requests in flight, all the time; `seconds`: of CPU, for all rounds."""

    endpoints: int = 100
    prompt_bytes: int = 2048
    concurrency: int = 64
    strategy: str = "adaptive"
    seconds: float = 5.0


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
    """CPU a request, the median of several rounds, and how long single ones took."""
    fleet = VirtualFleet(settings.endpoints, settings.strategy, settings.prompt_bytes)
    prompts = prompts_of(settings.prompt_bytes)
    random.Random(11).shuffle(prompts)  # the same order in every run
    running: deque[Decision] = deque(fleet.route(prompt) for prompt in prompts[: settings.concurrency])
    step_s = _DURATION_S / settings.concurrency
    first_after = max(1, round(settings.concurrency * _TTFT_MS / 1e3 / _DURATION_S))
    waiting: deque[Decision] = deque()
    for decision in running:
        fleet.first_token(decision)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    costs, latencies, number = [], [], 0
    for turn in range(_ROUNDS + 1):  # the first one warms up
        count, until, spent = 0, settings.seconds / (_ROUNDS + 1), 0.0
        while spent < until:
            began, began_wall = time.process_time(), time.perf_counter()
            for _ in range(50):
                number += 1
                decision = fleet.route(prompts[number % len(prompts)])
                waiting.append(decision)
                running.append(decision)
                if len(waiting) >= first_after:
                    fleet.first_token(waiting.popleft())
                fleet.finish(running.popleft())
                fleet.now += step_s
            spent += time.process_time() - began
            latencies.append((time.perf_counter() - began_wall) / 50 * 1e6)
            count += 50
            fleet.pass_time(0.0)
        if turn:
            costs.append(spent / count * 1e6)
        else:
            latencies.clear()
    fell_back = fleet.core.registry.installed[settings.strategy].failures
    if fell_back:
        raise BenchError(f"the strategy failed {fell_back} times")
    cpu_us = statistics.median(costs)
    return {
        "requests_per_s": round(1e6 / cpu_us),
        "cpu_us": round(cpu_us, 1),
        "cpu_us_worst_round": round(max(costs), 1),
        "p50_us": round(percentile(latencies, 0.5), 1),
        "p99_us": round(percentile(latencies, 0.99), 1),
    }


def _spec(number: int, kv_tokens: float) -> EndpointSpec:
    return EndpointSpec(
        f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000",
        engine="vllm",
        models=(_MODEL,),
        kv_capacity_tokens=Measurement(kv_tokens),
        hardware="a100-40g-8b",
    )
