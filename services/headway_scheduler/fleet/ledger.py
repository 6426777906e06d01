"""Reservations: who has a place where, and what each adds to the columns.

A reservation stores, in exact integers, what its legs added; the booked columns change only in the transitions here
(begin, first token, move, end), so recomputing them from the reservations always gives the same numbers. Each
reservation ends exactly once.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from headway_scheduler.fleet.columns import BOOKED, Columns, IntColumn
from headway_scheduler.fleet.values import Leg, Owner, Reservation

__all__ = ["EndCause", "Ledger", "LedgerConfig"]


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """Times in seconds.

    A unary caller's reservation lives `ttl_factor` times its predicted duration, at least `min_ttl_s` and at most
    `max_ttl_s`, renewed by every report. `resume_grace_s`: how long an orphan waits for its owner.
    `late_prefill_factor`: an owner that does send FIRST_TOKEN is believed to be prefilling until then, but not longer
    than this many predicted prefills.
    """

    min_ttl_s: float = 300.0
    max_ttl_s: float = 21_600.0
    ttl_factor: float = 3.0
    resume_grace_s: float = 10.0
    renew_s: float = 60.0
    late_prefill_factor: float = 10.0
    late_prefill_s: float = 30.0
    remembered_ends: int = 100_000


class EndCause(StrEnum):
    """Why a reservation ended."""

    REPORTED = "reported"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ORPHANED = "orphaned"
    ENDPOINT_GONE = "endpoint_gone"
    MOVED_OUT = "moved_out"


class Ledger:
    """All live reservations of this scheduler.

    `on_end` is told of each end, exactly once; `on_room` of every transition that may have made room.
    """

    def __init__(self, columns: Columns, name: str, epoch: str, config: LedgerConfig | None = None) -> None:
        self.config = config or LedgerConfig()
        self.reservations: dict[str, Reservation] = {}
        self.by_request: dict[tuple[str, str, str], Reservation] = {}
        self.tenant_inflight: dict[str, int] = {}
        self.on_end: list[Callable[[Reservation, EndCause, float], None]] = []
        self.on_room: list[Callable[[], None]] = []
        self.still_running: Callable[[Reservation], bool] = lambda _reservation: False
        self._columns = columns
        self._prefix = f"{name}.{epoch}."
        self._count = 0
        self._ended: OrderedDict[str, tuple[str, EndCause]] = OrderedDict()
        self._successors: OrderedDict[str, str] = OrderedDict()
        self._expiries: list[tuple[float, str]] = []
        self._prefills: list[tuple[float, str]] = []

    # Transitions

    def new_id(self) -> str:
        """A fresh reservation id; it carries the scheduler's name and boot epoch."""
        self._count += 1
        return f"{self._prefix}{self._count}"

    def begin(self, reservation: Reservation, now: float) -> None:
        """Count a new reservation."""
        self.reservations[reservation.id] = reservation
        self.by_request[reservation.key] = reservation
        self.tenant_inflight[reservation.tenant] = self.tenant_inflight.get(reservation.tenant, 0) + 1
        for leg in reservation.legs:
            self._add(leg)
        if reservation.owner is not None:
            reservation.owner.reservations.add(reservation.id)
        self._renew(reservation, now)
        self._await_prefill(reservation, now)

    def first_token(self, reservation: Reservation, now: float) -> bool:
        """Its prefill is done; False if it was already."""
        if reservation.first_token_at is not None:
            return False
        reservation.first_token_at = now
        self._decode(reservation)
        self._renew(reservation, now)
        return True

    def progress(self, reservation: Reservation, now: float) -> None:
        """It is alive."""
        self._renew(reservation, now)

    def move(self, reservation: Reservation, legs: list[Leg], now: float) -> None:
        """It is served elsewhere now: the old legs stop counting, the new ones start."""
        for leg in reservation.legs:
            self._subtract(leg)
        reservation.legs = legs
        reservation.first_token_at = None
        reservation.blamed = False
        for leg in legs:
            self._add(leg)
        self._renew(reservation, now)
        self._await_prefill(reservation, now)
        self._room()

    def end(self, reservation: Reservation, cause: EndCause, now: float) -> bool:
        """It is over; False if it was already."""
        if self.reservations.pop(reservation.id, None) is None:
            return False
        if self.by_request.get(reservation.key) is reservation:
            del self.by_request[reservation.key]
        left = self.tenant_inflight[reservation.tenant] - 1
        if left:
            self.tenant_inflight[reservation.tenant] = left
        else:
            del self.tenant_inflight[reservation.tenant]
        for leg in reservation.legs:
            self._subtract(leg)
        if reservation.owner is not None:
            reservation.owner.reservations.discard(reservation.id)
        self._ended[reservation.id] = (reservation.principal, cause)
        while len(self._ended) > self.config.remembered_ends:
            self._ended.popitem(last=False)
        for listener in self.on_end:
            listener(reservation, cause, now)
        self._room()
        return True

    # Owners

    def lose_owner(self, owner: Owner, now: float) -> None:
        """The owner's stream is gone: its reservations are orphans, to be resumed within the grace."""
        for reservation_id in list(owner.reservations):
            reservation = self.reservations[reservation_id]
            reservation.owner = None
            self._expire_at(reservation, now + self.config.resume_grace_s)
        owner.reservations.clear()

    def adopt(self, reservation: Reservation, owner: Owner, now: float) -> None:
        """`owner` resumes it."""
        if reservation.owner is not None:
            reservation.owner.reservations.discard(reservation.id)
        if reservation.owner is not owner:
            reservation.claims = 1
        reservation.owner = owner
        owner.reservations.add(reservation.id)
        self._renew(reservation, now)

    # Lookup

    def find(self, reservation_id: str) -> Reservation | None:
        """The live reservation of this id, or the one that took its place after a restart."""
        found = self.reservations.get(reservation_id)
        if found is None and reservation_id in self._successors:
            found = self.reservations.get(self._successors[reservation_id])
        return found

    def succeed(self, old_id: str, reservation: Reservation) -> None:
        """Reports under `old_id` mean `reservation` from now on."""
        self._successors[old_id] = reservation.id
        while len(self._successors) > self.config.remembered_ends:
            self._successors.popitem(last=False)

    def ended(self, reservation_id: str, principal: str) -> EndCause | None:
        """How this principal's reservation of this id ended here, if it did and not too long ago."""
        owner, cause = self._ended.get(self._successors.get(reservation_id, reservation_id), ("", None))
        return cause if owner == principal else None

    # Time

    def advance(self, now: float) -> None:
        """Do what time does: prefills predicted done count as done; what nobody renews expires."""
        prefills, expiries = self._prefills, self._expiries
        while prefills and prefills[0][0] <= now:
            due, reservation_id = heapq.heappop(prefills)
            reservation = self.reservations.get(reservation_id)
            if reservation is not None and reservation.first_token_at is None and reservation.prefill_due == due:
                self._prefill_overdue(reservation, now)
        while expiries and expiries[0][0] <= now:
            due, reservation_id = heapq.heappop(expiries)
            reservation = self.reservations.get(reservation_id)
            if reservation is None or reservation.expiry_queued != due:
                continue
            reservation.expiry_queued = None
            if reservation.expires_at is None:
                continue  # a stream took it over
            if reservation.expires_at > now:
                self._expire_at(reservation, reservation.expires_at)  # it was renewed meanwhile
            elif reservation.owner is None:
                self.end(reservation, EndCause.ORPHANED, now)
            elif self.still_running(reservation):
                self._expire_at(reservation, now + self.config.renew_s)
            else:
                self.end(reservation, EndCause.EXPIRED, now)

    # Accounting

    def recompute(self) -> dict[str, IntColumn]:
        """The booked columns, added up afresh from the reservations."""
        totals = {name: np.zeros(self._columns.capacity, np.int64) for name in BOOKED}
        for reservation in self.reservations.values():
            for leg in reservation.legs:
                for name, amount in zip(BOOKED, leg.booked(), strict=True):
                    totals[name][leg.slot] += amount
        return totals

    def on_slot(self, slot: int) -> Iterable[Reservation]:
        """Reservations with a leg on `slot`."""
        return [r for r in self.reservations.values() if any(leg.slot == slot for leg in r.legs)]

    # Inside

    def _add(self, leg: Leg) -> None:
        """Count a leg: what `Leg.booked` says of it. Entry by entry, what is zero left out, since it is a hot path."""
        c, slot, booking = self._columns, leg.slot, leg.booking
        c.inflight[slot] += 1
        c.weight_micro[slot] += booking.weight_micro
        c.kv_tokens[slot] += booking.kv_tokens
        c.uncapped_micro[slot] += booking.uncapped_micro
        if leg.prefilling:
            c.prefill_us[slot] += booking.prefill_us
            c.prefill_tokens[slot] += booking.prefill_tokens
            c.prefill_work_us[slot] += booking.prefill_work_us
        else:
            c.context_tokens[slot] += booking.context_tokens
            c.decoding[slot] += 1

    def _subtract(self, leg: Leg) -> None:
        c, slot, booking = self._columns, leg.slot, leg.booking
        c.inflight[slot] -= 1
        c.weight_micro[slot] -= booking.weight_micro
        c.kv_tokens[slot] -= booking.kv_tokens
        c.uncapped_micro[slot] -= booking.uncapped_micro
        if leg.prefilling:
            c.prefill_us[slot] -= booking.prefill_us
            c.prefill_tokens[slot] -= booking.prefill_tokens
            c.prefill_work_us[slot] -= booking.prefill_work_us
        else:
            c.context_tokens[slot] -= booking.context_tokens
            c.decoding[slot] -= 1

    def _decode(self, reservation: Reservation) -> None:
        c = self._columns
        for leg in reservation.legs:
            if leg.prefilling:
                slot, booking = leg.slot, leg.booking
                c.prefill_us[slot] -= booking.prefill_us
                c.prefill_tokens[slot] -= booking.prefill_tokens
                c.prefill_work_us[slot] -= booking.prefill_work_us
                c.context_tokens[slot] += booking.context_tokens
                c.decoding[slot] += 1
                leg.prefilling = False
        self._room()

    def _await_prefill(self, reservation: Reservation, now: float) -> None:
        reservation.placed_at = now
        predicted = reservation.predicted_ttft_ms
        self._prefill_due_at(reservation, None if predicted is None else now + predicted / 1e3)

    def _prefill_due_at(self, reservation: Reservation, when: float | None) -> None:
        reservation.prefill_due = when
        if when is not None:
            heapq.heappush(self._prefills, (when, reservation.id))

    def _prefill_overdue(self, reservation: Reservation, now: float) -> None:
        owner = reservation.owner
        if owner is not None and owner.sends_first_token:
            predicted_s = (reservation.predicted_ttft_ms or 0.0) / 1e3
            patience = self.config.late_prefill_factor * predicted_s + self.config.late_prefill_s
            due = reservation.placed_at + patience
            if now < due:
                self._prefill_due_at(reservation, due)
                return
        self._decode(reservation)

    def _renew(self, reservation: Reservation, now: float) -> None:
        owner = reservation.owner
        if owner is not None and owner.stream:
            reservation.expires_at = None
        elif owner is not None:
            self._expire_at(reservation, now + reservation.ttl_s)

    def _expire_at(self, reservation: Reservation, when: float) -> None:
        """Queued once a reservation: renewing it moves `expires_at` alone, looked at when its turn comes."""
        reservation.expires_at = when
        if reservation.expiry_queued is None or when < reservation.expiry_queued:
            reservation.expiry_queued = when
            heapq.heappush(self._expiries, (when, reservation.id))

    def _room(self) -> None:
        for listener in self.on_room:
            listener()
