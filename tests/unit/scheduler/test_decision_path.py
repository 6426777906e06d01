"""What makes a decision cheap gives the same answers as what is easy to read."""

import numpy as np
import pytest
from fakes.rig import Rig, engine_sample, spec
from headway_scheduler.admission.choosing import _first
from headway_scheduler.fleet.columns import Load, Pool
from headway_scheduler.index.chain import mark, slots_in
from headway_scheduler.strategies.stopwatch import Stopwatch
from hypothesis import given
from hypothesis import strategies as st

FEW_VALUES = st.sampled_from([0.0, 1.0, 2.0, np.inf])


@given(st.data(), st.integers(1, 6), st.sampled_from([3, 8, 300, 700]))
def test_the_first_few_are_those_of_a_whole_sort(data, count, size):
    seed = data.draw(st.integers(0, 2**32 - 1))
    dice = np.random.default_rng(seed)
    values = data.draw(st.lists(FEW_VALUES, min_size=1, max_size=4))
    costs = dice.choice(values, size) + dice.choice([0.0, 0.5], size) * data.draw(st.booleans())
    inflight = dice.integers(0, 3, size).astype(float)
    chosen = dice.permutation(size) * dice.integers(0, 2, size)
    wanted = np.lexsort((chosen, inflight, costs))[:count].tolist()
    assert _first(min(count, size), costs, lambda: (inflight, chosen)) == wanted


@given(st.sets(st.integers(0, 63)), st.floats(0.5, 9.0))
def test_a_mask_is_written_to_its_slots(slots, value):
    entries = np.zeros(64)
    mark(entries, sum(1 << slot for slot in slots), value)
    assert np.flatnonzero(entries == value).tolist() == sorted(slots)
    assert slots_in(sum(1 << slot for slot in slots), 64).tolist() == sorted(slots)


@pytest.mark.parametrize("slots", [[], [3], [0, 1, 2], [2, 3, 4], [0, 2], [1, 2, 4]])
def test_a_pool_reads_its_own_entries(slots):
    pool = Pool.of(np.array(slots, np.int32))
    assert np.arange(8)[pool.place].tolist() == slots
    assert isinstance(pool.place, slice) == (bool(slots) and slots == list(range(slots[0], slots[-1] + 1)))


def test_the_load_kept_is_the_load_computed_anew():
    rig = Rig()
    rig.bind("adaptive")
    rig.endpoints(40)
    dice = np.random.default_rng(5)
    running = []
    for turn in range(300):
        rig.clock.now += 0.05
        what = dice.integers(0, 4)
        if what == 0 or not running:
            running.append(rig.route(max_wait_s=0.0))
        elif what == 1:
            rig.first_token(running[int(dice.integers(len(running)))], 20.0)
        elif what == 2:
            rig.finish(running.pop(int(dice.integers(len(running)))), duration_ms=50.0, ttft_ms=20.0)
        else:
            rig.sample(
                rig.fleet.nodes["n"], engine_sample(spec(int(dice.integers(1, 41))), running=int(dice.integers(0, 5)))
            )
        kept = rig.columns.load().copy()
        assert np.array_equal(kept, rig.columns._whole_load(), equal_nan=True), turn
    assert kept.shape == (len(Load._fields), rig.columns.capacity)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class TestStopwatch:
    def test_what_others_computed_is_not_counted(self):
        cpu, wall = Clock(), Clock()
        watch = Stopwatch(cpu, wall)
        started = watch.start(0.02)
        wall.now += 5.0  # the host was busy with others
        cpu.now += 0.001
        assert watch.over(started, 0.02) is None

    def test_twice_the_limit_is_always_found(self):
        cpu, wall = Clock(), Clock()
        watch = Stopwatch(cpu, wall)
        for gap in (0.0, 0.019, 1.0):
            wall.now += gap
            cpu.now += gap
            started = watch.start(0.02)
            wall.now += 0.041
            cpu.now += 0.041
            assert watch.over(started, 0.02) == pytest.approx(0.041)

    def test_within_the_limit_the_cpus_clock_is_not_read(self):
        wall, read = Clock(), []
        watch = Stopwatch(lambda: read.append(1) or 0.0, wall)
        before = len(read)
        for _ in range(10):
            started = watch.start(0.02)
            wall.now += 0.001
            assert watch.over(started, 0.02) is None
        assert len(read) == before


class TestGuardOfTheChosenOne:
    @pytest.mark.parametrize("kv_use", [None, 0.0, 0.5, 0.999])
    @pytest.mark.parametrize("running", [0, 3])
    def test_is_that_of_all(self, kv_use, running):
        rig = Rig()
        rig.bind("adaptive")
        rig.endpoints(3)
        samples = [engine_sample(spec(n), running=running) for n in (1, 2, 3)]
        if kv_use is not None:
            samples[1] = engine_sample(spec(2), running=running, kv_use=kv_use)
        rig.sample(rig.fleet.nodes["n"], *samples)
        dispatcher = rig.dispatcher
        for tokens in (10, 100_000, 500_000):
            work = dispatcher._work(rig.request(prompt_tokens=tokens), rig.owner, rig.clock.now)
            choice = dispatcher._chooser.choose(work, rig.scheduler.registry.bound("default", "m"), rig.clock.now)
            forbidden = any(each[choice.position] for each in choice.by_guard().values())
            assert choice.dispatchable != forbidden
