"""Tenants that compete for a small fleet, on a virtual clock: a real Core, engines that prefill one by one."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from headway_scheduler.admission.holds import HoldLimits, HoldOrder, Waiter
from headway_scheduler.core import Core, CoreConfig
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, DesiredState, GpuGroup, StrategyBinding, StrategyConfig, Tenant
from headway_scheduler.domain.endpoint import EndpointSpec
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, Usage
from headway_scheduler.domain.request import Request, TextPrompt
from headway_scheduler.domain.telemetry import Hello
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.values import Owner
from headway_scheduler.strategies.catalog import algorithms

MODEL = "m"
OUTPUT = 256
"""What the scheduler expects of an answer while it learns nothing."""
SECONDS_PER_TOKEN = 0.001


@dataclass
class Sent:
    """A request, from when it was submitted to when it was dispatched. Seconds; `outcome` None while it waits."""

    tenant: str
    tokens: int
    output: int
    at: float
    outcome: Decision | HeadwayError | None = None
    dispatched_at: float = 0.0
    first_token_at: float = 0.0
    service: float = 0.0


class Contest:
    """Time passes from event to event. `on_dispatch` and `on_first_token` are told of each request."""

    def __init__(self, weights: dict[str, float], endpoints: int = 1, **config) -> None:
        self.now, self.serial, self.events = 0.0, 0, []
        self.tenants = {name: Tenant(name, weight=weight) for name, weight in weights.items()}
        self.on_dispatch: Callable[[Sent], None] = lambda sent: None
        self.core = Core(
            CoreConfig("s", "e", 1, learn=frozenset(), max_wait_s=1e6, **config),
            algorithms=algorithms(),
            clock=lambda: self.now,
            timer=lambda: 0.0,
            record_usage=lambda tenant, model, usage: None,
        )
        self.core.dispatcher.wake = self._wake
        self.core.set_desired(
            DesiredState(
                tenants=self.tenants,
                groups={"all": GpuGroup("all", all=True)},
                bindings=tuple(Binding(name, "all") for name in weights),
                strategies={"adaptive": StrategyConfig("adaptive", "adaptive")},
                strategy_bindings=(StrategyBinding("default", "adaptive"),),
            )
        )
        specs = [EndpointSpec(f"10.0.0.{n}:8000", models=(MODEL,), hardware="a100-40g-8b") for n in range(endpoints)]
        self.core.fleet.connect(Hello("n", "i", endpoints=tuple(specs)), 0.0)
        self.free = {spec.id: 0.0 for spec in specs}
        self.owner = Owner("p", stream=True, sends_first_token=True)
        self.woken = False

    @property
    def fair(self):
        return self.core.dispatcher.fair

    def waiting(self, tenant: str) -> int:
        return self.core.dispatcher.holds.tenants.get(tenant, 0)

    def send(self, tenant: str, tokens: int, output: int = OUTPUT, text: str | None = None, **changes) -> Sent:
        """Submit a request; what becomes of it is in what is returned."""
        self.serial += 1
        sent = Sent(tenant, tokens, output, self.now)
        prompt = None if text is None else TextPrompt(text.encode())
        request = Request(
            f"r{self.serial}", tenant, self.tenants[tenant].domain, MODEL, prompt, prompt_tokens=tokens, **changes
        )
        try:
            outcome = self.core.dispatcher.submit(request, self.tenants[tenant], self.owner, self.now)
        except HeadwayError as error:
            sent.outcome = error
            return sent
        if isinstance(outcome, Waiter):
            outcome.answer = lambda answer: self._settle(sent, answer)
        else:
            self._settle(sent, outcome)
        self._passes()
        return sent

    def run(self, until: float) -> None:
        """Let time pass."""
        while self.events and self.events[0][0] <= until:
            self.now, _, event = heapq.heappop(self.events)
            self.core.dispatcher.advance(self.now)
            event()
            self._passes()
        self.now = until
        self.core.tick(self.now)
        self._passes()

    def at(self, when: float, event: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.events, (when, self.serial, event))

    def _wake(self) -> None:
        self.woken = True

    def _passes(self) -> None:
        while self.woken:
            self.woken = False
            self.core.dispatcher.run_pass(self.now)

    def _settle(self, sent: Sent, outcome: Decision | HeadwayError) -> None:
        sent.outcome = outcome
        if isinstance(outcome, HeadwayError):
            return
        sent.dispatched_at = self.now
        endpoint, cached = outcome.endpoint.spec.id, outcome.why.matched_tokens
        sent.service = self.fair.weights.service(sent.tokens, cached, sent.output)
        reservation = self.core.ledger.find(outcome.reservation_id)
        prefill_s = reservation.legs[0].booking.prefill_us / 1e6
        self.free[endpoint] = sent.first_token_at = max(self.now, self.free[endpoint]) + prefill_s
        ttft_ms = (sent.first_token_at - self.now) * 1e3
        duration_ms = ttft_ms + sent.output * SECONDS_PER_TOKEN * 1e3
        usage = Usage(sent.tokens, sent.output, cached)

        def report(event) -> None:
            self.core.reporting.apply(self.owner, outcome.reservation_id, event, self.now)

        self.at(sent.first_token_at, lambda: report(FirstToken(ttft_ms)))
        finished = Finished(Outcome.SUCCESS, usage, duration_ms, ttft_ms)
        self.at(self.now + duration_ms / 1e3, lambda: report(finished))
        self.on_dispatch(sent)


__all__ = ["MODEL", "OUTPUT", "Contest", "HoldLimits", "HoldOrder", "Sent"]
