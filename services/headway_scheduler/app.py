"""The composition root: builds the scheduler's parts, connects them, and keeps what runs beside the calls."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import numpy as np
import structlog

from headway_scheduler.admission.dispatcher import Dispatcher, DispatcherConfig
from headway_scheduler.admission.intake import Intake
from headway_scheduler.admission.reporting import Reporting
from headway_scheduler.admission.salts import Salts
from headway_scheduler.config import Config
from headway_scheduler.domain.desired import DesiredState, Model
from headway_scheduler.domain.device import DeviceKind
from headway_scheduler.domain.report import Usage as RequestUsage
from headway_scheduler.domain.usage import Usage
from headway_scheduler.errors import DuplicateName, HeadwayError, ShuttingDown, StoreDown
from headway_scheduler.fleet.fleet import Endpoint, Fleet, FleetConfig
from headway_scheduler.fleet.ledger import EndCause, Ledger, LedgerConfig, Reservation
from headway_scheduler.index.chain import ChainIndex
from headway_scheduler.index.fingerprint import FingerprintIndex
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.history import History
from headway_scheduler.learning.priors import prior
from headway_scheduler.store.base import Store, Write
from headway_scheduler.strategies.catalog import algorithms
from headway_scheduler.strategies.registry import StrategyRegistry

__all__ = ["Scheduler"]

log = structlog.get_logger()

_TICK_S: Final = 0.05
_SWEEP_S: Final = 0.25
_PERSIST_S: Final = 5.0
_RESTART_S: Final = 1.0
_RETRY_S: Final = 0.5
_SALT_KEY: Final = "cache_salt_secret"


class Scheduler:
    """All of one scheduler but its wire: state, decisions, and the tasks that keep both current."""

    def __init__(
        self, config: Config, store: Store, clock: Callable[[], float] = time.monotonic, epoch: str | None = None
    ) -> None:
        self.config, self.store, self.clock = config, store, clock
        self.epoch = epoch or secrets.token_hex(4)
        self.started_at = time.time()
        self.draining = False
        self.desired = DesiredState()
        self.refusals: dict[str, int] = {}
        self.fleet = Fleet(FleetConfig(stale_after_s=config.stale_after_s))
        self.ledger = Ledger(
            self.fleet.columns, config.name, self.epoch, LedgerConfig(resume_grace_s=config.resume_grace_s)
        )
        self.index = ChainIndex()
        self.fingerprints = FingerprintIndex()
        self.costs = CostModel(self.fleet.columns, config.time_scale)
        self.history = History(config.time_scale)
        self.registry = StrategyRegistry(algorithms(), time.thread_time)
        self.intake = Intake(self.history)
        self.salts = Salts(b"")
        self.dispatcher = Dispatcher(
            fleet=self.fleet,
            ledger=self.ledger,
            index=self.index,
            fingerprints=self.fingerprints,
            registry=self.registry,
            costs=self.costs,
            history=self.history,
            salts=self.salts,
            random=np.random.default_rng(config.seed),
            config=DispatcherConfig(default_max_wait_s=config.max_wait_s, max_holds=config.max_holds),
        )
        self.reporting = Reporting(self.dispatcher, self.costs, self.history, self._record_usage)
        self._usage: dict[tuple[str, str, datetime], Usage] = {}
        self._discovered: dict[str, Model] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._saving: asyncio.Task[None] | None = None
        self._pass_due = False
        self._refreshing = asyncio.Lock()
        self._connect_parts()

    # Life

    async def start(self) -> None:
        """Load the desired and the learned state, and start the tasks beside the calls."""
        await self.refresh()
        await self._restore(await self.store.load_learned())
        self.dispatcher.wake = self._wake
        self.dispatcher.settled_at = self.clock() + self.config.settle_s
        for task in (self._follow_changes, self._tick, self._persist):
            self._tasks.append(asyncio.create_task(_forever(task)))
        log.info("scheduler_started", name=self.config.name, epoch=self.epoch, version=self.desired.version)

    def drain(self) -> None:
        """Refuse what is new, and what is held."""
        self.draining = True
        self.dispatcher.refuse_holds(self.shutting_down())

    async def stop(self) -> None:
        """Stop the tasks and save what was learned."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        with contextlib.suppress(StoreDown):
            await self._save()
        log.info("scheduler_stopped", reservations=len(self.ledger.reservations))

    def shutting_down(self) -> HeadwayError:
        """The refusal of a scheduler that goes away."""
        return ShuttingDown(f"scheduler {self.config.name!r} is shutting down; ask another")

    def count_refusal(self, error: HeadwayError) -> None:
        """Remember that a Route was refused, for Fleet and the metrics."""
        self.refusals[error.reason] = self.refusals.get(error.reason, 0) + 1

    # Desired state

    async def refresh(self) -> None:
        """Load the desired state afresh and apply it: the next Route sees it."""
        async with self._refreshing:  # a snapshot loaded earlier must not be applied later
            self.desired = await self.store.load()
            self._discovered = {
                name: model
                for name, model in self._discovered.items()
                if name in self.desired.models or len(self.fleet.pool(name))
            }
            self._apply_desired()

    def _apply_desired(self) -> None:
        known = {*self.desired.models, *(alias for m in self.desired.models.values() for alias in m.aliases)}
        unknown = {name: model for name, model in self._discovered.items() if name not in known}
        effective = replace(self.desired, models={**self.desired.models, **unknown})
        self.fleet.set_desired(effective)
        self.intake.set_desired(effective)
        for strategy, problem in self.registry.set_desired(effective):
            log.error("strategy_not_built", strategy=strategy, problem=problem)
        self.dispatcher.wake()

    async def _follow_changes(self) -> None:
        async for version in self.store.changes():
            if version != self.desired.version:
                await self._refresh_surely()

    async def _refresh_surely(self) -> None:
        while True:
            try:
                await self.refresh()
            except StoreDown:
                await asyncio.sleep(_RETRY_S)
            else:
                log.info("desired_state_applied", version=self.desired.version)
                return

    # Beside the calls

    async def _tick(self) -> None:
        swept = self.clock()
        while True:
            await asyncio.sleep(_TICK_S)
            now = self.clock()
            self.dispatcher.advance(now)
            if now - swept >= _SWEEP_S:
                swept = now
                self.fleet.sweep(now)
                if len(self.dispatcher.holds):
                    self.dispatcher.run_pass(now)

    async def _persist(self) -> None:
        while True:
            await asyncio.sleep(_PERSIST_S)
            try:
                await self._save()
            except StoreDown as error:
                log.warning("learned_state_not_saved", problem=error.message)

    async def _save(self) -> None:
        rows, self._usage = list(self._usage.values()), {}
        try:
            await self.store.save_learned({"cost_model": self.costs.dump(), "history": self.history.dump()})
            if rows:
                await self.store.record_usage(rows)
        except BaseException:  # also when cancelled: rather a row twice than none
            for row in rows:
                self._add_usage(row)
            raise
        await self._save_discovered()

    async def _save_discovered(self) -> None:
        """Add the models that agents report to the catalogue; what fails now is tried again with the next save."""
        new = [model for model in self._discovered.values() if model.id not in self.desired.models]
        with contextlib.suppress(StoreDown):
            for model in new:
                with contextlib.suppress(DuplicateName):
                    await self.store.create(model, Write(principal="scheduler", method="DiscoverModel"))
            if new:
                await self.refresh()

    async def _restore(self, learned: Mapping[str, bytes]) -> None:
        if _SALT_KEY not in learned:
            secret = secrets.token_bytes(32)
            await self.store.save_learned({_SALT_KEY: secret})
            learned = {**learned, _SALT_KEY: secret}
        self.salts.set_secret(learned[_SALT_KEY])
        for key, part in (("cost_model", self.costs), ("history", self.history)):
            if key in learned:
                try:
                    part.restore(learned[key])
                except ValueError as error:
                    log.warning("learned_state_ignored", key=key, problem=str(error))

    def _wake(self) -> None:
        """Make a pass over the holds soon: once, however many ask for it."""
        if not self._pass_due and len(self.dispatcher.holds):
            self._pass_due = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._pass_due = False
        self.dispatcher.run_pass(self.clock())

    # Parts that know each other through here only

    def _connect_parts(self) -> None:
        self.fleet.on_announced.append(self._announced)
        self.fleet.on_removed.append(self._removed)
        self.fleet.on_restarted.append(self._forgot_everything)
        self.ledger.still_running = self._still_running

    def _announced(self, endpoint: Endpoint) -> None:
        spec, hello = endpoint.spec, endpoint.node.hello
        devices = [device for device in hello.devices if device.uuid in spec.device_uuids]
        product = devices[0].product if devices else ""
        is_cpu = bool(devices) and all(device.kind is DeviceKind.CPU for device in devices)
        key = f"{endpoint.id} {spec.engine} {spec.engine_version}"
        self.costs.install(endpoint.slot, key, prior(spec.hardware, product, is_cpu))
        self.index.set_capacity(endpoint.slot, float(self.fleet.columns.kv_capacity[endpoint.slot]))
        new = [model for model in spec.models if model not in self._discovered]
        if new:
            self._discovered.update((model, Model(model, discovered=True)) for model in new)
            self._apply_desired()
            # At once: a scheduler that restarts before its agents are back must know what it serves.
            self._saving = asyncio.get_running_loop().create_task(self._save_discovered())
        self._wake()

    def _removed(self, endpoint: Endpoint) -> None:
        now = self.clock()
        for reservation in self.ledger.on_slot(endpoint.slot):
            self.ledger.end(reservation, EndCause.ENDPOINT_GONE, now)
        self._forgot_everything(endpoint)

    def _forgot_everything(self, endpoint: Endpoint) -> None:
        self.index.drop(endpoint.slot)
        self.fingerprints.drop(endpoint.slot)

    def _still_running(self, reservation: Reservation) -> bool:
        """Does the engine, by a fresh sample, run at least as many requests as we count there?"""
        endpoint = self.fleet.by_slot.get(reservation.slot)
        if endpoint is None or endpoint.sample is None or endpoint.sample.running.value is None:
            return False
        fresh = self.clock() - self.fleet.columns.sampled_at[endpoint.slot] < self.config.stale_after_s
        return bool(fresh and endpoint.sample.running.value >= self.fleet.columns.inflight[endpoint.slot])

    def _record_usage(self, tenant: str, model: str, usage: RequestUsage) -> None:
        minute = datetime.now(UTC).replace(second=0, microsecond=0)
        self._add_usage(
            Usage(
                tenant=tenant,
                model=model,
                minute=minute,
                requests=1,
                prompt_tokens=usage.prompt_tokens or 0,
                cached_tokens=usage.cached_tokens or 0,
                completion_tokens=usage.completion_tokens or 0,
            )
        )

    def _add_usage(self, row: Usage) -> None:
        key = (row.tenant, row.model, row.minute)
        before = self._usage.get(key)
        self._usage[key] = row if before is None else before.plus(row)


async def _forever(task: Callable[[], Awaitable[None]]) -> None:
    """Run a task beside the calls; a fault in it is logged and the task starts again, nothing else is touched."""
    while True:
        try:
            await task()
        except Exception:
            log.exception("background_task_failed", task=task.__name__)
            await asyncio.sleep(_RESTART_S)
