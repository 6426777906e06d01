"""One decision, top to bottom: take in, choose, dispatch or hold, answer.

Nothing here awaits: a decision and its reservation are one turn of the event loop, so no second Route sees the state
between them. Time is passed in; a simulator drives the same object.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np
from msgspec.structs import replace

from headway_scheduler.admission.booking import Booker
from headway_scheduler.admission.choosing import Chooser, names_endpoint
from headway_scheduler.admission.drain import DrainRates, Pool
from headway_scheduler.admission.explaining import Explanation, rows_of
from headway_scheduler.admission.fairness import DEFAULT_WEIGHTS, FairShare, ServiceWeights
from headway_scheduler.admission.guards import GuardConfig
from headway_scheduler.admission.holds import DEFAULT_LIMITS, Hold, HoldLimits, HoldOrder, Holds, Line, Waiter
from headway_scheduler.admission.observing import Observer
from headway_scheduler.admission.prefixes import Prefixes
from headway_scheduler.admission.quotas import QuotaBook
from headway_scheduler.admission.retries import Retries, RetryConfig
from headway_scheduler.admission.salts import Salts
from headway_scheduler.admission.values import Choice, Work
from headway_scheduler.admission.watching import Verdict
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Tenant
from headway_scheduler.domain.request import Request
from headway_scheduler.errors import HeadwayError, HoldExpired, NoEndpoints, QueueFull, RequestIdInUse, Saturated, Shed
from headway_scheduler.faults import unexpected
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.fleet.ledger import EndCause, Ledger
from headway_scheduler.fleet.members import Endpoint
from headway_scheduler.fleet.values import Owner, Reservation
from headway_scheduler.index.chain import ChainIndex
from headway_scheduler.index.fingerprint import FingerprintIndex
from headway_scheduler.index.kv import KvIndex
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.history import History
from headway_scheduler.strategies.registry import Bound, StrategyRegistry
from headway_scheduler.strategies.view import Tentative

__all__ = ["Dispatcher", "DispatcherConfig"]

_UNREPORTED: Final = frozenset({EndCause.EXPIRED, EndCause.ORPHANED})
_URGENT_MS: Final = 5_000.0
_URGENT_PREFILLS: Final = 3.0
_URGENT_SHARE: Final = 0.5
_AGEING: Final = 0.3
_TIDY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class DispatcherConfig:
    """Limits of a decision. Times in seconds; `time_scale` divides those that are the engines' own.

    `kv_quantile`: which of the answers of its kind a request's memory is booked for; None: the mean one.
    """

    default_max_wait_s: float = 30.0
    deadline_margin_s: float = 0.1
    limits: HoldLimits = DEFAULT_LIMITS
    order: HoldOrder = HoldOrder.FAIR
    service: ServiceWeights = DEFAULT_WEIGHTS
    holds_per_pass: int = 256
    fallbacks: int = 3
    max_index_blocks: int = 4096
    kv_quantile: float | None = None
    time_scale: float = 1.0
    guards: GuardConfig = field(default_factory=GuardConfig)
    retries: RetryConfig = field(default_factory=RetryConfig)


class Dispatcher:
    """Decides and reserves. `wake` is called when a pass over the holds is worth making, `on_refused` of each refusal.

    Until `settled_at` the fleet is still being learned, after a start: what finds no endpoint yet is held for it.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        ledger: Ledger,
        index: ChainIndex,
        kv: KvIndex,
        fingerprints: FingerprintIndex,
        registry: StrategyRegistry,
        costs: CostModel,
        history: History,
        salts: Salts,
        random: np.random.Generator,
        config: DispatcherConfig | None = None,
    ) -> None:
        self.config = config or DispatcherConfig()
        self.fleet, self.ledger, self.registry = fleet, ledger, registry
        self.holds = Holds(self.config.limits)
        self.fair = FairShare(fleet.arenas, self.config.service)
        self.quotas = QuotaBook()
        self.retries = Retries(self.config.retries, self._active)
        self.wake: Callable[[], None] = lambda: None
        self.on_refused: Callable[[Request, HeadwayError], None] = lambda _request, _error: None
        self.settled_at = float("-inf")
        self.prefixes = Prefixes(
            fleet, index, kv, salts, max_blocks=self.config.max_index_blocks, time_scale=self.config.time_scale
        )
        self._chooser = Chooser(
            fleet,
            self.prefixes,
            fingerprints,
            registry,
            random,
            self.config.time_scale,
            1 + self.config.fallbacks,
            self.config.guards,
        )
        self._booker = Booker(
            fleet,
            ledger,
            self.prefixes,
            fingerprints,
            costs,
            history,
            salts,
            self.retries,
            fallbacks=self.config.fallbacks,
            max_index_blocks=self.config.max_index_blocks,
            kv_quantile=self.config.kv_quantile,
        )
        self._drain = DrainRates(random)
        self._tidied_at = float("-inf")
        self.guards = self._chooser.guards
        ledger.on_end.append(self._on_end)
        ledger.on_room.append(self._on_room)

    def observe(self, observer: Observer) -> None:
        """Tell it of every decision and refusal from now on."""
        self._booker.observer = observer

    @property
    def routes(self) -> int:
        """Decisions made."""
        return self._booker.routes

    # Route

    def submit(
        self, request: Request, tenant: Tenant, owner: Owner, now: float, deadline: float | None = None
    ) -> Decision | Waiter:
        """Decide now, or hold. `deadline`: when the caller gives up by itself. Raises every refusal of errors.py."""
        observer = self._booker.observer
        began = 0.0 if observer is None else observer.timer()
        try:
            outcome = self._submit(request, tenant, owner, now, deadline)
        except HeadwayError as error:
            self._note(request, self._limited(error, tenant.id, now), 0.0)
            raise
        if observer is not None:
            observer.submitted(observer.timer() - began)
        return outcome if isinstance(outcome, Waiter) else self._with_limits(outcome, tenant.id, now)

    def _submit(
        self, request: Request, tenant: Tenant, owner: Owner, now: float, deadline: float | None
    ) -> Decision | Waiter:
        self.ledger.advance(now)
        work = self._work(request, owner, now)
        live = self.ledger.by_request.get(work.key)
        if live is not None:
            return self._again(live, work, now)
        held = self.holds.find(work.key)
        if held is not None:
            if not _same(held.work, work):
                raise RequestIdInUse(request.request_id)
            return held.join(owner, self._until(request, now, deadline))
        if request.excluded:
            self.retries.admit(work, self._retry_after(work.request, now))
        try:
            self.quotas.admit(tenant, request.model, work.estimated_tokens, now)
        except BaseException:
            self.retries.over(work)
            raise
        try:
            outcome = self._dispatch_or_hold(work, now, deadline)
        except BaseException:
            self._refund(work)
            raise
        if isinstance(outcome, HeadwayError):
            raise outcome  # its hold was let go, and what it had taken with it
        return outcome

    def give_up(self, waiter: Waiter) -> None:
        """A call stops waiting. When it was the last one, the hold leaves no trace."""
        hold = waiter.hold
        hold.leave(waiter)
        if not hold.waiters:
            self._let_go(hold)

    def give_back(self, reservation_id: str, owner: Owner, now: float) -> None:
        """A call of `owner` does not want what it was answered. The last of those that share it ends it."""
        reservation = self.ledger.find(reservation_id)
        if reservation is None or reservation.owner is not owner:
            return  # it is over, or a retry took it elsewhere
        reservation.claims -= 1
        if reservation.claims <= 0:
            self.ledger.end(reservation, EndCause.CANCELLED, now)

    def run_pass(self, now: float) -> None:
        """Try the holds again, in the order of service.

        Each that must wait for an endpoint is tentatively placed there, so that those behind it see the queue they
        will meet (FIELD.md, Late binding). Among holds of strategies that bind at once, a pool that had no room for
        one has none for those behind it. Borrowed endpoints come last, when all who own any have had their turn. Of
        each pool's line only the first `holds_per_pass` are tried: a long line makes no pass long, and keeps no other
        pool's from being tried.
        """
        self.ledger.advance(now)
        tentative = Tentative(self.fleet.columns.capacity)
        full: set[tuple[object, ...]] = set()
        tried: dict[tuple[object, ...], int] = {}
        strict = self.config.order is HoldOrder.STRICT
        ordered = list(self._line(now))
        borrowers = [hold for hold in ordered if self.fleet.rights(hold.work.request.tenant).burst]
        for hold, burst in [*((hold, False) for hold in ordered), *((hold, True) for hold in borrowers)]:
            if self.holds.find(hold.work.key) is not hold:
                continue
            request = hold.work.request
            pool, part = _pool_of(hold.work, burst)
            where = (*self._where(request), burst)
            if pool in full or part in full or where in full or tried.get(where, 0) >= self.config.holds_per_pass:
                continue
            tried[where] = tried.get(where, 0) + 1
            bound = self.registry.bound(request.tenant, request.model)
            if not self._chooser.may_take(request, bound, burst):
                full.add(pool)
                continue
            try:
                decision, waits_late = self._dispatch(hold.work, now, tentative, burst)
            except HeadwayError:
                decision, waits_late = None, False  # its pool is gone for now; it may be back before the hold expires
            except Exception as error:  # it fails alone, and must not stop every pass before those behind it
                self._let_go(hold)
                self._refuse(hold, unexpected(error), now)
                continue
            if decision is not None:
                if self.holds.remove(hold):
                    self._share(decision, hold)
                    hold.settle(self._with_limits(decision, hold.work.request.tenant, now))
            elif strict:
                full.add(where)
            elif not waits_late:
                full.add(part)

    def advance(self, now: float) -> None:
        """Do what time does: expire reservations and holds."""
        self.ledger.advance(now)
        for waiter in self.holds.overdue(now):
            refusal = self._expired(waiter.hold, now)
            tenant = waiter.hold.work.request.tenant
            self.give_up(waiter)
            self._note(waiter.hold.work.request, refusal, (now - waiter.hold.work.submitted_at) * 1e3)
            waiter.answer(self._limited(refusal, tenant, now))
        if now - self._tidied_at >= _TIDY_S:
            self._tidied_at = now
            self.fair.tidy(self.holds.tenants)

    def recheck_holds(self, problem: Callable[[Request], HeadwayError | None], now: float) -> None:
        """Answer at once what may not be asked any more, since admins changed something."""
        for hold in list(self.holds):
            request = hold.work.request
            refusal = problem(request)
            if refusal is not None:
                self._let_go(hold)
                self._refuse(hold, self._limited(refusal, request.tenant, now), now)

    def refuse_holds(self, error: HeadwayError, now: float) -> None:
        """Answer every hold with `error`: the scheduler goes away."""
        for hold in self.holds:
            self._let_go(hold)
            self._refuse(hold, error, now)

    # Reservations

    def move(self, reservation: Reservation, endpoint: Endpoint, now: float) -> None:
        """A data plane failed over by itself: count its request where it is served."""
        self._booker.move(reservation, endpoint, now)

    def restore(
        self,
        request: Request,
        tenant: Tenant,
        owner: Owner,
        endpoint: Endpoint,
        matched: int,
        now: float,
        *,
        fail_open: bool = False,
    ) -> Reservation:
        """Count again what another scheduler, or this one before a restart, had given; `fail_open`: none had."""
        reservation = self._booker.restore(request, owner, endpoint, matched, now)
        if isinstance(reservation.attachment, Work):
            tokens = reservation.attachment.estimated_tokens
            self.quotas.resume(tenant, request.model, tokens, now, uncounted=fail_open)
        return reservation

    def answered(self, work: Work, slot: int, tokens: int) -> None:
        """A request was answered with so many tokens."""
        self._booker.answered(work, slot, tokens)

    # Requests that somebody else places

    def appraise(self, request: Request, owner: Owner, now: float) -> Verdict:
        """What Route would do; nothing is reserved, and no strategy's shadow is asked."""
        self.ledger.advance(now)
        work = self._work(request, owner, now)
        bound = self.registry.bound(request.tenant, request.model)
        try:
            choice = self._chooser.choose(work, bound, now)
        except HeadwayError as error:
            return Verdict(request, now, refusal=error.reason)
        ttft = choice.priced.costs.predicted_ttft_ms
        return Verdict(
            request,
            now,
            slots=choice.slots.tolist(),
            chosen=choice.position,
            hits=choice.hits.tolist(),
            ttft_ms=None if ttft is None else ttft.tolist(),
            held=not choice.dispatchable,
        )

    def place(self, request: Request, owner: Owner, endpoint: Endpoint, matched: int, now: float) -> Reservation:
        """Count a request where somebody else placed it. No quota is charged: it was not admitted here."""
        return self._booker.restore(request, owner, endpoint, matched, now)

    # Explain

    def explain(self, request: Request, strategy: str, owner: Owner, now: float, whole: bool) -> Explanation:
        """What Route would do. `whole`: also show the pool's endpoints outside the tenant's GPU groups."""
        self.ledger.advance(now)
        work = self._work(request, owner, now)
        bound = self.registry.bound(request.tenant, request.model)
        if strategy:
            bound = Bound(self.registry.get(strategy, "strategy"))
        choice, refusal = None, None
        try:
            choice = self._chooser.choose(work, bound, now)
        except HeadwayError as error:
            refusal = error
        rows = rows_of(self.fleet, self.prefixes, self._chooser, work, choice, whole, now)
        if choice is None:
            return Explanation(None, rows, refusal, False)
        why = self._booker.why(work, choice, int(choice.hit_tokens), choice.predicted_ttft_ms, now)
        held = not choice.dispatchable
        if held and self._max_wait(request) <= 0:
            refusal = self._saturated(request, now)
        return Explanation(why, rows, refusal, held and refusal is None)

    # Inside

    def _work(self, request: Request, owner: Owner, now: float) -> Work:
        work = self._booker.work(request, owner, now)
        work.patient = self._max_wait(request) > 0
        return work

    def _dispatch_or_hold(self, work: Work, now: float, deadline: float | None) -> Decision | Waiter | HeadwayError:
        refusal: HeadwayError | None = None
        if not len(self.holds):
            try:
                decision, _ = self._dispatch(work, now, None)
            except NoEndpoints as error:
                if now >= self.settled_at:
                    raise
                refusal = error
            else:
                if decision is not None:
                    return decision
            return self._hold(work, now, deadline, refusal)
        return self._join_line(work, now, deadline)

    def _join_line(self, work: Work, now: float, deadline: float | None) -> Decision | Waiter | HeadwayError:
        """Others wait already: take a place among them, and see whether it is this one's turn."""
        bound = self.registry.bound(work.request.tenant, work.request.model)
        refusal: HeadwayError | None = None
        try:
            choice = self._chooser.choose(work, bound, now)  # raises where no hold could help; ranks the work
        except NoEndpoints as error:
            if now >= self.settled_at:
                raise
            refusal, choice = error, None
        if choice is not None and choice.dispatchable and not work.patient and not self._yields(choice):
            return self._reserve_before_others(work, choice, now)
        waiter = self._hold(work, now, deadline, refusal)
        settled: list[Decision | HeadwayError] = []
        waiter.answer = settled.append
        self.run_pass(now)
        return settled[0] if settled else waiter

    def _yields(self, choice: Choice) -> bool:
        """Is the chosen endpoint borrowed, while a tenant that owns it waits?"""
        owners = (self.fleet.rights(tenant).own for tenant in self.holds.tenants) if choice.burst else ()
        return any(choice.slot in tier for tiers in owners for tier in tiers)

    def _dispatch(
        self, work: Work, now: float, tentative: Tentative | None, burst: bool | None = None
    ) -> tuple[Decision | None, bool]:
        """Choose and reserve; None where it must wait, and then whether it waits for one endpoint, bound late."""
        bound = self.registry.bound(work.request.tenant, work.request.model)
        choice = self._chooser.choose_in(work, bound, now, tentative, burst)
        if choice is None:
            return None, False
        work.cached = choice.hit_tokens
        if choice.dispatchable:
            self._chooser.watch(work, bound, choice, now)
            if self.config.order.is_fair:
                self.fair.charge(work, choice.slot, work.cached, waited=tentative is not None)
            return self._booker.reserve(work, choice, now), False
        if not choice.binds_late:
            return None, False
        if tentative is not None:
            tentative.add(choice.slot, self._booker.prefill_ms(work, choice))
        return None, True

    def _reserve_before_others(self, work: Work, choice: Choice, now: float) -> Decision:
        """It may not wait while others do: at once, if its tenant is not behind one of those, else not at all."""
        request = work.request
        if self.config.order.is_fair:
            others = [t for p, lines in self.holds.bands() if p >= request.priority for t in lines]
            if request.tenant not in others:
                self.fair.begin_to_wait(request.tenant, self.holds.waiting_in(request.priority))
            if self.fair.is_behind(request.tenant, others):
                raise self._saturated(request, now)
            self.fair.charge(work, choice.slot, choice.hit_tokens, waited=True)
        return self._booker.reserve(work, choice, now)

    def _line(self, now: float) -> Iterator[Hold]:
        """All holds in the order of service, whether or not there is room for them: priority first."""
        order = self.config.order
        for _, lines in self.holds.bands():
            if order is HoldOrder.FAIR:
                yield from self.fair.interleave(
                    {t: self._fair_line(t, line.values(), now) for t, line in lines.items()}
                )
            elif order is HoldOrder.STRICT:
                yield from self.fair.interleave({t: list(line.values()) for t, line in lines.items()})
            else:
                together = _all_of(lines)
                shortest = order is HoldOrder.SHORTEST
                yield from self._shortest_first(together, now) if shortest else together

    def _fair_line(self, tenant: str, holds: Iterable[Hold], now: float) -> list[Hold]:
        """A tenant's line. What waits long behind others of its own tenant is urgent among those alone.

        Only who has been the first for long takes its place in a full engine's own queue: else a flood, all of which
        waits long, would go where what others send may not.
        """
        line = self._shortest_first(holds, now)
        if self.fair.arena_of(tenant) is None:
            return line
        for hold in line:
            hold.work.urgent = False
        first = line[0].work
        if first.first_at is None:
            first.first_at = now
        first.urgent = (now - first.first_at) * 1e3 > self._cap_ms(first)
        return line

    def _shortest_first(self, holds: Iterable[Hold], now: float) -> list[Hold]:
        return sorted(holds, key=lambda hold: self._rank(hold.work, now))

    def _rank(self, work: Work, now: float) -> tuple[int, float]:
        """The order among holds of one priority: shortest uncached prefill first, with ageing and a hard cap.

        Waited longer than max(5 s, 3 prefills): before all others, longest wait first (FIELD.md, Late binding). A
        prompt so long that the cap lies beyond what it may wait is urgent at half of that: nobody is overtaken until
        its hold expires.
        """
        waited_ms = (now - work.submitted_at) * 1e3
        work.urgent = waited_ms > self._cap_ms(work)
        if work.urgent:
            return (0, -waited_ms)
        return (1, work.least_prefill_ms - _AGEING * waited_ms)

    def _cap_ms(self, work: Work) -> float:
        cap_ms = max(_URGENT_MS / self.config.time_scale, _URGENT_PREFILLS * work.least_prefill_ms)
        return min(cap_ms, _URGENT_SHARE * self._max_wait(work.request) * 1e3)

    def _again(self, live: Reservation, work: Work, now: float) -> Decision:
        """The same request once more: the same answer; elsewhere only if its endpoint is excluded now."""
        before = live.attachment
        if not isinstance(before, Work) or before.decision is None or not _same(before, work):
            raise RequestIdInUse(work.request.request_id)
        claims = live.claims if live.owner is work.owner else 0
        self.ledger.adopt(live, work.owner, now)
        live.claims = claims
        endpoint = self.fleet.by_slot[live.slot]
        if names_endpoint(endpoint.id, endpoint.spec.address, work.request.excluded):
            self.fleet.record_outcome(endpoint, True, now, live)
            begun = before.retry
            self.retries.admit(before, self._retry_after(work.request, now))
            try:
                self._elsewhere(live, before, work, now)
            except HeadwayError:
                if not begun:
                    self.retries.over(before)
                raise
        live.claims = claims + 1
        return before.decision

    def _elsewhere(self, live: Reservation, before: Work, work: Work, now: float) -> None:
        """Move a live reservation to where `work`, its retry, may still go: it keeps its place, so it does not wait."""
        choice = self._chooser.choose(work, self.registry.bound(work.request.tenant, work.request.model), now)
        if not choice.dispatchable and not choice.binds_late:
            raise self._saturated(work.request, now)
        self.move(live, self.fleet.by_slot[choice.slot], now)
        self._booker.count(choice.slot)
        if before.decision is not None:
            why = self._booker.why(work, choice, live.matched_tokens, live.predicted_ttft_ms, now)
            fallbacks = self._booker.fallbacks(choice, work.request.model)
            before.decision = replace(before.decision, fallbacks=fallbacks, why=why)

    def _hold(self, work: Work, now: float, deadline: float | None, otherwise: HeadwayError | None) -> Waiter:
        """Keep the request waiting; where it may not wait, raise `otherwise`, or Saturated."""
        request = work.request
        until = self._until(request, now, deadline, otherwise)
        victims = self.holds.make_room(work)
        if victims is None:
            message = "as many calls are held already, or as many bytes of prompts, as may be"
            raise QueueFull(message, retry_after_s=self._retry_after(request, now))
        for victim in victims:
            message = "a best-effort call was held, and gave its place to one of a higher priority"
            refusal = Shed(message, retry_after_s=self._retry_after(victim.work.request, now))
            self._let_go(victim)
            self._refuse(victim, self._limited(refusal, victim.work.request.tenant, now), now)
        lines = self.holds.waiting_in(request.priority)
        if request.tenant not in lines:
            self.fair.begin_to_wait(request.tenant, lines)
            work.first_at = now
        hold = Hold(work)
        self.holds.add(hold)
        return hold.join(work.owner, until)

    def _with_limits(self, decision: Decision, tenant: str, now: float) -> Decision:
        """The answer for a tenant with quotas says what is left of them."""
        limits = self.quotas.standing(tenant, now)
        return decision if limits is None else replace(decision, rate_limits=limits)

    def _limited(self, refusal: HeadwayError, tenant: str, now: float) -> HeadwayError:
        """And so does a refusal."""
        limits = self.quotas.standing(tenant, now)
        if limits is not None:
            refusal.add_facts(limits.headers())
        return refusal

    def _share(self, decision: Decision, hold: Hold) -> None:
        """Every call of the reservation's owner that waited has a part in it."""
        reservation = self.ledger.reservations[decision.reservation_id]
        reservation.claims = sum(waiter.owner is reservation.owner for waiter in hold.waiters)

    def _refuse(self, hold: Hold, error: HeadwayError, now: float) -> None:
        """Answer a hold, and note it."""
        self._note(hold.work.request, error, (now - hold.work.submitted_at) * 1e3)
        hold.settle(error)

    def _note(self, request: Request, error: HeadwayError, held_ms: float) -> None:
        """Whoever counts or remembers refusals hears of this one."""
        self.on_refused(request, error)
        if self._booker.observer is not None:
            self._booker.observer.refused(request, error, held_ms)

    def _let_go(self, hold: Hold) -> None:
        if self.holds.remove(hold):
            self._refund(hold.work)
            self._on_room()  # somebody behind it may have waited for its endpoint

    def _refund(self, work: Work) -> None:
        self.quotas.refund(work.request.tenant, work.request.model, work.estimated_tokens)
        self.retries.over(work)

    def _until(
        self, request: Request, now: float, deadline: float | None, otherwise: HeadwayError | None = None
    ) -> float:
        """How long a call may be held. Raises `otherwise`, or Saturated, if not at all."""
        until = now + self._max_wait(request)
        if deadline is not None:
            until = min(until, deadline - self.config.deadline_margin_s)
        if until <= now:
            raise otherwise or self._saturated(request, now)
        return until

    def _max_wait(self, request: Request) -> float:
        return self.config.default_max_wait_s if request.max_wait_s is None else request.max_wait_s

    def _expired(self, hold: Hold, now: float) -> HeadwayError:
        waited = now - hold.work.submitted_at
        message = f"no endpoint became free within {waited:.1f} s"
        return HoldExpired(message, retry_after_s=self._retry_after(hold.work.request, now))

    def _saturated(self, request: Request, now: float) -> Saturated:
        return Saturated("every endpoint that could serve it is busy", retry_after_s=self._retry_after(request, now))

    def _where(self, request: Request) -> Pool:
        """Where it competes, and for which model."""
        return (self.fair.arena_of(request.tenant) or f"tenant/{request.tenant}", request.model)

    def _retry_after(self, request: Request, now: float) -> float:
        """When to come back: as long as those that wait in its pool take, at the rate at which that drains."""
        where = self._where(request)
        waiting = self.holds.tenants.items()
        ahead = sum(
            count for tenant, count in waiting if tenant == request.tenant or self.fair.arena_of(tenant) == where[0]
        )
        return self._drain.retry_after_s(where, ahead, now)

    def _on_end(self, reservation: Reservation, cause: EndCause, now: float) -> None:
        work = reservation.attachment
        if not isinstance(work, Work):
            return
        if work.retry:
            self.retries.over(work)
        self._drain.ended(self._where(work.request), now)
        if cause is EndCause.REPORTED:
            return  # what it used is settled by who reported it
        # Of what nobody reported, the estimate is all that is known.
        unreported = cause in _UNREPORTED
        used = work.estimated_tokens if unreported else 0.0
        self.quotas.settle(reservation.tenant, reservation.model, work.estimated_tokens, used)
        self.fair.settle(work, None if unreported else 0.0)

    def _active(self, model: str) -> int:
        """Requests in flight on the endpoints that serve a model."""
        return int(self.fleet.columns.inflight[self.fleet.pool(model)].sum())

    def _on_room(self) -> None:
        if len(self.holds):
            self.wake()


def _same(before: Work, work: Work) -> bool:
    """Is it a retry, and not another request under the same id?"""
    return before.request.model == work.request.model and before.identity in (None, work.identity)


def _all_of(lines: Mapping[str, Line]) -> list[Hold]:
    """Every tenant's holds, first come first."""
    return sorted(chain.from_iterable(line.values() for line in lines.values()), key=lambda hold: hold.number)


def _pool_of(work: Work, burst: bool) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What tells whether one hold's lack of room is another's too: the pool, and the part of it that it may use."""
    request = work.request
    pool = (request.tenant, request.model, request.adapter, work.split, burst)
    if not request.excluded and request.subset is None:
        return pool, pool
    subset = request.subset
    part = None if subset is None else (subset.endpoints, frozenset(subset.labels.items()))
    return pool, (*pool, request.excluded, part)
