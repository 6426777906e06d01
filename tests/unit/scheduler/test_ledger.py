"""Reservations: each ends exactly once, and the columns are what they add up to."""

import numpy as np
import pytest
from fakes.rig import LONG, Clock, Rig, engine_sample, spec
from headway_scheduler.domain.request import TaskClass
from headway_scheduler.fleet.columns import BOOKED, Columns
from headway_scheduler.fleet.ledger import EndCause, Ledger
from headway_scheduler.fleet.values import Booking, Leg, Owner, Reservation


class Book:
    """A ledger alone, with reservations of a known size."""

    def __init__(self):
        self.clock, self.columns = Clock(0.0), Columns()
        self.ledger = Ledger(self.columns, "s1", "e1")
        self.ends, self.rooms = [], 0
        self.ledger.on_end.append(lambda r, cause, now: self.ends.append((r.id, cause)))
        self.ledger.on_room.append(self.room)

    def room(self):
        self.rooms += 1

    def begin(self, slot=0, owner=None, ttft_ms=100.0, ttl_s=300.0, request_id="r"):
        leg = Leg(slot, Booking(1_500_000, 100_000, 80, 300, 356, 2_000_000, 90_000))
        reservation = Reservation(
            id=self.ledger.new_id(),
            owner=owner or Owner("p", stream=False),
            principal="p",
            tenant="a",
            request_id=request_id,
            model="m",
            task_class=TaskClass.CHAT,
            legs=[leg],
            began_at=self.clock.now,
            predicted_s=10.0,
            ttl_s=ttl_s,
            predicted_ttft_ms=ttft_ms,
        )
        self.ledger.begin(reservation, self.clock.now)
        return reservation

    def at(self, now):
        self.clock.now = now
        self.ledger.advance(now)

    def booked(self, slot=0):
        return tuple(int(getattr(self.columns, name)[slot]) for name in BOOKED)

    def agrees(self):
        return all(
            np.array_equal(column, getattr(self.columns, name)) for name, column in self.ledger.recompute().items()
        )


PREFILLING = (1, 1_500_000, 100_000, 80, 0, 356, 2_000_000, 0, 90_000)
DECODING = (1, 1_500_000, 0, 0, 300, 356, 2_000_000, 1, 0)
NOTHING = (0,) * len(BOOKED)


class TestTransitions:
    def test_begin_first_token_end(self):
        book = Book()
        reservation = book.begin()
        assert book.booked() == PREFILLING
        assert book.ledger.first_token(reservation, 1.0)
        assert not book.ledger.first_token(reservation, 1.0)
        assert book.booked() == DECODING
        assert book.ledger.end(reservation, EndCause.REPORTED, 2.0)
        assert not book.ledger.end(reservation, EndCause.CANCELLED, 2.0)
        assert book.booked() == NOTHING
        assert book.ends == [(reservation.id, EndCause.REPORTED)]
        assert not book.ledger.tenant_inflight
        assert not reservation.owner.reservations

    def test_a_move_takes_everything_along(self):
        book = Book()
        reservation = book.begin()
        book.ledger.first_token(reservation, 0.05)
        book.ledger.move(reservation, [Leg(3, Booking(1_500_000, 7, 8, 9, 10, 11, 6))], 0.06)
        assert book.booked(0) == NOTHING
        assert book.booked(3) == (1, 1_500_000, 7, 8, 0, 10, 11, 0, 6)
        assert reservation.slot == 3
        assert book.agrees()

    def test_two_legs(self):
        book = Book()
        reservation = book.begin()
        book.ledger.move(reservation, [Leg(1, Booking(1, 2, 3, 4, 5)), Leg(2, Booking(6, 7, 8, 9, 10))], 0.0)
        assert reservation.slot == 2, "the last one answers"
        assert [r.id for r in book.ledger.on_slot(1)] == [reservation.id]
        book.ledger.first_token(reservation, 0.1)
        assert book.booked(1) == (1, 1, 0, 0, 4, 5, 0, 1, 0)
        assert book.agrees()
        book.ledger.end(reservation, EndCause.REPORTED, 1.0)
        assert book.booked(1) == book.booked(2) == NOTHING

    def test_ids_carry_name_and_epoch(self):
        assert Ledger(Columns(), "s1", "e1").new_id() == "s1.e1.1"

    def test_room_is_told(self):
        book = Book()
        reservation = book.begin()
        assert book.rooms == 0
        book.ledger.first_token(reservation, 1.0)
        book.ledger.end(reservation, EndCause.REPORTED, 2.0)
        assert book.rooms == 2

    def test_ends_are_remembered_by_their_principal_alone(self):
        book = Book()
        reservation = book.begin()
        assert book.ledger.ended(reservation.id, "p") is None
        book.ledger.end(reservation, EndCause.EXPIRED, 2.0)
        assert book.ledger.ended(reservation.id, "p") is EndCause.EXPIRED
        assert book.ledger.ended(reservation.id, "other") is None

    def test_a_successor_stands_for_its_old_id(self):
        book = Book()
        reservation = book.begin()
        book.ledger.succeed("s1.e0.9", reservation)
        assert book.ledger.find("s1.e0.9") is reservation
        book.ledger.end(reservation, EndCause.REPORTED, 2.0)
        assert book.ledger.find("s1.e0.9") is None
        assert book.ledger.ended("s1.e0.9", "p") is EndCause.REPORTED


class TestPrefill:
    def test_counts_as_done_at_its_predicted_time(self):
        book = Book()
        book.begin()
        book.at(0.099)
        assert book.booked() == PREFILLING
        book.at(0.1)
        assert book.booked() == DECODING

    def test_an_owner_that_says_first_token_is_believed_longer_but_not_for_ever(self):
        book = Book()
        book.begin(owner=Owner("p", stream=True, sends_first_token=True))
        book.at(30.9)
        assert book.booked() == PREFILLING
        book.at(31.0)
        assert book.booked() == DECODING

    def test_after_a_move_it_starts_anew(self):
        book = Book()
        reservation = book.begin()
        book.clock.now = 0.09
        book.ledger.move(reservation, [Leg(0, reservation.legs[0].booking)], 0.09)
        book.at(0.15)
        assert book.booked() == PREFILLING, "the first try's prediction means nothing now"
        book.at(0.2)
        assert book.booked() == DECODING

    def test_after_a_late_move_the_owner_is_believed_as_long_as_at_first(self):
        book = Book()
        reservation = book.begin(owner=Owner("p", stream=True, sends_first_token=True))
        book.at(500.0)
        book.ledger.move(reservation, [Leg(0, reservation.legs[0].booking)], 500.0)
        book.at(510.0)
        assert book.booked() == PREFILLING


class TestExpiry:
    def test_a_unary_callers_ends_after_its_ttl(self):
        book = Book()
        reservation = book.begin()
        book.at(299.9)
        assert not book.ends
        book.at(300.0)
        assert book.ends == [(reservation.id, EndCause.EXPIRED)]

    @pytest.mark.parametrize("renew", ["progress", "first_token"])
    def test_a_report_renews_it(self, renew):
        book = Book()
        reservation = book.begin()
        book.at(299.0)
        getattr(book.ledger, renew)(reservation, 299.0)
        book.at(598.0)
        assert not book.ends
        book.at(599.0)
        assert len(book.ends) == 1

    def test_many_renewals_queue_nothing_more(self):
        book = Book()
        reservation = book.begin()
        for n in range(1000):
            book.ledger.progress(reservation, n / 10)
        assert len(book.ledger._expiries) == 1

    def test_not_while_the_engine_reports_as_much_running(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        decision = rig.route()
        for _ in range(2000):
            rig.clock.now += 1
            rig.sample(node, engine_sample(spec(1), 1))
            rig.dispatcher.advance(rig.clock.now)
        assert rig.ledger.find(decision.reservation_id), "a long generation keeps its count"
        for _ in range(70):
            rig.clock.now += 1
            rig.sample(node, engine_sample(spec(1), 0))
            rig.dispatcher.advance(rig.clock.now)
        assert rig.is_empty()

    def test_the_ttl_follows_the_prediction(self):
        rig = Rig()
        rig.endpoints(1)
        assert rig.route(task_class=LONG).ttl_s == 300
        long = rig.route(max_tokens=20_000, task_class=LONG)
        assert long.ttl_s == 300, "nothing is expected to be that long yet"
        rig.scheduler.history.finished("default", "m", LONG, 20_000, 600.0)
        assert rig.route(task_class=LONG).ttl_s > 1800


class TestOwners:
    def test_a_streams_reservations_do_not_expire_while_it_is_open(self):
        book = Book()
        book.begin(owner=Owner("p", stream=True))
        book.at(1e6)
        assert not book.ends

    def test_orphans_wait_for_the_grace(self):
        book = Book()
        owner = Owner("p", stream=True)
        reservation = book.begin(owner=owner)
        book.at(50.0)
        book.ledger.lose_owner(owner, 50.0)
        book.at(59.9)
        assert not book.ends
        book.at(60.0)
        assert book.ends == [(reservation.id, EndCause.ORPHANED)]

    def test_a_unary_callers_orphan_ends_after_the_grace_too(self):
        book = Book()
        owner = Owner("p", stream=False)
        book.begin(owner=owner)
        book.ledger.lose_owner(owner, 1.0)
        book.at(11.0)
        assert len(book.ends) == 1

    def test_adopted_in_time_it_lives(self):
        book = Book()
        owner, other = Owner("p", stream=True), Owner("p", stream=True)
        reservation = book.begin(owner=owner)
        book.ledger.lose_owner(owner, 1.0)
        book.ledger.adopt(reservation, other, 5.0)
        book.at(1000.0)
        assert not book.ends
        assert other.reservations == {reservation.id}
        book.ledger.lose_owner(owner, 1000.0)
        book.at(2000.0)
        assert not book.ends, "it is not the old stream's any more"

    def test_from_a_stream_to_a_unary_caller_it_gets_a_ttl(self):
        book = Book()
        reservation = book.begin(owner=Owner("p", stream=True))
        book.ledger.adopt(reservation, Owner("p", stream=False), 5.0)
        book.at(304.0)
        assert not book.ends
        book.at(305.0)
        assert len(book.ends) == 1
