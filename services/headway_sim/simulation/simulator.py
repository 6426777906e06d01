"""A fleet in virtual time: arrivals, engines and telemetry drive one scheduler's own objects.

Events come from one heap. Whatever the scheduler decides it decides itself (`router.Router` holds its objects); what
happens here is only what happens around it in life: requests arrive, engines compute, agents send samples late.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Final

from headway_scheduler.admission.holds import HoldOrder
from headway_scheduler.core import EVERYTHING, TICK_S, Learned
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.report import Outcome, Usage
from headway_scheduler.errors import HeadwayError
from headway_scheduler.strategies.base import Strategy

from headway_sim.engine import (
    Engine,
    EngineSequence,
    Hardware,
    RequestTooLongError,
    Snapshot,
    Step,
    WaitingLimitError,
)
from headway_sim.simulation.engines import SimulatedEngine
from headway_sim.simulation.jobs import Job, Source
from headway_sim.simulation.records import Record, Run, Timeline
from headway_sim.simulation.router import Policy, Router

__all__ = ["Setup", "simulate"]

_SWEEP_MS: Final = 250.0
_PROBE_MS: Final = 1000.0
_JITTER_MS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run depends on beside its requests and its policy. Times in milliseconds unless named otherwise.

    A client hears an answer's end and sends what follows up to `turnaround_ms` later, evenly: networks are not in step
    with engines. `telemetry_period_ms` 0: samples are as fresh as the decision. `prior_error`: see Router. `learn`: see
    CoreConfig.

    `dedicated`: tenants that have so many engines to themselves; the others share what is left.

    `seed` is of the scheduler's random numbers, of the agents' phases, and of a jitter on arrivals within a
    millisecond, the resolution of traces (seed 0: none). `reordered` changes the order in which floats are added and
    endpoints are announced, and nothing else.
    """

    engines: Sequence[Hardware]
    tenants: Sequence[str] = ("default",)
    dedicated: Mapping[str, int] = field(default_factory=dict)
    hold_order: HoldOrder = HoldOrder.FAIR
    telemetry_period_ms: float = 1000.0
    telemetry_delay_ms: float = 0.0
    waiting_limit: int | None = None
    max_wait_s: float = 30.0
    turnaround_ms: float = 20.0
    prior_error: float = 1.0
    learn: frozenset[Learned] = EVERYTHING
    seed: int = 0
    reordered: bool = False


OnProgress = Callable[[int], None]
"""Called now and then with the number of requests that have ended."""


class _Kind(IntEnum):
    """Events; at the same time they happen in this order."""

    ENGINE = 0
    SAMPLE_ARRIVES = 1
    ARRIVAL = 2
    SAMPLE = 3
    TICK = 4
    SWEEP = 5
    PROBE = 6


class _Reordered(Hardware):
    """The same hardware; its step time is added up from the other end."""

    __slots__ = ()

    def step_ms(self, new_tokens: int, pairs: float, decode_context_tokens: int) -> float:
        prefill_ms = self.pair_ms * pairs + self.token_ms * max(0, new_tokens - 128)
        return (self.context_ms * decode_context_tokens + prefill_ms) + self.base_ms


@dataclass(slots=True)
class _Flight:
    """A request inside an engine."""

    job: Job
    record: Record
    reservation: str
    sent_ms: float


def simulate(
    policy: Policy,
    algorithms: Mapping[str, type[Strategy]],
    source: Source,
    setup: Setup,
    on_progress: OnProgress | None = None,
) -> Run:
    """Run every job of `source` to its end under `policy`."""
    return _Simulation(policy, algorithms, source, setup, on_progress).run()


@dataclass(slots=True)
class _EngineState:
    """An engine's place in the event loop."""

    engine: SimulatedEngine
    wake_ms: float = math.inf
    sampled_ms: float = 0.0
    sampled_busy_ms: float = 0.0
    inflight: int = 0
    flights: dict[EngineSequence, _Flight] = field(default_factory=dict)


class _Simulation:
    def __init__(
        self,
        policy: Policy,
        algorithms: Mapping[str, type[Strategy]],
        source: Source,
        setup: Setup,
        on_progress: OnProgress | None,
    ) -> None:
        self._setup = setup
        self._source = source
        self._on_progress = on_progress
        self._random = random.Random(setup.seed)
        hardware = list(setup.engines)
        if setup.reordered:
            hardware = [_reordered(each) for each in reversed(hardware)]
        self._router = Router(
            policy,
            algorithms,
            hardware,
            setup.tenants,
            seed=setup.seed,
            max_wait_s=setup.max_wait_s,
            prior_error=setup.prior_error,
            learn=setup.learn,
            dedicated=setup.dedicated,
            hold_order=setup.hold_order,
        )
        self._engines: list[_EngineState] = []
        for number, each in enumerate(hardware):
            engine = Engine(each, waiting_limit=setup.waiting_limit)
            self._engines.append(_EngineState(SimulatedEngine(engine, partial(self._on_step, number))))
        self._heap: list[tuple[float, int, int, object]] = []
        self._serial = 0
        self._now_ms = 0.0
        self._arrivals: Iterator[tuple[float, Job]] = iter(source.arrivals())
        self._pulled_ms = -math.inf
        self._ticking = False
        self._open = 0
        self._pending = 0
        self._records: list[Record] = []
        self._ended = 0
        self._timeline = Timeline(len(hardware), _PROBE_MS)

    def run(self) -> Run:
        self._start_telemetry()
        self._pull_arrivals()
        self._push(_SWEEP_MS, _Kind.SWEEP)
        self._push(0.0, _Kind.PROBE)
        heap = self._heap
        while self._open or self._pending:
            self._now_ms, kind, _, payload = heapq.heappop(heap)
            self._handle(_Kind(kind), payload)
            if self._router.pass_due:
                self._sample_if_always_fresh()
                self._router.settle(self._now_ms)
            if not self._ticking and self._router.holding:
                self._ticking = True
                self._push(self._now_ms + TICK_S * 1e3, _Kind.TICK)
        self._router.check()
        return Run(self._records, self._timeline, self._now_ms)

    # Events

    def _handle(self, kind: _Kind, payload: object) -> None:
        now_ms = self._now_ms
        if kind is _Kind.ENGINE and isinstance(payload, int):
            state = self._engines[payload]
            if state.wake_ms == now_ms:
                state.engine.catch_up(now_ms)
                self._rearm(payload)
        elif kind is _Kind.ARRIVAL and isinstance(payload, tuple):
            job, by_itself = payload
            self._pending -= 1
            if by_itself:
                self._pull_arrivals()
            self._arrive(job)
        elif kind is _Kind.SAMPLE and isinstance(payload, int):
            self._sample(payload)
            self._push(now_ms + self._setup.telemetry_period_ms, _Kind.SAMPLE, payload)
        elif kind is _Kind.SAMPLE_ARRIVES and isinstance(payload, tuple):
            number, snapshot, busy = payload
            self._router.sample(number, snapshot, busy, now_ms)
        elif kind is _Kind.TICK:
            self._router.tick(now_ms)
            self._ticking = self._router.holding
            if self._ticking:
                self._push(now_ms + TICK_S * 1e3, _Kind.TICK)
        elif kind is _Kind.SWEEP:
            self._router.tick(now_ms)
            self._push(now_ms + _SWEEP_MS, _Kind.SWEEP)
        elif kind is _Kind.PROBE:
            self._probe()

    def _pull_arrivals(self) -> None:
        """Take arrivals from the source until one lies ahead: their jitter may change their order."""
        while self._pulled_ms <= self._now_ms:
            found = next(self._arrivals, None)
            if found is None:
                self._pulled_ms = math.inf
                return
            self._pulled_ms = found[0]
            self._pending += 1
            self._push(found[0] + self._jitter_ms(), _Kind.ARRIVAL, (found[1], True))

    def _jitter_ms(self) -> float:
        return self._random.uniform(0.0, _JITTER_MS) if self._setup.seed else 0.0

    def _arrive(self, job: Job) -> None:
        now_ms = self._now_ms
        record = Record(now_ms, job.engine.prompt_tokens, job.engine.output_tokens, tenant=job.tenant)
        self._records.append(record)
        self._open += 1
        self._sample_if_always_fresh()
        self._router.submit(job, now_ms, partial(self._settled, job, record))

    def _settled(self, job: Job, record: Record, outcome: Decision | HeadwayError) -> None:
        """The scheduler answered: send the request to its engine, or tell the client no."""
        now_ms = self._now_ms
        record.held_ms = now_ms - record.arrival_ms
        if isinstance(outcome, HeadwayError):
            self._refuse(job, record, outcome.reason)
            return
        number = self._router.number_of(outcome)
        record.engine = self._original(number)
        record.predicted_ttft_ms = outcome.why.predicted_ttft_ms
        state = self._engines[number]
        try:
            sequence = state.engine.add(job.engine, now_ms)
        except (WaitingLimitError, RequestTooLongError) as error:
            # 503 and 400 by the emulator; the gateway reports them so.
            too_long = isinstance(error, RequestTooLongError)
            fault = Outcome.CLIENT_ERROR if too_long else Outcome.SERVER_ERROR
            self._router.failed(outcome.reservation_id, fault, now_ms)
            self._refuse(job, record, "TOO_LONG" if too_long else "ENGINE_FULL")
        else:
            state.inflight += 1
            state.flights[sequence] = _Flight(job, record, outcome.reservation_id, now_ms)
        self._rearm(number)

    def _refuse(self, job: Job, record: Record, reason: str) -> None:
        record.refused = reason
        self._end(job, answered=False)

    def _on_step(self, number: int, step: Step) -> None:
        """First tokens and ends: the data plane reports them."""
        state, now_ms = self._engines[number], self._now_ms
        for sequence in step.first_tokens:
            flight = state.flights.get(sequence)
            if flight is not None and flight.record.first_token_ms is None:
                flight.record.first_token_ms = sequence.first_token_ms
                self._router.first_token(flight.reservation, step.end_ms - flight.sent_ms, now_ms)
        for sequence in step.finished:
            flight = state.flights.pop(sequence)
            record = flight.record
            record.finished_ms, record.cached_tokens = step.end_ms, sequence.cached_tokens
            record.first_token_ms = sequence.first_token_ms
            state.inflight -= 1
            usage = Usage(record.prompt_tokens, record.output_tokens, record.cached_tokens)
            ttft_ms = (sequence.first_token_ms or step.end_ms) - flight.sent_ms
            self._router.finished(flight.reservation, usage, step.end_ms - flight.sent_ms, ttft_ms, now_ms)
            self._end(flight.job, answered=True)

    def _end(self, job: Job, *, answered: bool) -> None:
        self._open -= 1
        self._ended += 1
        if self._on_progress is not None and self._ended % 50 == 0:
            self._on_progress(self._ended)
        following = self._source.after(job, self._now_ms, answered=answered)
        if following is not None:
            self._pending += 1
            turnaround_ms = self._random.uniform(0.0, self._setup.turnaround_ms)
            self._push(following[0] + turnaround_ms, _Kind.ARRIVAL, (following[1], False))

    def _rearm(self, number: int) -> None:
        """Come back when this engine has news."""
        state = self._engines[number]
        wake_ms = max(state.engine.wake_ms, self._now_ms)
        if wake_ms != state.wake_ms:
            state.wake_ms = wake_ms
            if wake_ms < math.inf:
                self._push(wake_ms, _Kind.ENGINE, number)

    # Telemetry

    def _start_telemetry(self) -> None:
        """Agents say hello with a first sample; then each has its own phase."""
        period_ms = self._setup.telemetry_period_ms
        for number in range(len(self._engines)):
            self._router.sample(number, self._engines[number].engine.snapshot(0.0), 0.0, 0.0)
            if period_ms:
                self._push(self._random.uniform(0.0, period_ms), _Kind.SAMPLE, number)

    def _sample(self, number: int) -> None:
        snapshot, busy = self._read(number)
        if self._setup.telemetry_delay_ms:
            arrival_ms = self._now_ms + self._setup.telemetry_delay_ms
            self._push(arrival_ms, _Kind.SAMPLE_ARRIVES, (number, snapshot, busy))
        else:
            self._router.sample(number, snapshot, busy, self._now_ms)

    def _sample_if_always_fresh(self) -> None:
        """Before each decision, where samples are as fresh as the decision."""
        if self._setup.telemetry_period_ms:
            return
        for number in range(len(self._engines)):
            self._router.sample(number, *self._read(number), self._now_ms)

    def _read(self, number: int) -> tuple[Snapshot, float]:
        state, now_ms = self._engines[number], self._now_ms
        snapshot, busy_ms = state.engine.snapshot(now_ms), state.engine.busy_ms(now_ms)
        elapsed_ms = now_ms - state.sampled_ms
        busy = (busy_ms - state.sampled_busy_ms) / elapsed_ms if elapsed_ms else 0.0
        state.sampled_ms, state.sampled_busy_ms = now_ms, busy_ms
        self._rearm(number)
        return snapshot, busy

    def _probe(self) -> None:
        """Note every engine's load for the results; the scheduler hears nothing of it."""
        now_ms = self._now_ms
        loads = [state.inflight for state in self._engines]
        uses = [state.engine.snapshot(now_ms).kv_use for state in self._engines]
        if self._setup.reordered:
            loads.reverse()
            uses.reverse()
        interval_ms = self._timeline.add(now_ms, loads, sum(uses) / len(uses))
        for number in range(len(self._engines)):
            self._rearm(number)
        self._push(now_ms + interval_ms, _Kind.PROBE)

    # Inside

    def _push(self, at_ms: float, kind: _Kind, payload: object = None) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_ms, int(kind), self._serial, payload))

    def _original(self, number: int) -> int:
        """An engine's place in the fleet as given."""
        return len(self._engines) - 1 - number if self._setup.reordered else number


def _reordered(hardware: Hardware) -> Hardware:
    return _Reordered(*(getattr(hardware, name) for name in Hardware.__slots__))
