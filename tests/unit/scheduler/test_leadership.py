"""Never two leaders, whatever is stopped, cut off or crashes; and always one again in the end."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from fakes.leader_lock import FakeLeaderLock, FakePostgres
from fakes.virtual_time import run_virtually
from headway_scheduler.errors import StoreDown
from headway_scheduler.leadership import Leadership, Standing
from headway_scheduler.store.base import PostgresAbsent
from hypothesis import example, given, settings
from hypothesis import strategies as st

LEASE_S = 1.0


class Candidate:
    """One scheduler's leadership, and what it was told to do."""

    def __init__(self, postgres, name="a", lease_s=LEASE_S):
        self.lock = FakeLeaderLock(postgres, name, lease_s)
        self.prepared, self.retired, self.standings, self.trouble = [], 0, [], []
        self.lives = True
        clock = asyncio.get_running_loop().time
        self.leadership = Leadership(
            self.lock, lease_s, prepare=self._prepare, retire=self._retire, clock=clock, alive=lambda: self.lives
        )
        self.leadership.on_change.append(lambda: self.standings.append(self.leadership.standing))
        self.task = asyncio.create_task(self.leadership.run())

    async def _prepare(self, epoch):
        self.prepared.append(epoch)
        if self.trouble:
            raise self.trouble.pop()

    def _retire(self):
        self.retired += 1

    @property
    def leads(self):
        return self.leadership.leads()

    def stop(self):
        self.lock.running.clear()

    def go_on(self):
        self.lock.running.set()

    async def end(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def die(self):
        """kill -9: the kernel closes its connection."""
        await self.end()
        await self.lock.close()


def now():
    return asyncio.get_running_loop().time()


async def until(condition, within_s=10.0):
    deadline = now() + within_s
    while not condition():
        assert now() < deadline, "never"
        await asyncio.sleep(0.002)
    return now()


@asynccontextmanager
async def pair():
    """A leads, B stands by."""
    postgres = FakePostgres()
    a = Candidate(postgres, "a")
    await until(lambda: a.leads)
    b = Candidate(postgres, "b")
    await asyncio.sleep(3 * LEASE_S)
    assert (a.leads, b.leads) == (True, False)
    try:
        yield postgres, a, b
    finally:
        await a.end()
        await b.end()


def virtually(test):
    """Run a test's coroutine in virtual time."""

    def run(self):
        run_virtually(test(self))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class TestAlone:
    async def test_leads_from_the_start_and_for_ever(self):
        alone = Leadership(None, LEASE_S, prepare=None, retire=None)
        assert alone.leads()
        assert (alone.standing, alone.epoch) == (Standing.LEADER, None)
        await alone.resign()
        assert alone.leads()


class TestTakingOver:
    @virtually
    async def test_the_first_leader_need_not_wait(self):
        a = Candidate(FakePostgres())
        assert await until(lambda: a.leads) < 0.1 * LEASE_S
        assert a.prepared == [1]
        assert a.standings == [Standing.TAKING_OVER, Standing.LEADER]
        await a.end()

    @virtually
    async def test_a_leader_stays(self):
        async with pair() as (_, a, b):
            await asyncio.sleep(100 * LEASE_S)
            assert a.leads
            assert a.leadership.epoch == 1
            assert b.prepared == []

    @virtually
    async def test_the_lease_of_one_that_was_killed_is_waited_out(self):
        async with pair() as (_, a, b):
            killed = now()
            await a.die()
            took_s = await until(lambda: b.leads) - killed
            assert LEASE_S <= took_s < 1.2 * LEASE_S

    @virtually
    async def test_one_that_resigns_is_followed_at_once(self):
        async with pair() as (_, a, b):
            await a.end()
            resigned = now()
            await a.leadership.resign()
            assert not a.leads
            assert await until(lambda: b.leads) - resigned < 0.2 * LEASE_S
            assert b.leadership.epoch == 2

    @virtually
    async def test_one_that_resigns_while_it_waits_does_not_end_the_wait(self):
        async with pair() as (postgres, a, b):
            await a.die()
            await until(lambda: b.leadership.standing is Standing.TAKING_OVER)
            await b.end()
            await b.leadership.resign()
            assert not postgres.released
            c = Candidate(postgres, "c")
            began = now()
            assert await until(lambda: c.leads) - began >= LEASE_S
            await c.end()

    @virtually
    async def test_the_lease_waited_out_is_the_longest_of_those_before(self):
        async with pair() as (postgres, a, b):
            await a.die()
            await b.end()
            short = Candidate(postgres, "short", 0.25)
            await until(lambda: short.leadership.standing is Standing.TAKING_OVER)
            await short.die()
            c = Candidate(postgres, "c", 0.25)
            began = now()
            assert await until(lambda: c.leads) - began >= LEASE_S
            await c.end()

    @virtually
    async def test_what_fails_while_it_prepares_is_tried_again(self):
        a = Candidate(FakePostgres())
        a.trouble.append(StoreDown("away"))
        await until(lambda: a.leads)
        assert a.prepared == [1, 2]
        assert a.standings[:3] == [Standing.TAKING_OVER, Standing.STANDBY, Standing.TAKING_OVER]
        await a.end()

    @virtually
    async def test_a_fault_in_it_ends_what_runs_and_leads_nobody(self):
        a = Candidate(FakePostgres())
        a.trouble.append(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            await a.task
        assert not a.leads
        assert a.leadership.standing is Standing.STANDBY
        assert a.lock.session is None


class TestLosing:
    @virtually
    async def test_one_that_was_stopped_refuses_before_anything_else_runs(self):
        async with pair() as (_, a, b):
            a.stop()
            stopped = now()
            took_s = await until(lambda: b.leads) - stopped
            assert took_s < 2.2 * LEASE_S
            assert not a.leads, "its clock tells, before a task of it has run"
            assert a.leadership.standing is Standing.LEADER
            a.go_on()
            await until(lambda: a.leadership.standing is Standing.STANDBY)
            assert a.retired == 1
            await asyncio.sleep(5 * LEASE_S)
            assert (a.leads, b.leads) == (False, True)

    @virtually
    async def test_one_that_is_cut_off_stops_by_itself(self):
        async with pair() as (_, a, b):
            a.lock.cut = True
            cut = now()
            assert await until(lambda: not a.leads) - cut <= LEASE_S
            assert await until(lambda: b.leads) - cut < 2.2 * LEASE_S
            a.lock.cut = False
            await asyncio.sleep(5 * LEASE_S)
            assert (a.leads, b.leads) == (False, True)

    @virtually
    async def test_a_short_stall_costs_nothing(self):
        async with pair() as (_, a, b):
            a.stop()
            await asyncio.sleep(0.6 * LEASE_S)
            assert a.leads
            a.go_on()
            await asyncio.sleep(5 * LEASE_S)
            assert a.leads
            assert (a.retired, b.prepared) == (0, [])

    @virtually
    async def test_a_session_that_somebody_ended_is_replaced(self):
        async with pair() as (postgres, a, _):
            before = a.leadership.epoch
            postgres.end(a.lock.session)
            # Whoever is first: the one that led, or the one that waits out its lease.
            await asyncio.sleep(5 * LEASE_S)
            if a.leads:
                assert a.leadership.epoch == before + 1
                assert a.retired == 0

    @virtually
    async def test_one_that_was_overtaken_within_its_lease_stands_down(self):
        postgres = FakePostgres()
        a = Candidate(postgres)
        await until(lambda: a.leads)
        postgres.end(a.lock.session)
        other = FakeLeaderLock(postgres, "other", LEASE_S)
        assert (await other.take()).wait_s == LEASE_S
        await other.close()
        await until(lambda: a.retired)
        assert a.leads is False
        await until(lambda: a.leads)
        assert a.leadership.epoch > 2
        await a.end()

    @virtually
    async def test_one_that_does_not_live_gives_up(self):
        async with pair() as (_, a, b):
            a.lives = False
            gave_up = await until(lambda: a.retired)
            assert not a.leads
            assert await until(lambda: b.leads) - gave_up < 1.2 * LEASE_S


class TestPostgresAway:
    @virtually
    async def test_while_it_runs_nowhere_the_leader_goes_on_and_after_it(self):
        async with pair() as (postgres, a, b):
            postgres.crash()
            for _ in range(500):
                await asyncio.sleep(0.1 * LEASE_S)
                assert a.leads, "nobody can have taken the lock"
            postgres.up = True
            await asyncio.sleep(10 * LEASE_S)
            assert (a.leads, b.leads) == (True, False), "the standby lets it go first"
            assert a.retired == 0
            assert a.leadership.epoch == 2

    @virtually
    async def test_while_it_hangs_nobody_leads(self):
        async with pair() as (postgres, a, b):
            postgres.silent = True
            await asyncio.sleep(2 * LEASE_S)
            assert not a.leads
            assert not b.leads
            postgres.silent = False
            await until(lambda: a.leads or b.leads)

    @virtually
    async def test_a_leader_that_hears_nothing_of_the_restart_has_stopped_when_the_next_one_leads(self):
        async with pair() as (postgres, a, b):
            postgres.crash()
            await asyncio.sleep(3 * LEASE_S)
            a.lock.cut = True
            postgres.up = True
            await until(lambda: b.leads)
            assert not a.leads
            assert a.retired <= 1

    @virtually
    async def test_a_refusal_heard_too_late_proves_nothing(self):
        """Between the end of the lease and the refusal another may have begun to lead."""
        postgres = FakePostgres()
        a = Candidate(postgres)
        await until(lambda: a.leads)
        take = a.lock.take

        async def late():
            a.lock.take = take
            await asyncio.sleep(LEASE_S)
            raise PostgresAbsent("refused")

        a.lock.take = late
        postgres.end(a.lock.session)
        await until(lambda: a.retired)
        assert not a.leads
        await a.end()


TROUBLE = st.lists(
    st.tuples(
        st.sampled_from(["stop", "go_on", "cut", "mend", "kill_session", "crash", "start", "hang", "answer"]),
        st.integers(0, 2),
        st.floats(0.0, 2.5),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(TROUBLE, st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=3))
@example([("crash", 0, 0.7), ("cut", 0, 0.3), ("start", 0, 0.9), ("stop", 1, 1.1), ("go_on", 1, 0.0)], [1.0, 1.0, 1.0])
def test_never_two_leaders_and_always_one_again(trouble, leases):
    run_virtually(_survive(trouble, leases))


async def _survive(trouble, leases):
    postgres = FakePostgres()
    candidates = [Candidate(postgres, f"s{number}", lease_s) for number, lease_s in enumerate(leases)]

    async def watch():
        while True:
            leaders = [each.lock.holder for each in candidates if each.leads]
            assert len(leaders) <= 1, (leaders, now())
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    for what, number, then_s in trouble:
        _happen(what, postgres, candidates[number])
        await asyncio.wait({watching}, timeout=then_s)
    for candidate in candidates:
        _happen("go_on", postgres, candidate)
        _happen("mend", postgres, candidate)
    _happen("start", postgres, candidates[0])
    _happen("answer", postgres, candidates[0])
    await until(lambda: watching.done() or any(each.leads for each in candidates), 60.0)
    await asyncio.sleep(10.0)
    assert sum(each.leads for each in candidates) == 1
    if watching.done():
        watching.result()
    watching.cancel()
    for candidate in candidates:
        await candidate.end()
        assert not candidate.task.done() or candidate.task.cancelled()


def _happen(what, postgres, candidate):
    match what:
        case "stop":
            candidate.stop()
        case "go_on":
            candidate.go_on()
        case "cut":
            candidate.lock.cut = True
        case "mend":
            candidate.lock.cut = False
        case "kill_session":
            if candidate.lock.session is not None:
                postgres.end(candidate.lock.session)
        case "crash":
            postgres.crash()
        case "start":
            postgres.up = True
        case "hang":
            postgres.silent = True
        case "answer":
            postgres.silent = False
