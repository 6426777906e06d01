"""Candidates and their prices: pool ∩ GPU groups ∩ subset − excluded − hard guards, then the strategy's costs."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from headway_scheduler.admission.guards import GuardConfig, SoftGuards
from headway_scheduler.admission.prefixes import Prefixes
from headway_scheduler.admission.ranking import first
from headway_scheduler.admission.values import Choice, Work
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.request import Request, TextPrompt
from headway_scheduler.errors import AllDraining, AllEjected, AllUnhealthy, HeadwayError, NoEndpoints
from headway_scheduler.fleet.columns import FloatColumn, Pool, Slots
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.fleet.lanes import Lane, narrowed
from headway_scheduler.index.fingerprint import FingerprintIndex, fingerprint
from headway_scheduler.index.kv import Exact
from headway_scheduler.index.values import Match
from headway_scheduler.learning.priors import TRANSFER_MS
from headway_scheduler.strategies.base import SoftGuard
from headway_scheduler.strategies.registry import Bound, StrategyRegistry
from headway_scheduler.strategies.view import Tentative, View

__all__ = ["Chooser", "names_endpoint"]

BoolColumn = npt.NDArray[np.bool_]
_EMPTY: Final = np.zeros(0, np.int32)
_NONE_BLOCKED: Final = np.zeros(0, np.bool_)
_NOBODY: Final = np.zeros(0)


class Chooser:
    """Finds and prices candidates; changes nothing."""

    def __init__(
        self,
        fleet: Fleet,
        prefixes: Prefixes,
        fingerprints: FingerprintIndex,
        registry: StrategyRegistry,
        random: np.random.Generator,
        time_scale: float,
        ranked: int,
        guards: GuardConfig,
    ) -> None:
        """`ranked`: so many of the best candidates each choice names."""
        self._ranked = ranked
        self.guards = SoftGuards(fleet.columns, guards)
        self._fleet, self._prefixes, self._fingerprints, self._registry = fleet, prefixes, fingerprints, registry
        self._random = random
        self._time_scale = time_scale
        self._transfer_ms = tuple(each / time_scale for each in TRANSFER_MS)
        fleet.on_removed.append(lambda endpoint: self.guards.forget(endpoint.slot))
        fleet.on_sampled.append(self.guards.look)

    def choose(self, work: Work, bound: Bound, now: float, tentative: Tentative | None = None) -> Choice:
        """Price the tenant's own endpoints, tier by tier; burst into others only when none of its own can take it.

        `tentative`: what those before it in the line will add. Raises NoEndpoints, AllDraining, AllUnhealthy.
        """
        choice = self.choose_in(work, bound, now, tentative, None)
        assert choice is not None  # noqa: S101 - a lane has a tier
        return choice

    def choose_in(
        self, work: Work, bound: Bound, now: float, tentative: Tentative | None, burst: bool | None
    ) -> Choice | None:
        """The same; `burst` given, only among the endpoints that are borrowed, or that are not. None: there are none.

        The first tier that can take it now; else it waits for the first of all.
        """
        request = work.request
        lane = self.lane(request, now)
        work.split = lane.split
        match = self._prefixes.match(work, now)
        first: Choice | None = None
        for tier in lane.tiers:
            if burst is not None and tier.burst is not burst:
                continue
            choice = self._price(work, bound, tier.pool, match, now, tentative)
            choice.burst = tier.burst
            if choice.dispatchable:
                return choice
            first = first or choice
        return first

    def lane(self, request: Request, now: float) -> Lane:
        """Where it may go: the split drawn for it, of those that have an endpoint for it. Raises as `choose` does."""
        lanes = self._fleet.open_lanes(request.tenant, request.model, request.adapter)
        if request.excluded or request.subset is not None or request.cannot_inject_salt:
            lanes = narrowed(lanes, lambda slots: self.within(request, slots))
        if not lanes:
            own, burst = self._fleet.candidates(request.tenant, request.model, request.adapter)
            allowed = np.concatenate([self.within(request, own), self.within(request, burst)])
            raise self._none_left(request, allowed, now)
        return lanes[0] if len(lanes) == 1 else _drawn(lanes, request)

    def may_take(self, request: Request, bound: Bound, burst: bool) -> bool:
        """Is a hold worth pricing? Not where a strategy binds late and all endpoints have a whole window queued."""
        window_ms = bound.active.window_ms
        if window_ms is None:
            return True
        limit_us, prefill_us = window_ms * 1e3 / self._time_scale, self._fleet.columns.prefill_us
        lanes = self._fleet.open_lanes(request.tenant, request.model, request.adapter)
        queued = [int(prefill_us[t.pool.place].min()) for lane in lanes for t in lane.tiers if t.burst is burst]
        return not queued or min(queued) < limit_us

    def watch(self, work: Work, bound: Bound, choice: Choice, now: float) -> None:
        """Let the shadows price what was chosen."""
        for shadow in bound.shadows:
            view = self._view(work, Pool.of(choice.slots), self._prefixes.match(work, now), None)
            self._registry.watch(shadow, work.request, view, now, choice.position)

    def within(self, request: Request, slots: Slots) -> Slots:
        """Without the excluded, within the subset."""
        subset, excluded = request.subset, request.excluded
        if request.cannot_inject_salt:
            alone = self._fleet.serving_only(request.domain)
            slots = np.array([slot for slot in slots.tolist() if alone >> slot & 1], np.int32)
        if not excluded and subset is None:
            return slots
        kept = []
        for slot in slots.tolist():
            endpoint = self._fleet.by_slot[slot]
            spec = endpoint.spec
            if excluded and names_endpoint(spec.id, spec.address, excluded):
                continue
            if subset is not None:
                if subset.endpoints and not names_endpoint(spec.id, spec.address, subset.endpoints):
                    continue
                labels = endpoint.labels
                if any(labels.get(key) != value for key, value in subset.labels.items()):
                    continue
            kept.append(slot)
        return np.array(kept, np.int32) if kept else _EMPTY

    def _price(
        self, work: Work, bound: Bound, pool: Pool, match: Match | Exact, now: float, tentative: Tentative | None
    ) -> Choice:
        view, slots = self._view(work, pool, match, tentative), pool.slots
        priced = self._registry.price(bound.active, work.request, view, now)
        # Late binding is for those who can wait here; others queue in the engine, as they would without a scheduler.
        window_ms = priced.window_ms if work.patient else None
        # Room in the KV cache may never be seen by a large request, since small ones take it as it comes: one that has
        # waited long enough waits for it at the head of the engine's own queue, where nobody passes it.
        late = work.patient and not work.urgent
        guards = priced.guards if late else priced.guards - {SoftGuard.KV_ROOM}
        marks, bits = self.guards.marks(view, work.request.prompt_tokens), self.guards.bits(guards)
        if window_ms is None:
            # What may not be dispatched now comes last: take another.
            blocked = (marks & bits).astype(np.bool_)
            order = self._order(view, priced.costs.cost, blocked)
            slot, dispatchable = int(slots[order[0]]), not blocked[order[0]]
        else:
            # Late binding: wait for the best one rather than take another (FIELD.md, What to beat).
            order = self._order(view, priced.costs.cost, _NONE_BLOCKED)
            slot = slots.item(order[0])
            queued = self._fleet.columns.prefill_us.item(slot) / 1e3
            ahead = tentative is not None and tentative.holds(slot)
            dispatchable = not marks.item(order[0]) & bits and not ahead and queued < window_ms / self._time_scale
        if priced.costs.prefill_ms is not None:
            work.least_prefill_ms = float(np.minimum.reduce(priced.costs.prefill_ms))
        return Choice(
            slots,
            priced,
            view.hit_tokens,
            view.transfer_ms,
            match.known(pool.place, self._fleet.columns.capacity),
            order,
            slot,
            bool(dispatchable),
            window_ms is not None,
            marks,
            bits,
        )

    def _order(self, view: View, cost: FloatColumn, blocked: BoolColumn) -> list[int]:
        """Cheapest first; ties: fewest in flight, then longest not chosen."""
        columns, tentative = self._fleet.columns, view.tentative
        beyond = columns.external + columns.handicap if columns.handicapped else columns.external
        found: list[int] = first(
            self._ranked,
            blocked,
            cost,
            columns.inflight,
            beyond,
            _NOBODY if tentative is None else tentative.inflight,
            columns.last_chosen,
            view.slots,
        ).tolist()
        return found

    def _view(self, work: Work, pool: Pool, match: Match | Exact, tentative: Tentative | None) -> View:
        columns, place = self._fleet.columns, pool.place
        return View(
            columns,
            pool.slots,
            lambda _: match.tokens(place, columns.capacity),
            lambda slots: self._similar(work, slots),
            self._random,
            tentative,
            lambda _: match.transfer_ms(place, columns.capacity, self._transfer_ms),
            lambda: self._prefixes.demand.asked(work.chain),
            place,
        )

    def _similar(self, work: Work, slots: Slots) -> BoolColumn:
        prompt = work.request.prompt
        if not isinstance(prompt, TextPrompt):
            return np.zeros(len(slots), np.bool_)
        if work.fingerprint is None:
            work.fingerprint = fingerprint(prompt.data)
        mask = self._fingerprints.match(work.chain.root, work.fingerprint)
        return np.array([mask >> slot & 1 for slot in slots.tolist()], np.bool_)

    def _none_left(self, request: Request, allowed: Slots, now: float) -> HeadwayError:
        model, tenant = request.model, request.tenant
        if not len(allowed) and request.cannot_inject_salt:
            message = f"no endpoint of {model!r} serves {tenant!r} alone, and the caller cannot send a cache salt"
            return NoEndpoints(message, model=model, tenant=tenant)
        if not len(allowed):
            return NoEndpoints(f"no endpoint that {tenant!r} may use serves {model!r}", model=model, tenant=tenant)
        states = {(e.state, e.node.state) for e in (self._fleet.by_slot[slot] for slot in allowed.tolist())}
        if all(any(state is not SchedulingState.ACTIVE for state in pair) for pair in states):
            return AllDraining(f"all endpoints of {model!r} are cordoned or draining", model=model, tenant=tenant)
        ejections, ids = self._fleet.ejections, [self._fleet.by_slot[slot].id for slot in allowed.tolist()]
        if ejections.out.keys() >= set(ids):
            # One that is probed may be whole again any moment.
            wait_s = max(1.0, min(ejections.remaining_s(each, now) for each in ids))
            message = f"every endpoint of {model!r} keeps failing its requests"
            return AllEjected(message, retry_after_s=wait_s, model=model, tenant=tenant)
        return AllUnhealthy(f"no endpoint of {model!r} is healthy", model=model, tenant=tenant)


def _drawn(lanes: Sequence[Lane], request: Request) -> Lane:
    """One lane by weight: always the same for a session, or for a request that has none."""
    left = xxh3_64_intdigest(f"{request.model}\0{request.session_id or request.request_id}".encode()) / 2**64
    left *= sum(lane.weight for lane in lanes)
    for lane in lanes:
        left -= lane.weight
        if left < 0:
            return lane
    return lanes[0]


def names_endpoint(endpoint_id: str, address: str, names: frozenset[str]) -> bool:
    """Does one of `names` (ids, `ip:port`, `ip`) mean this endpoint?"""
    return endpoint_id in names or address in names or address.rpartition(":")[0] in names
