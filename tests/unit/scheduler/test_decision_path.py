"""What makes a decision cheap gives the same answers as what is easy to read."""

import numpy as np
import pytest
from fakes.rig import Rig, engine_sample, spec
from headway_scheduler.admission.ranking import first
from headway_scheduler.compiling import compiled
from headway_scheduler.fleet.columns import Pool
from headway_scheduler.index.chain import slots_in
from headway_scheduler.index.masks import mark
from headway_scheduler.strategies.pricing import COST, NONE, PREFILL, TTFT, price
from headway_scheduler.strategies.stopwatch import Stopwatch
from hypothesis import given
from hypothesis import strategies as st

FEW_VALUES = st.sampled_from([0.0, 1.0, 2.0, np.inf])


@given(st.data(), st.integers(1, 6), st.sampled_from([1, 3, 8, 300]))
def test_the_first_few_are_those_of_a_whole_sort(data, count, size):
    seed = data.draw(st.integers(0, 2**32 - 1))
    dice = np.random.default_rng(seed)
    values = data.draw(st.lists(FEW_VALUES, min_size=1, max_size=4))
    costs = dice.choice(values, size) + dice.choice([0.0, 0.5], size) * data.draw(st.booleans())
    slots = np.sort(dice.permutation(2 * size)[:size]).astype(np.int32)
    inflight, external = dice.integers(0, 3, 2 * size), dice.integers(0, 2, 2 * size).astype(float)
    chosen = dice.permutation(2 * size) * dice.integers(0, 2, 2 * size)
    blocked = dice.choice([True, False], size) if data.draw(st.booleans()) else np.zeros(0, bool)
    ahead = dice.integers(0, 2, 2 * size).astype(float) if data.draw(st.booleans()) else np.zeros(0)
    here = (inflight + external + (ahead if len(ahead) else 0.0))[slots]
    shut = blocked if len(blocked) else np.zeros(size, bool)
    wanted = np.lexsort((chosen[slots], here, costs, shut))[:count].tolist()
    assert first(count, blocked, costs, inflight, external, ahead, chosen, slots).tolist() == wanted


def formula(rows, slots, held, transfer, ahead, ahead_ms, prompt, externality):
    """Adaptive's costs without demand, TTFTs and prefills, in numpy, as docs/strategies/adaptive.md has them."""
    inflight, decoding, queued, work_us, context, external, tok, base, pair, ctx, budget = (row[slots] for row in rows)
    inflight, decoding = inflight + external + ahead[slots], decoding + external
    step, busy = base + ctx * context, (decoding > 0) | (queued > 0)
    hit = np.minimum(held, max(0, prompt - 1))
    n = prompt - hit
    work = tok * n + pair * n * (hit + n / 2)
    prefill = work + base * np.maximum(1.0, n / budget)
    steps = np.maximum(1.0, (queued + n) / budget)
    free = (128 - decoding) * tok * steps
    ttft = np.maximum(0.0, work_us / 1e3 + ahead_ms[slots] + work - free) + step * (steps + 0.5 * busy)
    ttft, prefill = ttft + transfer, prefill + transfer
    return ttft + (externality * prefill + 1.5 * (ctx * prompt + tok)) * inflight, ttft, prefill


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 9000))
def test_the_compiled_price_is_the_formula(seed, size, moves, waits, prompt):
    dice = np.random.default_rng(seed)
    slots = np.sort(dice.permutation(2 * size)[:size]).astype(np.int32)
    booked = [dice.integers(0, most, 2 * size) for most in (40, 30, 9000, 900_000, 200_000)]
    external = dice.integers(0, 3, 2 * size).astype(float)
    learned = [dice.random(2 * size) * most for most in (0.3, 20.0, 1e-4, 1e-4)]
    rows = [*booked, external, *learned, dice.choice([512.0, 8192.0], 2 * size)]
    held = dice.integers(0, 5, size) * 2048.0
    transfer = dice.random(size) if moves else NONE
    ahead, ahead_ms = (dice.integers(0, 3, 2 * size) * 1.0, dice.random(2 * size) * 99) if waits else (NONE, NONE)
    found = np.empty((3, size))
    price(*rows, slots, held, transfer, ahead, ahead_ms, NONE, NONE, prompt, 128.0, 0.1, 2.0, found)
    nothing = np.zeros(2 * size)
    wanted = formula(
        rows,
        slots,
        held,
        transfer if moves else 0.0,
        ahead if waits else nothing,
        ahead_ms if waits else nothing,
        prompt,
        0.1,
    )
    assert np.allclose(found[[COST, TTFT, PREFILL]], wanted, rtol=1e-12, atol=1e-9)


def test_compiled_functions_need_no_folder_to_keep_them_in(monkeypatch):
    def refuse(*_arguments, cache, **_options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr("numba.njit", refuse)
    assert compiled("int64(int64)")(abs) is abs


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
            slot, c = choice.slot, rig.columns
            used = np.fmax(c.kv_use[slot] * c.kv_capacity[slot], c.kv_tokens[slot])
            forbidden = running > 0 and bool(c.kv_capacity[slot] - used < tokens - choice.hit_tokens)
            assert choice.dispatchable != forbidden
