"""One decision, top to bottom: candidates, price, dispatch or hold, reserve, answer.

Nothing here awaits: a decision and its reservation are one turn of the event loop, so no second Route sees the state
between them. Time is passed in; a simulator drives the same object.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from headway_scheduler.admission.guards import SoftGuards
from headway_scheduler.admission.holds import Hold, Holds, Waiter, Work
from headway_scheduler.admission.quotas import QuotaBook
from headway_scheduler.admission.salts import Salts
from headway_scheduler.domain.decision import Decision, Placement, Why
from headway_scheduler.domain.desired import Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.request import Request, TextPrompt
from headway_scheduler.errors import (
    AllDraining,
    AllUnhealthy,
    HeadwayError,
    HoldExpired,
    NoEndpoints,
    QueueFull,
    RequestIdInUse,
    Saturated,
)
from headway_scheduler.fleet.columns import FloatColumn, Slots
from headway_scheduler.fleet.fleet import Endpoint, Fleet
from headway_scheduler.fleet.ledger import Booking, EndCause, Ledger, Leg, Owner, Reservation
from headway_scheduler.index.chain import ChainIndex, Match
from headway_scheduler.index.fingerprint import FingerprintIndex, fingerprint
from headway_scheduler.index.hashing import chain_of, identity_of
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.history import History, task_weight
from headway_scheduler.strategies.base import View
from headway_scheduler.strategies.registry import Bound, Priced, StrategyRegistry

__all__ = ["Dispatcher", "DispatcherConfig", "Explanation", "Row"]

BoolColumn = npt.NDArray[np.bool_]
_EMPTY: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class DispatcherConfig:
    """Limits of a decision. Times in seconds."""

    default_max_wait_s: float = 30.0
    deadline_margin_s: float = 0.1
    max_holds: int = 10_000
    holds_per_pass: int = 64
    fallbacks: int = 3
    max_index_blocks: int = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """One endpoint as a decision sees it."""

    endpoint: Endpoint
    chosen: bool
    hard_guards: tuple[str, ...]
    soft_guards: tuple[str, ...]
    cost: float | None
    predicted_ttft_ms: float | None
    matched_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a Route would do now: the reasons, every endpoint, and the refusal if there would be one."""

    why: Why | None
    rows: tuple[Row, ...]
    refusal: HeadwayError | None
    would_hold: bool


@dataclass(slots=True)
class _Choice:
    """A priced set of candidates: positions in `slots` by cost, cheapest dispatchable first."""

    slots: Slots
    priced: Priced
    blocked: BoolColumn
    by_guard: dict[str, BoolColumn]
    hits: FloatColumn
    order: npt.NDArray[np.intp]

    @property
    def dispatchable(self) -> bool:
        return not self.blocked[self.order[0]]


class Dispatcher:
    """Decides and reserves. `wake` is called when a pass over the holds is worth making.

    Until `settled_at` the fleet is still being learned, after a start: what finds no endpoint yet is held for it.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        ledger: Ledger,
        index: ChainIndex,
        fingerprints: FingerprintIndex,
        registry: StrategyRegistry,
        costs: CostModel,
        history: History,
        salts: Salts,
        random: np.random.Generator,
        config: DispatcherConfig | None = None,
    ) -> None:
        self.config = config or DispatcherConfig()
        self.fleet, self.ledger, self.index, self.registry = fleet, ledger, index, registry
        self.holds = Holds(self.config.max_holds)
        self.quotas = QuotaBook()
        self.guards = SoftGuards(fleet.columns)
        self.wake: Callable[[], None] = lambda: None
        self.routes = 0
        self.settled_at = float("-inf")
        self._fingerprints, self._costs, self._history, self._salts = fingerprints, costs, history, salts
        self._random = random
        self._end_interval_s = 1.0
        self._last_end: float | None = None
        fleet.on_removed.append(lambda endpoint: self.guards.forget(endpoint.slot))
        ledger.on_end.append(self._on_end)
        ledger.on_room.append(self._on_room)

    # Route

    def submit(
        self, request: Request, tenant: Tenant, owner: Owner, now: float, deadline: float | None = None
    ) -> Decision | Waiter:
        """Decide now, or hold. `deadline`: when the caller gives up by itself. Raises every refusal of errors.py."""
        self.ledger.advance(now)
        work = self._work(request, owner, now)
        live = self.ledger.by_request.get(work.key)
        if live is not None:
            return self._again(live, work, now)
        held = self.holds.find(work.key)
        if held is not None:
            if not _same(held.work, work):
                raise RequestIdInUse(request.request_id)
            return held.join(owner, self._until(request, now, deadline, self._saturated()))
        inflight = self.ledger.tenant_inflight.get(tenant.id, 0) + self.holds.tenants.get(tenant.id, 0)
        self.quotas.admit(tenant, work.estimated_tokens, inflight, now)
        try:
            return self._dispatch_or_hold(work, now, deadline)
        except BaseException:
            self.quotas.refund(tenant.id, work.estimated_tokens)
            raise

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
        """Try the holds again, in order; a pool that had no room for one has none for those behind it."""
        self.ledger.advance(now)
        full: set[tuple[object, ...]] = set()
        tried = 0
        for hold in self.holds:
            pool, part = _pool_of(hold.work.request)
            if pool in full or part in full:
                continue
            if tried >= self.config.holds_per_pass:
                break
            tried += 1
            try:
                decision = self._dispatch(hold.work, now)
            except HeadwayError:
                decision = None  # its pool is gone for now; it may come back before the hold expires
            if decision is None:
                full.add(part)
            elif self.holds.remove(hold):
                self._share(decision, hold)
                hold.settle(decision)

    def advance(self, now: float) -> None:
        """Do what time does: expire reservations and holds."""
        self.ledger.advance(now)
        for waiter in self.holds.overdue(now):
            refusal = self._expired(waiter.hold, now)
            self.give_up(waiter)
            waiter.answer(refusal)

    def refuse_holds(self, error: HeadwayError) -> None:
        """Answer every hold with `error`: the scheduler goes away."""
        for hold in self.holds:
            self._let_go(hold)
            hold.settle(error)

    # Reservations

    def move(self, reservation: Reservation, endpoint: Endpoint, now: float) -> None:
        """A data plane failed over by itself: count its request where it is served."""
        work, slot = reservation.attachment, endpoint.slot
        if not isinstance(work, Work) or slot == reservation.slot:
            return
        hit = float(self.index.match(work.chain).tokens(np.array([slot], np.int32), self._capacity)[0])
        leg, prefill_ms, _ = self._leg(work, slot, hit)
        work.queue_was_empty = False  # the TTFT reported will hold the failed try too: nothing to learn from
        reservation.predicted_ttft_ms = float(self.fleet.columns.prefill_us[slot]) / 1e3 + prefill_ms
        reservation.matched_tokens = min(int(hit), max(0, work.request.prompt_tokens - 1))
        self.ledger.move(reservation, [leg], now)
        self._remember(work, slot)
        if work.decision is not None:
            fallbacks = tuple(each for each in work.decision.fallbacks if each.spec.id != endpoint.id)
            work.decision = replace(
                work.decision,
                endpoint=self._placement(slot),
                fallbacks=fallbacks,
                cache_salt=self._salts.salt(work.request.domain, endpoint.spec.engine),
                why=replace(
                    work.decision.why,
                    matched_tokens=reservation.matched_tokens,
                    predicted_ttft_ms=reservation.predicted_ttft_ms,
                ),
            )

    def restore(self, request: Request, owner: Owner, endpoint: Endpoint, matched: int, now: float) -> Reservation:
        """Count again what another scheduler, or this one before a restart, had given.

        Its prompt is not known any more, so that any retry with its id and model is believed to be one.
        """
        work = self._work(request, owner, now)
        work.identity = None
        leg, prefill_ms, expected_s = self._leg(work, endpoint.slot, float(matched))
        matched = min(matched, max(0, request.prompt_tokens - 1))
        reservation = self._reservation(work, leg, prefill_ms, expected_s, matched, now)
        self.quotas.settle(request.tenant, 0.0, work.estimated_tokens)  # given back when it ends
        self.ledger.begin(reservation, now)
        self._remember(work, endpoint.slot)
        weight = task_weight(request.task_class)
        why = Why("", "", "", request.prompt_tokens, matched, prefill_ms, request.task_class, weight, candidates=1)
        work.decision = self._decision(reservation, work, endpoint.slot, (), why)
        return reservation

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
            choice = self._choose(work, bound, now)
        except HeadwayError as error:
            refusal = error
        rows = tuple(self._rows(work, choice, whole))
        if choice is None:
            return Explanation(None, rows, refusal, False)
        position = int(choice.order[0])
        ttft = choice.priced.costs.predicted_ttft_ms
        predicted = None if ttft is None else float(ttft[position])
        why = self._why(work, choice.priced, len(choice.slots), int(choice.hits[position]), predicted, now)
        held = not choice.dispatchable
        if held and self._max_wait(request) <= 0:
            refusal = self._saturated()
        return Explanation(why, rows, refusal, held and refusal is None)

    # Inside, the decision

    def _work(self, request: Request, owner: Owner, now: float) -> Work:
        chain = chain_of(request, self._history.bytes_per_token(request.model), self.config.max_index_blocks)
        output = self._history.expected_output(request.tenant, request.model, request.task_class, request.max_tokens)
        text_bytes = len(request.prompt.data) if isinstance(request.prompt, TextPrompt) else 0
        estimated = request.prompt_tokens + output
        return Work(request, owner, identity_of(request), chain, now, output, estimated, text_bytes)

    def _dispatch(self, work: Work, now: float) -> Decision | None:
        """Choose and reserve; None: all candidates' soft guards forbid it now."""
        bound = self.registry.bound(work.request.tenant, work.request.model)
        choice = self._choose(work, bound, now)
        if not choice.dispatchable:
            return None
        position = int(choice.order[0])
        for shadow in bound.shadows:
            view = self._view(work, choice.slots)
            self.registry.watch(shadow, work.request, view, now, position)
        return self._reserve(work, choice, position, now)

    def _choose(self, work: Work, bound: Bound, now: float) -> _Choice:
        """Price the tenant's own endpoints; burst into others only when none of its own can take the request."""
        request = work.request
        own, burst = self.fleet.candidates(request.tenant, request.model, request.adapter)
        allowed, spare = self._filtered(request, own), self._filtered(request, burst)
        open_own = allowed[self.fleet.columns.open[allowed]]
        open_spare = spare[self.fleet.columns.open[spare]] if len(spare) else spare
        if not len(open_own) and not len(open_spare):
            raise self._none_left(request, np.concatenate([allowed, spare]))
        match = self.index.match(work.chain)
        if len(open_own):
            choice = self._price(work, bound, open_own, match, now)
            if choice.dispatchable or not len(open_spare):
                return choice
        overflow = self._price(work, bound, open_spare, match, now)
        return overflow if overflow.dispatchable or not len(open_own) else choice

    def _price(self, work: Work, bound: Bound, slots: Slots, match: Match, now: float) -> _Choice:
        view = self._view(work, slots, match)
        priced = self.registry.price(bound.active, work.request, view, now)
        by_guard = self.guards.blocked(priced.guards, view, work.estimated_tokens)
        blocked = np.zeros(len(slots), np.bool_)
        for forbidden in by_guard.values():
            blocked |= forbidden
        # Cheapest first; ties: fewest in flight, then longest not chosen. What may not be dispatched now comes last.
        order = np.lexsort((view.last_chosen, view.inflight, priced.costs.cost, blocked))
        named = {guard.value: forbidden for guard, forbidden in by_guard.items()}
        return _Choice(slots, priced, blocked, named, view.hit_tokens, order)

    def _view(self, work: Work, slots: Slots, match: Match | None = None) -> View:
        found = self.index.match(work.chain) if match is None else match
        return View(
            self.fleet.columns,
            slots,
            lambda slots: found.tokens(slots, self._capacity),
            lambda slots: self._similar(work, slots),
            self._random,
        )

    def _similar(self, work: Work, slots: Slots) -> BoolColumn:
        prompt = work.request.prompt
        if not isinstance(prompt, TextPrompt):
            return np.zeros(len(slots), np.bool_)
        if work.fingerprint is None:
            work.fingerprint = fingerprint(prompt.data)
        mask = self._fingerprints.match(work.chain.root, work.fingerprint)
        return np.array([mask >> slot & 1 for slot in slots.tolist()], np.bool_)

    def _reserve(self, work: Work, choice: _Choice, position: int, now: float) -> Decision:
        slot, request = int(choice.slots[position]), work.request
        hit = float(choice.hits[position])
        leg, prefill_ms, expected_s = self._leg(work, slot, hit)
        ttft = choice.priced.costs.predicted_ttft_ms
        queued_ms = float(self.fleet.columns.prefill_us[slot]) / 1e3
        predicted = queued_ms + prefill_ms if ttft is None else float(ttft[position])
        work.queue_was_empty = queued_ms == 0.0
        matched = min(int(hit), max(0, request.prompt_tokens - 1))
        reservation = self._reservation(work, leg, predicted, expected_s, matched, now)
        work.request = replace(request, prompt=None)  # its prompt is in the chain now: keep no copy of it for hours
        self.ledger.begin(reservation, now)
        self.routes += 1
        self.fleet.columns.last_chosen[slot] = self.routes
        self._remember(work, slot)
        why = self._why(work, choice.priced, len(choice.slots), matched, predicted, now)
        work.decision = self._decision(reservation, work, slot, self._fallbacks(choice), why)
        return work.decision

    def _decision(
        self, reservation: Reservation, work: Work, slot: int, fallbacks: tuple[Placement, ...], why: Why
    ) -> Decision:
        return Decision(
            request_id=reservation.request_id,
            reservation_id=reservation.id,
            ttl_s=reservation.ttl_s,
            model=reservation.model,
            endpoint=self._placement(slot),
            prefill_endpoint=None,
            fallbacks=fallbacks,
            why=why,
            cache_salt=self._salts.salt(work.request.domain, self.fleet.by_slot[slot].spec.engine),
        )

    def _fallbacks(self, choice: _Choice) -> tuple[Placement, ...]:
        order = choice.order[1 : 1 + self.config.fallbacks]
        return tuple(self._placement(int(choice.slots[other])) for other in order)

    def _leg(self, work: Work, slot: int, hit: float) -> tuple[Leg, float, float]:
        """A leg on `slot`, its prefill alone in milliseconds, and its expected duration in seconds."""
        request = work.request
        hit = min(hit, max(0.0, request.prompt_tokens - 1.0))
        uncached = request.prompt_tokens - hit
        prefill_ms = self._costs.prefill_ms_at(slot, uncached, hit)
        booking = Booking(
            weight_micro=round(task_weight(request.task_class) * 1e6),
            prefill_us=round(prefill_ms * 1e3),
            prefill_tokens=round(uncached),
            context_tokens=round(request.prompt_tokens + work.expected_output / 2),
            kv_tokens=round(work.estimated_tokens),
        )
        expected_s = prefill_ms / 1e3 + work.expected_output * self._history.seconds_per_token(request.model)
        return Leg(slot, booking), prefill_ms, expected_s

    def _reservation(
        self, work: Work, leg: Leg, predicted_ttft_ms: float, expected_s: float, matched: int, now: float
    ) -> Reservation:
        request, config = work.request, self.ledger.config
        return Reservation(
            id=self.ledger.new_id(),
            owner=work.owner,
            principal=work.owner.principal,
            tenant=request.tenant,
            request_id=request.request_id,
            model=request.model,
            task_class=request.task_class,
            legs=[leg],
            began_at=now,
            predicted_s=expected_s,
            ttl_s=max(config.min_ttl_s, config.ttl_factor * (expected_s + predicted_ttft_ms / 1e3)),
            prompt_tokens=request.prompt_tokens,
            matched_tokens=matched,
            predicted_ttft_ms=predicted_ttft_ms,
            attachment=work,
        )

    def _remember(self, work: Work, slot: int) -> None:
        """The endpoint is about to hold this prompt's prefix."""
        if work.chain.hashes:
            self.index.touch(slot, work.chain)
        if work.fingerprint is not None:
            self._fingerprints.touch(slot, work.chain.root, work.fingerprint)

    def _again(self, live: Reservation, work: Work, now: float) -> Decision:
        """The same request once more: the same answer; elsewhere only if its endpoint is excluded now."""
        before = live.attachment
        if not isinstance(before, Work) or before.decision is None or not _same(before, work):
            raise RequestIdInUse(work.request.request_id)
        claims = live.claims if live.owner is work.owner else 0
        self.ledger.adopt(live, work.owner, now)
        live.claims = claims + 1
        endpoint = self.fleet.by_slot[live.slot]
        if _names(endpoint.id, endpoint.spec.address, work.request.excluded):
            self.fleet.record_outcome(endpoint, True, now)
            self._elsewhere(live, before, work, now)
        return before.decision

    def _elsewhere(self, live: Reservation, before: Work, work: Work, now: float) -> None:
        """Move a live reservation to where `work`, its retry, may still go."""
        choice = self._choose(work, self.registry.bound(work.request.tenant, work.request.model), now)
        if not choice.dispatchable:
            raise self._saturated()
        position = int(choice.order[0])
        slot = int(choice.slots[position])
        self.move(live, self.fleet.by_slot[slot], now)
        self.routes += 1
        self.fleet.columns.last_chosen[slot] = self.routes
        if before.decision is not None:
            matched, predicted = live.matched_tokens, live.predicted_ttft_ms
            why = self._why(work, choice.priced, len(choice.slots), matched, predicted, now)
            before.decision = replace(before.decision, fallbacks=self._fallbacks(choice), why=why)

    # Inside, holds and refusals

    def _dispatch_or_hold(self, work: Work, now: float, deadline: float | None) -> Decision | Waiter:
        try:
            decision = self._dispatch(work, now)
        except NoEndpoints as error:
            if now >= self.settled_at:
                raise
            return self._hold(work, now, deadline, error)
        return decision or self._hold(work, now, deadline, self._saturated())

    def _hold(self, work: Work, now: float, deadline: float | None, otherwise: HeadwayError) -> Waiter:
        """Keep the request waiting; where it may not wait, raise `otherwise`."""
        until = self._until(work.request, now, deadline, otherwise)
        if len(self.holds) >= self.holds.limit:
            raise QueueFull(f"{self.holds.limit} calls are held already", retry_after_s=self._retry_after())
        hold = Hold(work)
        self.holds.add(hold)
        return hold.join(work.owner, until)

    def _share(self, decision: Decision, hold: Hold) -> None:
        """Every call of the reservation's owner that waited has a part in it."""
        reservation = self.ledger.reservations[decision.reservation_id]
        reservation.claims = sum(waiter.owner is reservation.owner for waiter in hold.waiters)

    def _let_go(self, hold: Hold) -> None:
        if self.holds.remove(hold):
            self.quotas.refund(hold.work.request.tenant, hold.work.estimated_tokens)

    def _until(self, request: Request, now: float, deadline: float | None, otherwise: HeadwayError) -> float:
        """How long a call may be held. Raises `otherwise` if not at all."""
        until = now + self._max_wait(request)
        if deadline is not None:
            until = min(until, deadline - self.config.deadline_margin_s)
        if until <= now:
            raise otherwise
        return until

    def _max_wait(self, request: Request) -> float:
        return self.config.default_max_wait_s if request.max_wait_s is None else request.max_wait_s

    def _expired(self, hold: Hold, now: float) -> HeadwayError:
        waited = now - hold.work.submitted_at
        message = f"no endpoint became free within {waited:.1f} s"
        return HoldExpired(message, retry_after_s=self._retry_after())

    def _saturated(self) -> Saturated:
        return Saturated("every endpoint that could serve it is busy", retry_after_s=self._retry_after())

    def _retry_after(self) -> float:
        """When to come back: as long as the holds ahead take at the measured drain rate; jittered, never zero."""
        wait = (len(self.holds) + 1) * self._end_interval_s
        return max(0.5, min(30.0, wait)) * float(self._random.uniform(1.0, 1.5))

    def _none_left(self, request: Request, allowed: Slots) -> HeadwayError:
        model, tenant = request.model, request.tenant
        if not len(allowed):
            return NoEndpoints(f"no endpoint that {tenant!r} may use serves {model!r}", model=model, tenant=tenant)
        states = {(e.state, e.node.state) for e in (self.fleet.by_slot[slot] for slot in allowed.tolist())}
        if all(any(state is not SchedulingState.ACTIVE for state in pair) for pair in states):
            return AllDraining(f"all endpoints of {model!r} are cordoned or draining", model=model, tenant=tenant)
        return AllUnhealthy(f"no endpoint of {model!r} is healthy", model=model, tenant=tenant)

    def _filtered(self, request: Request, slots: Slots) -> Slots:
        """Without the excluded, within the subset."""
        subset, excluded = request.subset, request.excluded
        if not excluded and subset is None:
            return slots
        kept = []
        for slot in slots.tolist():
            endpoint = self.fleet.by_slot[slot]
            spec = endpoint.spec
            if excluded and _names(spec.id, spec.address, excluded):
                continue
            if subset is not None:
                if subset.endpoints and not _names(spec.id, spec.address, subset.endpoints):
                    continue
                labels = endpoint.labels
                if any(labels.get(key) != value for key, value in subset.labels.items()):
                    continue
            kept.append(slot)
        return np.array(kept, np.int32) if kept else _EMPTY

    # Inside, words

    def _why(self, work: Work, priced: Priced, candidates: int, matched: int, ttft_ms: float | None, now: float) -> Why:
        request = work.request
        return Why(
            strategy=priced.strategy,
            fell_back_from=priced.fell_back_from,
            fallback_reason=priced.fallback_reason,
            prompt_tokens=request.prompt_tokens,
            matched_tokens=matched,
            predicted_ttft_ms=ttft_ms,
            task_class=request.task_class,
            task_weight=task_weight(request.task_class),
            candidates=candidates,
            held_ms=(now - work.submitted_at) * 1e3,
        )

    def _rows(self, work: Work, choice: _Choice | None, whole: bool) -> list[Row]:
        request = work.request
        own, burst = self.fleet.candidates(request.tenant, request.model, request.adapter)
        usable = {*own.tolist(), *burst.tolist()}
        seen = self.fleet.pool(request.model, request.adapter).tolist() if whole else sorted(usable)
        kept = set(self._filtered(request, np.array(sorted(usable), np.int32)).tolist())
        positions = {} if choice is None else {slot: n for n, slot in enumerate(choice.slots.tolist())}
        hits = self.index.match(work.chain).tokens(np.array(seen, np.int32), self._capacity)
        rows = []
        for number, slot in enumerate(seen):
            endpoint, position = self.fleet.by_slot[slot], positions.get(slot)
            hard = self.fleet.hard_guards(endpoint)
            if slot not in usable:
                hard.insert(0, "not_in_group")
            elif slot not in kept:
                hard.insert(0, "excluded")
            if choice is None or position is None:
                rows.append(Row(endpoint, False, tuple(hard), (), None, None, int(hits[number])))
                continue
            ttft = choice.priced.costs.predicted_ttft_ms
            soft = tuple(name for name, forbidden in choice.by_guard.items() if forbidden[position])
            rows.append(
                Row(
                    endpoint,
                    position == choice.order[0] and choice.dispatchable,
                    tuple(hard),
                    soft,
                    float(choice.priced.costs.cost[position]),
                    None if ttft is None else float(ttft[position]),
                    int(hits[number]),
                )
            )
        return rows

    def _placement(self, slot: int) -> Placement:
        endpoint = self.fleet.by_slot[slot]
        return Placement(endpoint.spec, endpoint.node.id)

    @property
    def _capacity(self) -> int:
        return self.fleet.columns.capacity

    def _on_end(self, reservation: Reservation, cause: EndCause, now: float) -> None:
        if self._last_end is not None:
            # Exponentially weighted over about the last 20 ends.
            self._end_interval_s += 0.05 * (min(now - self._last_end, 10.0) - self._end_interval_s)
        self._last_end = now
        work = reservation.attachment
        if cause is not EndCause.REPORTED and isinstance(work, Work):
            self.quotas.settle(reservation.tenant, work.estimated_tokens, 0.0)

    def _on_room(self) -> None:
        if len(self.holds):
            self.wake()


def _same(before: Work, work: Work) -> bool:
    """Is it a retry, and not another request under the same id?"""
    return before.request.model == work.request.model and before.identity in (None, work.identity)


def _pool_of(request: Request) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What tells whether one hold's lack of room is another's too: the pool, and the part of it that it may use."""
    pool = (request.tenant, request.model, request.adapter)
    if not request.excluded and request.subset is None:
        return pool, pool
    subset = request.subset
    part = None if subset is None else (subset.endpoints, frozenset(subset.labels.items()))
    return pool, (*pool, request.excluded, part)


def _names(endpoint_id: str, address: str, names: frozenset[str]) -> bool:
    """Does one of `names` (ids, `ip:port`, `ip`) mean this endpoint?"""
    return endpoint_id in names or address in names or address.rpartition(":")[0] in names
