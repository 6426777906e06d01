"""The parts of a scheduler that decide, built and connected: no wire, no store, no event loop.

`app` adds what a process needs around it; the simulator drives the same object in virtual time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import numpy as np
import structlog

from headway_scheduler.admission.dispatcher import Dispatcher, DispatcherConfig
from headway_scheduler.admission.fairness import DEFAULT_WEIGHTS, ServiceWeights
from headway_scheduler.admission.guards import GuardConfig
from headway_scheduler.admission.holds import DEFAULT_LIMITS, HoldLimits, HoldOrder
from headway_scheduler.admission.intake import Intake
from headway_scheduler.admission.observing import Observer
from headway_scheduler.admission.reporting import Reporting, UsageRecorder
from headway_scheduler.admission.retries import RetryConfig
from headway_scheduler.admission.salts import Salts
from headway_scheduler.admission.values import Work
from headway_scheduler.domain.desired import DesiredState, Model
from headway_scheduler.domain.device import DeviceKind
from headway_scheduler.domain.telemetry import KvEvents
from headway_scheduler.fleet.fleet import Fleet, FleetConfig
from headway_scheduler.fleet.health import DeviceLimits, EjectionConfig, HardGuard
from headway_scheduler.fleet.ledger import EndCause, Ledger, LedgerConfig
from headway_scheduler.fleet.members import Endpoint, Node
from headway_scheduler.fleet.values import Reservation
from headway_scheduler.index.chain import ChainIndex, slots_in
from headway_scheduler.index.fingerprint import FingerprintIndex
from headway_scheduler.index.kv import KvIndex
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.history import History
from headway_scheduler.learning.priors import prior
from headway_scheduler.strategies.base import Strategy
from headway_scheduler.strategies.registry import StrategyRegistry

__all__ = ["EVERYTHING", "SWEEP_S", "TICK_S", "Core", "CoreConfig", "Learned"]

log = structlog.get_logger()

TICK_S: Final = 0.05
"""How often `Core.tick` is due while anything is held."""
SWEEP_S: Final = 0.25
"""How often the fleet is swept."""


class Learned(StrEnum):
    """What can be learned from reports."""

    COSTS = "costs"
    """How fast each endpoint is; else the priors stay."""
    HISTORY = "history"
    """Output lengths and task weights; else the hand-set ones stay."""


EVERYTHING: Final = frozenset(Learned)


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What decides how the parts behave. Times in seconds; `seed` is of every random number in decisions.

    `learn` says what may change with what is reported; `kv_quantile`: see DispatcherConfig.
    """

    name: str
    epoch: str
    seed: int
    time_scale: float = 1.0
    stale_after_s: float = 5.0
    resume_grace_s: float = 10.0
    max_wait_s: float = 30.0
    hold_limits: HoldLimits = DEFAULT_LIMITS
    hold_order: HoldOrder = HoldOrder.FAIR
    service: ServiceWeights = DEFAULT_WEIGHTS
    learn: frozenset[Learned] = EVERYTHING
    kv_quantile: float | None = None
    guards: GuardConfig = field(default_factory=GuardConfig)
    hard_guards_off: frozenset[HardGuard] = frozenset()
    devices: DeviceLimits = field(default_factory=DeviceLimits)
    ejection: EjectionConfig = field(default_factory=EjectionConfig)
    retries: RetryConfig = field(default_factory=RetryConfig)


class Core:
    """All that decides. Whoever owns it sets `dispatcher.wake`, and calls `tick` and `set_desired`.

    `discovered` holds the models that agents reported, by id; `on_discovered` is called when it grew.
    """

    def __init__(
        self,
        config: CoreConfig,
        *,
        algorithms: Mapping[str, type[Strategy]],
        clock: Callable[[], float],
        timer: Callable[[], float],
        record_usage: UsageRecorder,
        wall: Callable[[], float] | None = None,
    ) -> None:
        """`clock` is monotonic, in seconds; `timer` and `wall` tell what a strategy spends (see StrategyRegistry)."""
        self.config, self.clock = config, clock
        self.desired = DesiredState()
        self.discovered: dict[str, Model] = {}
        self.on_discovered: Callable[[], None] = lambda: None
        self.fleet = Fleet(
            FleetConfig(
                stale_after_s=config.stale_after_s,
                ejection=config.ejection,
                devices=config.devices,
                guards_off=config.hard_guards_off,
            )
        )
        self.ledger = Ledger(
            self.fleet.columns, config.name, config.epoch, LedgerConfig(resume_grace_s=config.resume_grace_s)
        )
        self.index = ChainIndex()
        self.kv = KvIndex()
        self.fingerprints = FingerprintIndex()
        self.costs = CostModel(self.fleet.columns, config.time_scale, Learned.COSTS in config.learn)
        self.history = History(config.time_scale, Learned.HISTORY in config.learn)
        self.registry = StrategyRegistry(algorithms, timer, wall)
        self.intake = Intake(self.history)
        self.salts = Salts(b"")
        self.dispatcher = Dispatcher(
            fleet=self.fleet,
            ledger=self.ledger,
            index=self.index,
            kv=self.kv,
            fingerprints=self.fingerprints,
            registry=self.registry,
            costs=self.costs,
            history=self.history,
            salts=self.salts,
            random=np.random.default_rng(config.seed),
            config=DispatcherConfig(
                default_max_wait_s=config.max_wait_s,
                limits=config.hold_limits,
                order=config.hold_order,
                service=config.service,
                time_scale=config.time_scale,
                kv_quantile=config.kv_quantile,
                guards=config.guards,
                retries=config.retries,
            ),
        )
        self.reporting = Reporting(self.dispatcher, self.costs, self.history, record_usage)
        self._swept_at = float("-inf")
        self.fleet.on_announced.append(self._announced)
        self.fleet.on_removed.append(self._removed)
        self.fleet.on_restarted.append(self._forgot_everything)
        self.fleet.on_restarted.append(lambda endpoint: self.fleet.restarted(endpoint, clock()))
        self.fleet.on_connected.append(self._agent_connected)
        self.ledger.still_running = self._still_running
        self.ledger.on_end.append(self._ended)

    def observe(self, observer: Observer) -> None:
        """Have it watch every decision and every end that is reported."""
        self.dispatcher.observe(observer)
        self.reporting.observer = observer

    def set_desired(self, desired: DesiredState) -> None:
        """Take over what admins configured; models that only agents know are served too."""
        before = self._alone()
        self.desired = desired
        self.discovered = {
            name: model
            for name, model in self.discovered.items()
            if name in desired.models or len(self.fleet.pool(name))
        }
        known = {*desired.models, *(alias for m in desired.models.values() for alias in m.aliases)}
        unknown = {name: model for name, model in self.discovered.items() if name not in known}
        effective = replace(desired, models={**desired.models, **unknown})
        self.fleet.set_desired(effective)
        after = self._alone()
        for slot in slots_in(self.kv.feeds, self.fleet.columns.capacity).tolist():
            if before.get(slot) != after.get(slot):
                self.kv.forget(slot)  # its unsalted blocks may be those of the domain that it served before
        self.intake.set_desired(effective)
        self.dispatcher.recheck_holds(self.intake.problem, self.clock())
        for strategy, problem in self.registry.set_desired(effective):
            log.error("strategy_not_built", strategy=strategy, problem=problem)
        self.dispatcher.wake()

    def tick(self, now: float) -> None:
        """Do what time does: expire reservations and holds, sweep the fleet now and then, try the holds again."""
        self.dispatcher.advance(now)
        self.index.tidy()
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self.fleet.sweep(now)
            if len(self.dispatcher.holds):
                self.dispatcher.run_pass(now)

    def apply_kv_events(self, endpoint: Endpoint, events: KvEvents) -> None:
        """What an engine says its cache gained and lost. One that is empty ends what we believed of it, too."""
        if events.cleared and events.complete and not events.stored:
            self.index.drop(endpoint.slot)
        self.kv.apply(
            endpoint.slot,
            events.tier,
            events.stored,
            events.removed,
            cleared=events.cleared,
            complete=events.complete,
        )

    # Parts that know each other through here only

    def _alone(self) -> dict[int, str]:
        """The isolation domain of each endpoint with a feed that serves no other."""
        if not self.kv.feeds:
            return {}
        domains = {tenant.domain for tenant in self.desired.tenants.values()}
        capacity, feeds = self.fleet.columns.capacity, self.kv.feeds
        return {
            int(slot): domain
            for domain in domains
            for slot in slots_in(self.fleet.serving_only(domain) & feeds, capacity).tolist()
        }

    def _announced(self, endpoint: Endpoint) -> None:
        spec, hello = endpoint.spec, endpoint.node.hello
        devices = [device for device in hello.devices if device.uuid in spec.device_uuids]
        product = devices[0].product if devices else ""
        is_cpu = bool(devices) and all(device.kind is DeviceKind.CPU for device in devices)
        believed = prior(spec.hardware, product, is_cpu)
        self.costs.install(endpoint.slot, f"{endpoint.id} {spec.engine}", spec.engine_version, believed)
        self.index.set_capacity(endpoint.slot, float(self.fleet.columns.kv_capacity[endpoint.slot]))
        new = [model for model in spec.models if model not in self.discovered]
        if new:
            self.discovered.update((model, Model(model, discovered=True)) for model in new)
            self.set_desired(self.desired)
            self.on_discovered()
        self.dispatcher.wake()

    def _removed(self, endpoint: Endpoint) -> None:
        now = self.clock()
        for reservation in self.ledger.on_slot(endpoint.slot):
            self.ledger.end(reservation, EndCause.ENDPOINT_GONE, now)
        self._forgot_everything(endpoint)

    def _forgot_everything(self, endpoint: Endpoint) -> None:
        self.index.drop(endpoint.slot)
        self.kv.drop(endpoint.slot)
        self.fingerprints.drop(endpoint.slot)

    def _agent_connected(self, node: Node) -> None:
        """What an agent's feeds said before its Hello, it says again after it, if it still has them."""
        for endpoint in node.endpoints.values():
            self.kv.drop(endpoint.slot)

    def _ended(self, reservation: Reservation, cause: EndCause, now: float) -> None:
        """However it ended: if it did not end well, it is lost to the cost model."""
        work = reservation.attachment
        if isinstance(work, Work) and work.flight is not None:
            self.costs.lost(work.flight, now)

    def _still_running(self, reservation: Reservation) -> bool:
        """Does the engine, by a fresh sample, run at least as many requests as we count there?"""
        endpoint = self.fleet.by_slot.get(reservation.slot)
        if endpoint is None or endpoint.sample is None or endpoint.sample.running.value is None:
            return False
        fresh = self.clock() - self.fleet.columns.sampled_at[endpoint.slot] < self.config.stale_after_s
        return bool(fresh and endpoint.sample.running.value >= self.fleet.columns.inflight[endpoint.slot])
