"""The scheduler's own objects as the simulator drives them: announced to, fed samples, asked, and told what became."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from headway_scheduler.admission.holds import HoldOrder, Waiter
from headway_scheduler.core import EVERYTHING, Core, CoreConfig, Learned
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import (
    Binding,
    BindingMode,
    DesiredState,
    GpuGroup,
    StrategyBinding,
    StrategyConfig,
    Tenant,
)
from headway_scheduler.domain.device import Device, DeviceKind, DeviceSample
from headway_scheduler.domain.endpoint import EndpointSpec, EngineSample
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.domain.names import DEFAULT_GROUP
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, Usage
from headway_scheduler.domain.request import Request
from headway_scheduler.domain.telemetry import Hello, Sample
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.values import Owner
from headway_scheduler.learning.history import classify
from headway_scheduler.learning.priors import prior
from headway_scheduler.strategies.base import Strategy

from headway_sim.engine import Hardware, Snapshot
from headway_sim.simulation.jobs import MODEL, Job

__all__ = ["Policy", "Router"]

_PRINCIPAL: Final = "simulator"
_MEMORY_BYTES: Final = 80e9
_MEMORY_USED: Final = 0.9
"""Engines reserve about this much of the memory at start."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A strategy by algorithm and parameters (JSON values, hence Any); `name` is what results call it."""

    name: str
    algorithm: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Router:
    """One scheduler and one data plane with one open stream. Every time is virtual and passed in, in milliseconds."""

    def __init__(
        self,
        policy: Policy,
        algorithms: Mapping[str, type[Strategy]],
        engines: Sequence[Hardware],
        tenants: Sequence[str],
        *,
        seed: int,
        max_wait_s: float,
        prior_error: float = 1.0,
        learn: frozenset[Learned] = EVERYTHING,
        dedicated: Mapping[str, int] | None = None,
        hold_order: HoldOrder = HoldOrder.FAIR,
    ) -> None:
        """`prior_error` > 1: every other endpoint is believed that much slower than it is, the others faster."""
        self._now_ms = 0.0
        self._pass_due = False
        self.core = Core(
            CoreConfig(
                name="sim",
                epoch="0",
                seed=seed,
                max_wait_s=max_wait_s,
                learn=learn,
                hold_order=hold_order,
            ),
            algorithms=algorithms,
            clock=lambda: self._now_ms / 1e3,
            timer=lambda: 0.0,  # a busy host must change no result
            record_usage=lambda _tenant, _model, _usage: None,
        )
        self._tenants = {name: Tenant(name) for name in tenants}
        self.core.set_desired(_desired(policy, self._tenants, dedicated or {}))
        self.core.dispatcher.wake = self._wake
        self._owner = Owner(_PRINCIPAL, stream=True)
        self._numbers: dict[str, int] = {}
        self._sequences = [0] * len(engines)
        for number, hardware in enumerate(engines):
            self._announce(number, hardware, prior_error if number % 2 else 1 / prior_error)
        found = self.core.registry.installed.get(policy.name)
        if found is None:
            raise ValueError(f"policy {policy.name!r} cannot be built")
        self._installed = found

    # Telemetry

    def sample(self, number: int, snapshot: Snapshot, busy: float, now_ms: float) -> None:
        """A reading of one engine arrives; `busy` is the share of time it computed since the one before."""
        self._now_ms = now_ms
        self._sequences[number] += 1
        reading = Sample(
            self._sequences[number],
            devices=(
                DeviceSample(
                    _uuid(number),
                    memory_used_bytes=Measurement(_MEMORY_USED * _MEMORY_BYTES),
                    utilization=Measurement(min(1.0, busy)),
                ),
            ),
            engines=(
                EngineSample(
                    _address(number),
                    running=Measurement(float(snapshot.running)),
                    waiting=Measurement(float(snapshot.waiting)),
                    kv_use=Measurement(snapshot.kv_use),
                    prefix_queries=Measurement(float(snapshot.prefix_query_tokens)),
                    prefix_hits=Measurement(float(snapshot.prefix_hit_tokens)),
                ),
            ),
        )
        self.core.fleet.apply_sample(self.core.fleet.nodes[_node(number)], reading, now_ms / 1e3)

    # Requests

    def submit(self, job: Job, now_ms: float, settle: Callable[[Decision | HeadwayError], None]) -> None:
        """Route a job; `settle` is called with the answer, at once or when its hold ends."""
        self._now_ms = now_ms
        try:
            outcome = self.core.dispatcher.submit(
                self._request(job), self._tenants[job.tenant], self._owner, now_ms / 1e3
            )
        except HeadwayError as error:
            settle(error)
            return
        if isinstance(outcome, Waiter):
            outcome.answer = settle
        else:
            settle(outcome)

    def first_token(self, reservation: str, ttft_ms: float, now_ms: float) -> None:
        """The data plane saw the first token, `ttft_ms` after it sent the request."""
        self._now_ms = now_ms
        self.core.reporting.apply(self._owner, reservation, FirstToken(ttft_ms), now_ms / 1e3)

    def finished(self, reservation: str, usage: Usage, duration_ms: float, ttft_ms: float, now_ms: float) -> None:
        """The answer is complete."""
        self._now_ms = now_ms
        report = Finished(Outcome.SUCCESS, usage, duration_ms, ttft_ms)
        self.core.reporting.apply(self._owner, reservation, report, now_ms / 1e3)

    def failed(self, reservation: str, outcome: Outcome, now_ms: float) -> None:
        """The engine took it not."""
        self._now_ms = now_ms
        self.core.reporting.apply(self._owner, reservation, Finished(outcome), now_ms / 1e3)

    # Time

    @property
    def pass_due(self) -> bool:
        """Was a pass over the holds asked for?"""
        return self._pass_due

    @property
    def holding(self) -> bool:
        """Does anything wait?"""
        return len(self.core.dispatcher.holds) > 0

    def tick(self, now_ms: float) -> None:
        """What the scheduler does every 50 ms."""
        self._now_ms = now_ms
        self.core.tick(now_ms / 1e3)

    def settle(self, now_ms: float) -> None:
        """Make the pass over the holds that was asked for: where life would, at the end of the same turn."""
        self._now_ms = now_ms
        while self._pass_due:
            self._pass_due = False
            self.core.dispatcher.run_pass(now_ms / 1e3)

    # Afterwards

    def number_of(self, decision: Decision) -> int:
        """Which engine was chosen."""
        return self._numbers[decision.endpoint.spec.id]

    def check(self) -> None:
        """Raise RuntimeError where a strategy failed and was stood in for: its figures would be another's."""
        if self._installed.failures:
            raise RuntimeError(f"strategy {self._installed.config.id!r} failed: {self._installed.last_error}")

    # Inside

    def _wake(self) -> None:
        self._pass_due = self._pass_due or self.holding

    def _request(self, job: Job) -> Request:
        tokens = job.prompt_tokens
        if tokens is None:
            tokens = self.core.intake.prompt_tokens(MODEL, job.prompt)
        tenant = self._tenants[job.tenant]
        return Request(
            request_id=job.engine.request_id,
            tenant=tenant.id,
            domain=tenant.domain,
            model=MODEL,
            prompt=job.prompt,
            prompt_tokens=tokens,
            max_tokens=job.max_tokens,
            task_class=classify(None, job.max_tokens, tokens),
            session_id=job.session_id,
        )

    def _announce(self, number: int, hardware: Hardware, prior_error: float) -> None:
        spec = EndpointSpec(
            _address(number),
            engine="vllm",
            engine_version="simulated",
            models=(MODEL,),
            device_uuids=(_uuid(number),),
            kv_capacity_tokens=Measurement(float(hardware.kv_tokens)),
            max_num_seqs=Measurement(float(hardware.max_sequences)),
            hardware=hardware.name,
            engine_boot_id="1",
        )
        kind = DeviceKind.CPU if hardware.name.startswith("cpu") else DeviceKind.GPU
        device = Device(_uuid(number), kind, hardware.name, memory_total_bytes=Measurement(_MEMORY_BYTES))
        hello = Hello(_node(number), f"instance-{number}", devices=(device,), endpoints=(spec,))
        self.core.fleet.connect(hello, 0.0)
        self._numbers[spec.id] = number
        if prior_error != 1.0:
            endpoint = self.core.fleet.endpoints[spec.id]
            believed = prior(hardware.name, "", False)
            wrong = replace(
                believed,
                tok_ms=believed.tok_ms * prior_error,
                base_ms=believed.base_ms * prior_error,
                pair_ms=believed.pair_ms * prior_error,
                ctx_ms=believed.ctx_ms * prior_error,
            )
            self.core.costs.install(endpoint.slot, f"{endpoint.id} {spec.engine}", spec.engine_version, wrong)


def _desired(policy: Policy, tenants: Mapping[str, Tenant], dedicated: Mapping[str, int]) -> DesiredState:
    groups, bindings, first = [GpuGroup(DEFAULT_GROUP, all=True)], [], 0
    for tenant in tenants:
        count = dedicated.get(tenant, 0)
        if not count:
            bindings.append(Binding(tenant, DEFAULT_GROUP))
            continue
        groups.append(GpuGroup(tenant, nodes=tuple(_node(number) for number in range(first, first + count))))
        bindings.append(Binding(tenant, tenant, BindingMode.DEDICATED))
        first += count
    return DesiredState(
        version=1,
        tenants=tenants,
        groups={group.id: group for group in groups},
        bindings=tuple(bindings),
        strategies={policy.name: StrategyConfig(policy.name, policy.algorithm, dict(policy.parameters))},
        strategy_bindings=(StrategyBinding("default", policy.name),),
    )


def _address(number: int) -> str:
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000"


def _node(number: int) -> str:
    return f"node-{number}"


def _uuid(number: int) -> str:
    return f"SIM-{number}"
