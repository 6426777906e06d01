"""A whole scheduler but its wire and its database, on a clock that a test moves by hand."""

from dataclasses import replace

from headway_scheduler.admission.holds import Waiter
from headway_scheduler.app import Scheduler
from headway_scheduler.config import Config
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import (
    Binding,
    DesiredState,
    GpuGroup,
    Model,
    StrategyBinding,
    StrategyConfig,
    Tenant,
)
from headway_scheduler.domain.device import Device, DeviceKind, DeviceSample
from headway_scheduler.domain.endpoint import EndpointSpec, EngineSample
from headway_scheduler.domain.measurement import UNKNOWN, Measurement
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, Progress, ServedBy, Usage
from headway_scheduler.domain.request import Request, TaskClass, TextPrompt
from headway_scheduler.domain.telemetry import Hello, Sample
from headway_scheduler.fleet.columns import BOOKED
from headway_scheduler.fleet.values import Owner
from headway_scheduler.store.base import Notified
from headway_scheduler.strategies.catalog import BUILT_IN

MODEL = "m"
NO_USAGE = Usage()


class Clock:
    """Seconds, moved by hand."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


class MemoryStore:
    """Answers what a test put into `desired`; remembers what the scheduler saves."""

    available = True
    notified = Notified.UNKNOWN
    revision = "head"

    async def schema_revision(self):
        return self.revision

    def __init__(self, desired):
        self.desired, self.learned, self.usage, self.batches = desired, {}, [], set()

    async def load(self):
        return self.desired

    async def save_learned(self, states, *, epoch=None):
        self.learned.update(states)

    async def forget_learned(self, keys, *, epoch=None):
        for key in keys:
            self.learned.pop(key, None)

    async def keep_learned(self, key, state):
        return self.learned.setdefault(key, state)

    async def record_usage(self, rows, batch=""):
        if not batch or batch not in self.batches:
            self.batches.add(batch)
            self.usage.extend(rows)


def desired_state(strategy="least_request", tenants=(), groups=(), bindings=(), **changes):
    """The tenant `default` on all endpoints, every built-in strategy, `strategy` bound to all; and more."""
    parts = {
        "version": 1,
        "tenants": {t.id: t for t in (Tenant("default"), *tenants)},
        "groups": {g.id: g for g in (GpuGroup("all", all=True), *groups)},
        "bindings": (Binding("default", "all"), *bindings),
        "models": {MODEL: Model(MODEL, aliases=("alias",))},
        "strategies": {each.name: StrategyConfig(each.name, each.name) for each in BUILT_IN},
        "strategy_bindings": (StrategyBinding("default", strategy),),
    }
    return DesiredState(**(parts | changes))


def spec(number, *, models=(MODEL,), **changes):
    """Endpoint 10.0.0.NUMBER:8000@0."""
    return EndpointSpec(f"10.0.0.{number}:8000", models=models, **changes)


def gpu(uuid, memory=100.0, kind=DeviceKind.GPU, **changes):
    return Device(uuid, kind, memory_total_bytes=Measurement(memory), **changes)


def engine_sample(of, running=UNKNOWN, waiting=UNKNOWN, kv_use=UNKNOWN, ready=True):
    values = [
        each if isinstance(each, Measurement) else Measurement(float(each)) for each in (running, waiting, kv_use)
    ]
    return EngineSample(of.address, of.dp_rank, *values, ready=ready)


class Rig:
    """The scheduler's parts, and short words for what tests do with them."""

    def __init__(self, desired=None, clock=None, epoch="e1", seed=7, **config):
        self.clock = clock or Clock()
        self.store = MemoryStore(desired or desired_state())
        config.setdefault("retry_percent", 100)  # most tests exclude endpoints to say where to go
        config.setdefault("guard_dwell_s", 0)  # most tests change a reading and look at once
        self.scheduler = Scheduler(Config(name="s1", seed=seed, **config), self.store, self.clock, epoch)
        self.fleet, self.ledger = self.scheduler.fleet, self.scheduler.ledger
        self.dispatcher, self.columns = self.scheduler.dispatcher, self.scheduler.fleet.columns
        self.owner = Owner("p", stream=False)
        self.sequence = 0
        self.desire()

    def desire(self, **changes):
        """Change the desired state, as an admin would."""
        version = self.store.desired.version + 1
        self.store.desired = replace(self.store.desired, version=version, **changes)
        finish(self.scheduler.refresh())

    def bind(self, strategy, **config):
        """Bind a strategy to everything, with this configuration."""
        strategies = dict(self.store.desired.strategies)
        strategies[strategy] = replace(strategies.get(strategy, StrategyConfig(strategy, strategy)), **config)
        self.desire(strategies=strategies, strategy_bindings=(StrategyBinding("default", strategy),))

    def connect(self, node, *specs, devices=(), labels=None, instance="i1", boot="b1"):
        """An agent says hello with these endpoints."""
        hello = Hello(node, instance, boot, labels=labels or {}, devices=tuple(devices), endpoints=specs)
        return self.fleet.connect(hello, self.clock.now)

    def endpoints(self, count, **changes):
        """`count` endpoints on one node; returns their slots."""
        self.connect("n", *[spec(number, **changes) for number in range(1, count + 1)])
        return [self.slot(number) for number in range(1, count + 1)]

    def slot(self, number):
        return self.fleet.endpoints[f"10.0.0.{number}:8000@0"].slot

    def sample(self, node, *engines, devices=()):
        self.sequence += 1
        return self.fleet.apply_sample(node, Sample(self.sequence, tuple(devices), engines), self.clock.now)

    def pass_time(self, seconds, step=0.25):
        """What the scheduler's own ticks would do meanwhile, with agents that stay silent."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + step)
            self.dispatcher.advance(self.clock.now)
            self.fleet.sweep(self.clock.now)
            self.dispatcher.run_pass(self.clock.now)

    def request(self, request_id="", *, tenant="default", text=None, **changes):
        """A validated request of 100 prompt tokens."""
        known = self.scheduler.intake.desired.tenants[tenant]
        prompt = None if text is None else TextPrompt(text.encode())
        tokens = 100 if prompt is None else max(1, round(len(prompt.data) / 4))
        parts = {
            "model": MODEL,
            "domain": known.domain,
            "prompt": prompt,
            "prompt_tokens": tokens,
            "priority": known.priority,
        }
        return Request(request_id or self.ledger.new_id(), tenant, **(parts | changes))

    def submit(self, request, owner=None, deadline=None):
        tenant = self.scheduler.intake.desired.tenants[request.tenant]
        return self.dispatcher.submit(request, tenant, owner or self.owner, self.clock.now, deadline)

    def route(self, request_id="", owner=None, **changes):
        """A Route that must be answered at once."""
        decision = self.submit(self.request(request_id, **changes), owner)
        assert isinstance(decision, Decision), decision
        return decision

    def hold(self, request_id="", owner=None, deadline=None, **changes):
        """A Route that must be held; what it is answered goes to the list that is returned with it."""
        waiter = self.submit(self.request(request_id, **changes), owner, deadline)
        assert isinstance(waiter, Waiter), waiter
        answers = []
        waiter.answer = answers.append
        return waiter, answers

    def report(self, decision, event, owner=None):
        return self.scheduler.reporting.apply(owner or self.owner, decision.reservation_id, event, self.clock.now)

    def first_token(self, decision, ttft_ms=None):
        return self.report(decision, FirstToken(ttft_ms))

    def progress(self, decision):
        return self.report(decision, Progress())

    def served_by(self, decision, endpoint):
        return self.report(decision, ServedBy(endpoint))

    def finish(self, decision, outcome=Outcome.SUCCESS, usage=NO_USAGE, owner=None, **changes):
        return self.report(decision, Finished(outcome, usage, **changes), owner)

    def recorded(self):
        """Usage, as the store has it now."""
        finish(self.scheduler.usage.flush(self.store))
        return self.store.usage

    def where(self, decision):
        return decision.endpoint.spec.address.split(":")[0].rpartition(".")[2]

    def counts(self, slot):
        """Everything booked on a slot."""
        return {name: int(getattr(self.columns, name)[slot]) for name in BOOKED}

    def is_empty(self):
        """No reservation, no hold, and every booked column zero."""
        booked = any(getattr(self.columns, name).any() for name in BOOKED)
        return not (booked or self.ledger.reservations or len(self.dispatcher.holds) or self.dispatcher.holds.tenants)

    def full(self, *numbers):
        """Fill these endpoints' KV cache, so that gpu_aware does not dispatch there; the others are empty."""
        for node in self.fleet.nodes.values():
            engines = [
                engine_sample(e.spec, kv_use=0.9 if int(self.where_of(e)) in numbers else 0.1)
                for e in node.endpoints.values()
            ]
            self.sample(node, *engines)

    def where_of(self, endpoint):
        return endpoint.spec.address.split(":")[0].rpartition(".")[2]


def finish(coroutine):
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits for something")


def device_sample(uuid, used=UNKNOWN, **values):
    used = used if isinstance(used, Measurement) else Measurement(float(used))
    measured = {name: Measurement(float(value)) for name, value in values.items() if name != "throttle_reasons"}
    reasons = tuple(values.get("throttle_reasons", ()))
    return DeviceSample(uuid, used, throttle_reasons=reasons, **measured)


LONG, CHAT, SHORT = TaskClass.LONG, TaskClass.CHAT, TaskClass.SHORT
