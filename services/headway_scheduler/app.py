"""The composition root: builds the scheduler's parts, connects them, and keeps what runs beside the calls."""

import asyncio
import contextlib
import gc
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog
from headway_tracing.build import tracing_to

from headway_scheduler.addresses import EngineAddresses
from headway_scheduler.admission.fairness import ServiceWeights
from headway_scheduler.admission.holds import HoldLimits
from headway_scheduler.admission.watching import Observations
from headway_scheduler.config import Config
from headway_scheduler.core import TICK_S, Core, CoreConfig, Learned
from headway_scheduler.domain.desired import DesiredState
from headway_scheduler.domain.report import Usage as RequestUsage
from headway_scheduler.domain.request import Request
from headway_scheduler.errors import (
    DuplicateName,
    HeadwayError,
    NoEndpoints,
    Saturated,
    ShuttingDown,
    Standby,
    StoreDown,
)
from headway_scheduler.fleet.ledger import EndCause
from headway_scheduler.leadership import Leadership, LeadershipThread, Standing, lease_clock
from headway_scheduler.learned_state import LearnedState
from headway_scheduler.metrics.counts import Counts
from headway_scheduler.record.export import Export
from headway_scheduler.record.recorder import observe
from headway_scheduler.record.ring import Record, RecordConfig
from headway_scheduler.store.base import LeaderLock, Store, Write
from headway_scheduler.strategies.catalog import algorithms
from headway_scheduler.tokenizing import Tokenizers
from headway_scheduler.usage import UsageLog

__all__ = ["AuthenticationCounts", "DiscoveryCounts", "Scheduler"]

log = structlog.get_logger()

_PRUNE_S: Final = 3600.0
_GROWN: Final = 1.25
"""A fleet that is larger by this is looked at as new."""
_EXPORT_S: Final = 1.0
_SAVE_PAUSE_S: Final = 0.01
"""Between parts of what was learned, each of which takes about a millisecond to make."""
_RESTART_S: Final = 1.0
_RETRY_S: Final = 0.5
_HANGS_S: Final = 10.0
_SALT_KEY: Final = "cache_salt_secret"
_QUOTAS_KEY: Final = "quotas"


@dataclass(slots=True)
class AuthenticationCounts:
    """Calls whose credential did not count: told so, and told only to come back later."""

    failed: int = 0
    limited: int = 0


@dataclass(slots=True)
class DiscoveryCounts:
    """What Envoys were told: streams open now, answers sent, answers that an Envoy rejected."""

    streams: int = 0
    answers: int = 0
    rejections: int = 0


class Scheduler:
    """All of one scheduler but its wire: state, decisions, and the tasks that keep both current.

    With a `lock` it shares the database with others, of which one leads at a time; without one it is alone.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
        epoch: str | None = None,
        lock: LeaderLock | None = None,
    ) -> None:
        self.config, self.store, self.clock = config, store, clock
        self.epoch = epoch or secrets.token_hex(4)
        self.started_at = time.time()
        self.draining = False
        self._follows = False
        self.leadership = Leadership(
            lock, config.lease_s, prepare=self._prepare, retire=self._retire, alive=lambda: not self._hangs()
        )
        self.leadership.on_change.append(self._change_standing)
        self.on_standing: list[Callable[[], None]] = []
        self.refusals: dict[str, int] = {}
        self.addresses = EngineAddresses()
        self.discovery = DiscoveryCounts()
        self.authentication = AuthenticationCounts()
        self.core = Core(
            CoreConfig(
                name=config.name,
                epoch=self.epoch,
                seed=config.seed,
                time_scale=config.time_scale,
                stale_after_s=config.stale_after_s,
                resume_grace_s=config.resume_grace_s,
                max_wait_s=config.max_wait_s,
                hold_limits=HoldLimits(
                    config.max_holds, config.max_hold_bytes, config.max_tenant_holds, config.max_tenant_hold_bytes
                ),
                hold_order=config.hold_order,
                service=ServiceWeights(config.fair_input, config.fair_cached, config.fair_output),
                guards=config.guards,
                hard_guards_off=config.hard_guards_off,
                devices=config.devices,
                ejection=config.ejection,
                retries=config.retries,
                learn=frozenset(
                    part
                    for part, wanted in ((Learned.COSTS, config.learn_costs), (Learned.HISTORY, config.learn_history))
                    if wanted
                ),
            ),
            algorithms=algorithms(),
            clock=clock,
            timer=time.thread_time,
            wall=time.perf_counter,
            record_usage=self._record_usage,
        )
        self.fleet, self.ledger, self.dispatcher = self.core.fleet, self.core.ledger, self.core.dispatcher
        self.index, self.kv, self.fingerprints = self.core.index, self.core.kv, self.core.fingerprints
        self.costs, self.history = self.core.costs, self.core.history
        self.registry, self.intake, self.salts = self.core.registry, self.core.intake, self.core.salts
        self.reporting = self.core.reporting
        self.observations = Observations()
        self.steering: tuple[object, ...] = ()
        """Whose requests are left to data planes; compared, to see whether they must be told."""
        self.schema_revision = ""
        self.agent_certificates: dict[str, float] = {}
        """When those end that agents showed, by node, in seconds since 1970."""
        self.learned = LearnedState(store, {"cost_model": self.costs, "history": self.history})
        self.record = Record(RecordConfig(config.record_decisions, config.record_bytes))
        self.counts = Counts(config.metrics_series)
        self.recorder = observe(self.core, self.record, self.counts, time.perf_counter, time.time)
        self.tracing = tracing_to(config.trace_endpoint, f"headway-scheduler/{config.name}", config.trace_share)
        self.export: Export | None = None
        if config.export_dir is not None:
            self.export = Export(config.export_dir, config.export_share, config.export_file_bytes, config.export_files)
            self.recorder.sink = self.export
        self.tokenizers = Tokenizers(config.tokenizers_dir)
        self.dispatcher.prefixes.tokenize = self.tokenizers.ids
        self.usage = UsageLog(f"{config.name}.{self.epoch}.", lambda: datetime.now(UTC))
        self.fail_open_routes: dict[str, int] = {}
        self.dispatcher.on_refused = self._record_refusal
        self.reporting.on_failed = lambda tenant, model: self.usage.add(tenant, model, failures=1)
        self._tasks: list[asyncio.Task[None]] = []
        self.leader_thread = LeadershipThread(self.leadership)
        self._decided = asyncio.Event()
        self._decided.set()
        self._ticked_at = float("inf")
        self._spared = 0
        self._saving: set[asyncio.Task[None]] = set()
        self._pass_due = False
        self._refreshing = asyncio.Lock()

    # Life

    async def start(self) -> None:
        """Load the desired and the learned state, and start the tasks beside the calls."""
        await self.refresh()
        self.schema_revision = await self.store.schema_revision()
        await self._restore(await self.store.load_learned())
        self.dispatcher.wake = self._wake
        self.core.on_discovered = self._save_discovered_soon
        self.dispatcher.settled_at = self.clock() + self.config.settle_s
        self._loop, self._ticked_at = asyncio.get_running_loop(), lease_clock()
        if self.config.standby:
            self.leader_thread.start()
        for task in (self._follow_changes, self._tick, self._persist, self._prune, self._write_export):
            self._tasks.append(asyncio.create_task(_forever(task)))
        log.info("scheduler_started", name=self.config.name, epoch=self.epoch, version=self.desired.version)

    def drain(self) -> None:
        """Refuse what is new, and what is held."""
        self.draining = True
        self.dispatcher.refuse_holds(self.shutting_down(), self.clock())

    async def hand_over(self) -> None:
        """Save what was learned, and let another scheduler lead at once. Only what is in flight is still followed."""
        self._follows = self.leadership.leads()
        with contextlib.suppress(StoreDown):
            await self._save()
        await self._resign()

    async def stop(self) -> None:
        """Stop the tasks and save what was learned."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*self._saving, return_exceptions=True)  # the store is closed after this
        if self.export is not None:
            await asyncio.to_thread(self.export.write)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        with contextlib.suppress(StoreDown):
            await self._save()
        await self._resign()
        log.info("scheduler_stopped", reservations=len(self.ledger.reservations))

    def shutting_down(self) -> HeadwayError:
        """The refusal of a scheduler that goes away."""
        return ShuttingDown(f"scheduler {self.config.name!r} is shutting down; ask another")

    # Who answers

    @property
    def serves(self) -> bool:
        """Does it lead, or still follow what it led? Ask anew after every wait."""
        return self.leadership.leads() or self._follows

    @property
    def is_settled(self) -> bool:
        """Have agents had the time to come back since it started?"""
        return self.clock() >= self.dispatcher.settled_at

    async def opened(self) -> None:
        """Wait while it takes over. Raises Standby where another leads."""
        if not self.serves:
            await self._decided.wait()
            self.check_serves()

    def check_serves(self) -> None:
        """Raises Standby where another leads, or may."""
        if not self.serves:
            raise self._standby()

    def check_takes(self) -> None:
        """May it answer a Route? Raises ShuttingDown, Standby."""
        if self.draining:
            raise self.shutting_down()
        if not self.leadership.leads():
            raise self._standby()

    def _standby(self) -> HeadwayError:
        return Standby(f"scheduler {self.config.name!r} does not lead; ask another")

    # The leadership's thread calls these; what they start runs here, in the order they were called.

    async def _prepare(self, epoch: int) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._take_over(epoch), self._loop))

    def _retire(self) -> None:
        self._loop.call_soon_threadsafe(self._stand_down)

    def _change_standing(self) -> None:
        self._loop.call_soon_threadsafe(self._standing_changed)

    def _hangs(self) -> bool:
        """Has the event loop done nothing for so long that another scheduler had better lead?"""
        return lease_clock() - self._ticked_at > _HANGS_S

    def _standing_changed(self) -> None:
        if self.leadership.standing is Standing.TAKING_OVER:
            self._decided.clear()
        else:
            self._decided.set()
        for listener in self.on_standing:
            listener()

    async def _take_over(self, epoch: int) -> None:
        """What the leader before learned and counted, as it saved it last."""
        await self.refresh()
        await self._restore(await self.store.load_learned())
        log.info("learned_state_taken_over", epoch=epoch)

    def _stand_down(self) -> None:
        """Another leads: whatever was held or reserved here is its own now, its clients see to it."""
        self.dispatcher.refuse_holds(self._standby(), self.clock())
        now, left = self.clock(), list(self.ledger.reservations.values())
        for reservation in left:
            self.ledger.end(reservation, EndCause.ORPHANED, now)
        log.warning("stood_down", reservations=len(left))

    async def _resign(self) -> None:
        await self.leader_thread.resign()

    def count_fail_open(self, request: Request) -> None:
        """A data plane had placed it by itself while no scheduler answered."""
        self.fail_open_routes[request.tenant] = self.fail_open_routes.get(request.tenant, 0) + 1
        self.usage.add(request.tenant, request.model, fail_open=1)

    def count_refusal(self, error: HeadwayError) -> None:
        """Remember that a Route was refused, for Fleet and the metrics."""
        self.refusals[error.reason] = self.refusals.get(error.reason, 0) + 1

    # Desired state

    @property
    def desired(self) -> DesiredState:
        """What admins configured, as it applies now."""
        return self.core.desired

    async def refresh(self) -> None:
        """Load the desired state afresh and apply it: the next Route sees it."""
        async with self._refreshing:  # a snapshot loaded earlier must not be applied later
            desired = await self.store.load()
            if self.tokenizers.folder is not None:
                await asyncio.to_thread(self.tokenizers.set_models, list(desired.models.values()))
            self.core.set_desired(desired)
            shares = ((each.id, each.routed_percent) for each in desired.tenants.values() if each.routed_percent < 100)
            self.steering = (desired.bypassed, tuple(shares))

    async def _follow_changes(self) -> None:
        # Closed here: left to the garbage collector, its connection would be too.
        async with contextlib.aclosing(self.store.changes()) as versions:
            async for version in versions:
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
        while True:
            await asyncio.sleep(TICK_S)
            self._ticked_at = lease_clock()
            if self.serves or not len(self.dispatcher.holds):
                self.core.tick(self.clock())

    async def _persist(self) -> None:
        while True:
            await asyncio.sleep(self.config.save_interval_s)
            try:
                await self._save(_SAVE_PAUSE_S)
            except StoreDown as error:
                log.warning("learned_state_not_saved", problem=error.message)
            self._spare_the_fleet()

    async def _write_export(self) -> None:
        while True:
            await asyncio.sleep(_EXPORT_S)
            if self.export is not None:
                await asyncio.to_thread(self.export.write)

    def _spare_the_fleet(self) -> None:
        """Have the garbage collector no longer look at what a grown fleet is made of.

        It stays, and to look at 10,000 endpoints takes the collector 70 ms, in which nothing is decided.
        """
        if len(self.fleet.endpoints) > _GROWN * self._spared:
            self._spared = len(self.fleet.endpoints)
            gc.freeze()

    async def _prune(self) -> None:
        """Forget usage that is older than anyone wants to read."""
        while True:
            if self.leadership.leads():
                with contextlib.suppress(StoreDown):
                    kept = timedelta(days=self.config.usage_retention_days)
                    await self.store.forget_usage(datetime.now(UTC) - kept)
            await asyncio.sleep(_PRUNE_S)

    async def _save(self, pause_s: float = 0.0) -> None:
        await self._save_learned(pause_s)
        await self.usage.flush(self.store)
        await self._save_discovered()

    async def _save_learned(self, pause_s: float) -> None:
        """What the leader learned; once another leads, what it learned counts."""
        if not self.leadership.leads():
            return
        epoch = self.leadership.epoch
        try:
            quotas = self.dispatcher.quotas.dump(self.clock(), time.time())
            await self.store.save_learned({_QUOTAS_KEY: quotas}, epoch=epoch)
            await self.learned.save(epoch, pause_s)
        except Standby as error:
            log.warning("learned_state_refused", problem=error.message)

    async def _save_discovered(self) -> None:
        """Add the models that agents report to the catalogue; what fails now is tried again with the next save."""
        new = [model for model in self.core.discovered.values() if model.id not in self.desired.models]
        with contextlib.suppress(StoreDown):
            for model in new:
                with contextlib.suppress(DuplicateName):
                    await self.store.create(model, Write(principal="scheduler", method="DiscoverModel"))
            if new:
                await self.refresh()

    async def _restore(self, learned: Mapping[str, bytes]) -> None:
        secret = learned.get(_SALT_KEY) or await self.store.keep_learned(_SALT_KEY, secrets.token_bytes(32))
        self.salts.set_secret(secret)
        if self.export is not None:
            self.export.set_secret(secret)
        if _QUOTAS_KEY in learned:
            try:
                self.dispatcher.quotas.restore(learned[_QUOTAS_KEY], self.clock(), time.time())
            except ValueError as error:
                log.warning("learned_state_ignored", key=_QUOTAS_KEY, problem=str(error))
        self.learned.restore(learned)

    def _wake(self) -> None:
        """Make a pass over the holds soon: once, however many ask for it."""
        if not self._pass_due and len(self.dispatcher.holds):
            self._pass_due = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._pass_due = False
        if self.serves:
            self.dispatcher.run_pass(self.clock())

    def _save_discovered_soon(self) -> None:
        """At once: a scheduler that restarts before its agents are back must know what it serves."""
        task = asyncio.get_running_loop().create_task(self._save_discovered())
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    def _record_usage(self, tenant: str, model: str, usage: RequestUsage) -> None:
        self.usage.add(
            tenant,
            model,
            requests=1,
            prompt_tokens=usage.prompt_tokens or 0,
            cached_tokens=usage.cached_tokens or 0,
            completion_tokens=usage.completion_tokens or 0,
        )

    def _record_refusal(self, request: Request, error: HeadwayError) -> None:
        if isinstance(error, Saturated | NoEndpoints):
            self.usage.add(request.tenant, request.model, refusals=1)


async def _forever(task: Callable[[], Awaitable[None]]) -> None:
    """Run a task beside the calls; a fault in it is logged and the task starts again, nothing else is touched."""
    while True:
        try:
            await task()
        except Exception:
            log.exception("background_task_failed", task=task.__name__)
            await asyncio.sleep(_RESTART_S)
