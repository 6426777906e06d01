"""Places: what a request adds to an endpoint, and the reservations that count it there."""

from typing import Final

import numpy as np
from msgspec.structs import replace

from headway_scheduler.admission.observing import Observer
from headway_scheduler.admission.prefixes import Prefixes
from headway_scheduler.admission.retries import Retries
from headway_scheduler.admission.salts import Salts
from headway_scheduler.admission.values import Choice, Work
from headway_scheduler.domain.decision import Decision, Placement, PrefixHolder, Why
from headway_scheduler.domain.request import Request, TextPrompt
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.fleet.ledger import EndCause, Ledger
from headway_scheduler.fleet.members import Endpoint
from headway_scheduler.fleet.values import Booking, Leg, Owner, Reservation
from headway_scheduler.index.fingerprint import FingerprintIndex
from headway_scheduler.index.hashing import chain_of, identity_of
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.history import History
from headway_scheduler.learning.values import Flight

__all__ = ["Booker"]

_WORTH_PULLING_TOKENS: Final = 512.0


class Booker:
    """Makes, moves and restores reservations. `routes` counts the decisions made."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        prefixes: Prefixes,
        fingerprints: FingerprintIndex,
        costs: CostModel,
        history: History,
        salts: Salts,
        retries: Retries,
        *,
        fallbacks: int,
        max_index_blocks: int,
        kv_quantile: float | None,
    ) -> None:
        self.routes = 0
        self.observer: Observer | None = None
        self._fleet, self._ledger, self._prefixes, self._fingerprints = fleet, ledger, prefixes, fingerprints
        self._costs, self._history, self._salts = costs, history, salts
        self._retries = retries
        self._kv_quantile = kv_quantile
        self._max_fallbacks, self._max_index_blocks = fallbacks, max_index_blocks
        ledger.on_end.append(self._ended)

    def work(self, request: Request, owner: Owner, now: float) -> Work:
        """What is computed once for a request."""
        kv = self._prefixes.prompt(request)
        if kv is not None and kv.tokens is not None:
            request = replace(request, prompt_tokens=kv.tokens)  # counted, not estimated
        chain = chain_of(request, self._history.bytes_per_token(request.model), self._max_index_blocks)
        history, model, task_class, quantile = self._history, request.model, request.task_class, self._kv_quantile
        output = kv_output = history.expected_output(request.tenant, model, task_class, request.max_tokens)
        if quantile is not None:
            kv_output = history.expected_output(request.tenant, model, task_class, request.max_tokens, quantile)
        weight, uncapped_weight = history.weights(model, task_class)
        text_bytes = len(request.prompt.data) if isinstance(request.prompt, TextPrompt) else 0
        estimated = request.prompt_tokens + output
        return Work(
            request=request,
            owner=owner,
            identity=identity_of(request),
            chain=chain,
            submitted_at=now,
            expected_output=output,
            estimated_tokens=estimated,
            kv_output=kv_output,
            weight=weight,
            uncapped_weight=uncapped_weight,
            text_bytes=text_bytes,
            kv=kv,
        )

    def reserve(self, work: Work, choice: Choice, now: float) -> Decision:
        """Give a request the chosen place."""
        slot, request, hit = choice.slot, work.request, choice.hit_tokens
        leg, prefill_ms, expected_s = self._leg(work, slot, hit, choice.hit_transfer_ms)
        ttft = choice.predicted_ttft_ms
        predicted = self._fleet.columns.prefill_us.item(slot) / 1e3 + prefill_ms if ttft is None else ttft
        # A transfer is in the TTFT, but no part of what the cost model learns.
        work.flight = self._flight(work, slot, hit, now, usable=not choice.hit_transfer_ms)
        matched = min(int(hit), max(0, request.prompt_tokens - 1))
        reservation = self._reservation(work, leg, predicted, expected_s, matched, now)
        work.request = replace(request, prompt=None)  # its prompt is in the chain now: keep no copy of it for hours
        self._ledger.begin(reservation, now)
        self._fleet.placed(slot, reservation)
        self._prefixes.demand.begin(work.chain)
        self.count(slot)
        pull_from = self._pull_from(choice)
        self._remember(work, slot, predicted, now)
        why = self.why(work, choice, matched, predicted, now)
        work.decision = self._decision(reservation, work, slot, self.fallbacks(choice, request.model), why, pull_from)
        if self.observer is not None:
            self.observer.decided(work, choice, now)
        return work.decision

    def move(self, reservation: Reservation, endpoint: Endpoint, now: float) -> None:
        """A data plane failed over by itself: count its request where it is served."""
        work, slot = reservation.attachment, endpoint.slot
        if not isinstance(work, Work) or slot == reservation.slot:
            return
        capacity = self._fleet.columns.capacity
        hit = float(self._prefixes.match(work, now).tokens(np.array([slot], np.int32), capacity)[0])
        leg, prefill_ms, _ = self._leg(work, slot, hit)
        if work.flight is not None:
            self._costs.lost(work.flight, now)
        # The TTFT reported will hold the failed try too: nothing to learn from.
        work.flight = self._flight(work, slot, hit, now, usable=False)
        reservation.predicted_ttft_ms = float(self._fleet.columns.prefill_us[slot]) / 1e3 + prefill_ms
        reservation.matched_tokens = min(int(hit), max(0, work.request.prompt_tokens - 1))
        self._fleet.left(reservation)
        self._ledger.move(reservation, [leg], now)
        self._fleet.placed(slot, reservation)
        self._remember(work, slot, reservation.predicted_ttft_ms, now)
        if work.decision is not None:
            fallbacks = tuple(each for each in work.decision.fallbacks if each.spec.id != endpoint.id)
            work.decision = replace(
                work.decision,
                endpoint=self._placement(slot),
                fallbacks=fallbacks,
                cache_salt=self._salts.salt(work.request.domain, endpoint.spec.engine),
                pull_from=None,
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
        work = self.work(request, owner, now)
        work.identity = None
        leg, prefill_ms, expected_s = self._leg(work, endpoint.slot, float(matched))
        matched = min(matched, max(0, request.prompt_tokens - 1))
        reservation = self._reservation(work, leg, prefill_ms, expected_s, matched, now)
        work.flight = self._flight(work, endpoint.slot, float(matched), now, usable=False)
        self._ledger.begin(reservation, now)
        self._prefixes.demand.begin(work.chain)
        self._remember(work, endpoint.slot, prefill_ms, now)
        why = Why("", "", "", request.prompt_tokens, matched, prefill_ms, request.task_class, work.weight, candidates=1)
        work.decision = self._decision(reservation, work, endpoint.slot, (), why)
        return reservation

    def answered(self, work: Work, slot: int, tokens: int) -> None:
        """`slot` answered with so many tokens: its cache holds them behind the prompt."""
        self._prefixes.index.answered(slot, work.chain, tokens)

    def prefill_ms(self, work: Work, choice: Choice) -> float:
        """The chosen one's prefill of this request alone, in milliseconds."""
        hit = min(choice.hit_tokens, max(0.0, work.request.prompt_tokens - 1.0))
        prefill_ms = self._costs.prefill_ms_at(choice.slot, work.request.prompt_tokens - hit, hit)
        return prefill_ms + choice.hit_transfer_ms

    def count(self, slot: int) -> None:
        """One more decision, for `slot`."""
        self.routes += 1
        self._fleet.columns.last_chosen[slot] = self.routes

    def why(self, work: Work, choice: Choice, matched: int, ttft_ms: float | None, now: float) -> Why:
        """The reasons of a choice."""
        request, priced = work.request, choice.priced
        return Why(
            strategy=priced.strategy,
            fell_back_from=priced.fell_back_from,
            fallback_reason=priced.fallback_reason,
            prompt_tokens=request.prompt_tokens,
            matched_tokens=matched,
            predicted_ttft_ms=ttft_ms,
            task_class=request.task_class,
            task_weight=work.weight,
            candidates=len(choice.slots),
            held_ms=(now - work.submitted_at) * 1e3,
        )

    # Inside

    def _ended(self, reservation: Reservation, _cause: EndCause, _now: float) -> None:
        self._fleet.left(reservation)
        if isinstance(reservation.attachment, Work):
            self._prefixes.demand.end(reservation.attachment.chain)

    def _decision(
        self,
        reservation: Reservation,
        work: Work,
        slot: int,
        fallbacks: tuple[Placement, ...],
        why: Why,
        pull_from: PrefixHolder | None = None,
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
            cache_salt=self._salts.salt(work.request.domain, self._fleet.by_slot[slot].spec.engine),
            pull_from=pull_from,
        )

    def _pull_from(self, choice: Choice) -> PrefixHolder | None:
        """Another candidate that certainly has much more of the prompt, where both can move prefixes."""
        if choice.known is None or not self._fleet.by_slot[choice.slot].spec.pulls_prefixes:
            return None
        least = choice.hit_tokens + _WORTH_PULLING_TOKENS
        for position in np.argsort(-choice.known, kind="stable").tolist():
            if choice.known[position] < least:
                return None
            slot = int(choice.slots[position])
            if self._fleet.by_slot[slot].spec.pulls_prefixes:
                return PrefixHolder(self._placement(slot), int(choice.known[position]))
        return None

    def fallbacks(self, choice: Choice, model: str) -> tuple[Placement, ...]:
        """The next best, in order; none while the pool's retries are spent, since a data plane would go there."""
        if self._retries.now and self._retries.spent(model):
            return ()
        slots, by_slot = choice.slots, self._fleet.by_slot
        return tuple([by_slot[slots.item(other)].placement for other in choice.order[1 : 1 + self._max_fallbacks]])

    def _leg(self, work: Work, slot: int, hit: float, transfer_ms: float = 0.0) -> tuple[Leg, float, float]:
        """A leg on `slot`, its prefill alone in milliseconds, and its expected duration in seconds."""
        request = work.request
        hit = min(hit, max(0.0, request.prompt_tokens - 1.0))
        uncached = request.prompt_tokens - hit
        work_ms, steps_ms = self._costs.prefill_parts_ms_at(slot, uncached, hit)
        prefill_ms = work_ms + steps_ms + transfer_ms
        # What others there share with it is in memory once.
        shared = min(hit, self._prefixes.demand.shared_tokens(work.chain))
        booking = Booking(
            weight_micro=round(work.weight * 1e6),
            prefill_us=round(prefill_ms * 1e3),
            prefill_tokens=round(uncached),
            context_tokens=round(request.prompt_tokens + work.expected_output / 2),
            kv_tokens=round(request.prompt_tokens - shared + work.kv_output / 2),
            uncapped_micro=round(work.uncapped_weight * 1e6),
            prefill_work_us=round((work_ms + transfer_ms) * 1e3),
        )
        expected_s = prefill_ms / 1e3 + work.expected_output * self._history.seconds_per_token(request.model)
        return Leg(slot, booking), prefill_ms, expected_s

    def _flight(self, work: Work, slot: int, hit: float, now: float, *, usable: bool = True) -> Flight:
        prompt_tokens = work.request.prompt_tokens
        hit = min(hit, max(0.0, prompt_tokens - 1.0))
        return self._costs.sent(slot, prompt_tokens - hit, hit, now, usable=usable)

    def _reservation(
        self, work: Work, leg: Leg, predicted_ttft_ms: float, expected_s: float, matched: int, now: float
    ) -> Reservation:
        request, config = work.request, self._ledger.config
        wanted_s = config.ttl_factor * (expected_s + predicted_ttft_ms / 1e3)
        return Reservation(
            id=self._ledger.new_id(),
            owner=work.owner,
            principal=work.owner.principal,
            tenant=request.tenant,
            request_id=request.request_id,
            model=request.model,
            task_class=request.task_class,
            legs=[leg],
            began_at=now,
            predicted_s=expected_s,
            ttl_s=min(config.max_ttl_s, max(config.min_ttl_s, wanted_s)),
            prompt_tokens=request.prompt_tokens,
            matched_tokens=matched,
            predicted_ttft_ms=predicted_ttft_ms,
            attachment=work,
        )

    def _remember(self, work: Work, slot: int, predicted_ttft_ms: float, now: float) -> None:
        """The endpoint is about to hold this prompt's prefix."""
        self._prefixes.expect(work, slot, predicted_ttft_ms, now)
        if work.fingerprint is not None:
            self._fingerprints.touch(slot, work.chain.root, work.fingerprint)

    def _placement(self, slot: int) -> Placement:
        return self._fleet.by_slot[slot].placement
