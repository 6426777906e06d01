"""The estimator and the cost model on work whose true times are known."""

import base64
import random
import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from fakes.rig import Rig, desired_state
from headway_scheduler.domain.report import Usage
from headway_scheduler.fleet.columns import Columns
from headway_scheduler.learning.cost_model import CostModel
from headway_scheduler.learning.estimator import Estimator
from headway_scheduler.learning.priors import DEFAULT
from headway_scheduler.learning.timing import Timing
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

PRIOR = (0.0666, 9.8, 2.8e-6, 1.05e-4, 5.0)
TOK, BASE, PAIR, CTX, OVERHEAD = range(5)


def prefill(dice):
    """Amounts of one prefill on an engine that decodes."""
    tokens, hit = dice.uniform(100, 8000), dice.uniform(0, 8000)
    steps = max(1.0, tokens / 2048)
    return (tokens, steps, tokens * (hit + tokens / 2), steps * dice.uniform(0, 80_000), 1.0)


def decode(dice):
    """Amounts of one decode with prefills mixed in."""
    steps, tokens = dice.uniform(20, 400), dice.uniform(0, 10_000)
    return (tokens, steps, tokens * 4000, steps * dice.uniform(5_000, 80_000), 0.0)


def teach(estimator, truth, count, dice, noise=0.03, kinds=(prefill, decode)):
    """Observe work done by an engine with these coefficients, `noise` around the truth; returns how many counted."""
    counted = 0
    for number in range(count):
        amounts = kinds[number % len(kinds)](dice)
        actual = float(np.dot(truth, amounts)) * dice.gauss(1.0, noise)
        counted += estimator.observe(amounts, actual, 0.1 * actual + 1.0)
    return counted


def scaled(factor, **others):
    truth = [each * factor for each in PRIOR[:4]] + [2.0]
    for name, ratio in others.items():
        place = ("tok", "base", "pair", "ctx").index(name)
        truth[place] = PRIOR[place] * ratio
    return truth


class TestConvergence:
    @pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0, 4.0])
    def test_a_wrong_prior_is_forgotten(self, factor):
        estimator, truth = Estimator(PRIOR), scaled(factor)
        teach(estimator, truth, 400, random.Random(1))
        assert estimator.coefficients[:4] == pytest.approx(truth[:4], rel=0.08)

    def test_each_coefficient_by_itself(self):
        estimator, truth = Estimator(PRIOR), scaled(1.0, tok=1.6, base=0.8, pair=1.3, ctx=1.2)
        teach(estimator, truth, 2000, random.Random(2))
        assert estimator.coefficients[:4] == pytest.approx(truth[:4], rel=0.1)

    def test_a_few_observations_correct_all_that_is_common(self):
        """A device that decodes half as fast surely prefills more slowly too, before it was ever asked to."""
        estimator = Estimator(PRIOR)
        teach(estimator, scaled(2.0), 5, random.Random(3), kinds=(decode,))
        assert estimator.ratios[TOK] > 1.6
        assert estimator.predict(prefill(random.Random(4))) > 0

    def test_change_is_followed(self):
        estimator, dice = Estimator(PRIOR), random.Random(5)
        teach(estimator, scaled(1.0), 1000, dice)
        teach(estimator, scaled(1.4), 900, dice)
        assert estimator.coefficients[:4] == pytest.approx(scaled(1.4)[:4], rel=0.08)

    def test_a_sudden_change_beyond_belief_is_followed_too(self):
        """A GPU that throttles to a third: its times are outliers at first, but all to one side."""
        estimator, dice = Estimator(PRIOR), random.Random(6)
        teach(estimator, scaled(1.0), 1000, dice)
        assert teach(estimator, scaled(3.0), 8, dice) == 0, "not at once"
        teach(estimator, scaled(3.0), 200, dice)
        assert estimator.coefficients[:4] == pytest.approx(scaled(3.0)[:4], rel=0.1)


class TestRobustness:
    def test_outliers_change_nothing(self):
        estimator, dice = Estimator(PRIOR), random.Random(7)
        teach(estimator, scaled(1.0), 300, dice)
        before = estimator.save()
        for factor in (10.0, 0.01, 50.0, 1e9, float("inf"), float("nan")):
            amounts = prefill(dice)
            assert not estimator.observe(amounts, estimator.predict(amounts) * factor, 20.0)
        assert estimator.save() == before

    def test_one_in_ten_stalled(self):
        estimator, dice = Estimator(PRIOR), random.Random(8)
        for number in range(1500):
            amounts = (prefill, decode)[number % 2](dice)
            actual = float(np.dot(scaled(2.0), amounts)) * (20.0 if dice.random() < 0.1 else dice.gauss(1.0, 0.03))
            estimator.observe(amounts, actual, 0.1 * actual + 1.0)
        assert estimator.coefficients[:4] == pytest.approx(scaled(2.0)[:4], rel=0.15)

    def test_what_nothing_tells_about_does_not_drift(self):
        """The same prompt for ever: its time becomes known; which coefficient it is due to cannot."""
        estimator, dice, always = Estimator(PRIOR), random.Random(9), (1000.0, 1.0, 2e6, 0.0, 1.0)
        for _ in range(20_000):
            actual = float(np.dot(scaled(1.0), always)) * dice.gauss(1.0, 0.05)
            estimator.observe(always, actual, 0.1 * actual)
        assert estimator.predict(always) == pytest.approx(np.dot(scaled(1.0), always), rel=0.05)
        assert estimator.ratios[:4] == pytest.approx([1.0] * 4, abs=0.15)
        assert (np.diag(estimator.covariance) <= np.array([1.07] * 4 + [1.01])).all(), "nor does doubt grow without end"

    @given(
        st.lists(
            st.tuples(st.sampled_from([prefill, decode]), st.integers(0, 9), st.floats(1e-3, 1e9), st.floats(0, 1e6)),
            max_size=60,
        )
    )
    def test_whatever_comes_everything_stays_within_bounds(self, observations):
        estimator = Estimator(PRIOR)
        for kind, seed, actual, noise in observations:
            estimator.observe(kind(random.Random(seed)), actual, noise)
        assert all(0.125 <= ratio <= 8.0 for ratio in estimator.ratios[:4])
        assert 0.0 <= estimator.ratios[OVERHEAD] <= 4.0
        assert np.isfinite(estimator.covariance).all()
        assert (np.diag(estimator.covariance) > 0).all()

    def test_bounds(self):
        estimator, dice = Estimator(PRIOR), random.Random(10)
        teach(estimator, scaled(100.0), 500, dice)
        assert max(estimator.ratios[:4]) <= 8.0
        slow, dice = Estimator(PRIOR), random.Random(11)
        teach(slow, scaled(0.001), 500, dice)
        assert min(slow.ratios[:4]) >= 0.125


class Engine:
    """An engine that serves one prompt at a time and decodes at a steady pace, and what is told of it."""

    def __init__(self, slower=2.0, **config):
        self.columns, self.now, self.slower = Columns(), 100.0, slower
        self.costs = CostModel(self.columns, **config)
        self.dice = random.Random(12)
        self.install()

    def install(self, version="1", prior=DEFAULT):
        self.costs.install(0, "e@0 vllm", version, prior)

    def serve(self, tokens=None, believed_hit=0.0, hit=0, output=100, waited_s=0.0):
        """One request from sending to end; it waits behind nothing."""
        tokens = tokens or self.dice.randrange(200, 6000)
        flight = self.costs.sent(0, tokens - believed_hit, believed_hit, self.now)
        steps = max(1.0, (tokens - hit) / DEFAULT.budget_tokens)
        busy = max(0.0, tokens - hit - 128 * steps)
        pairs = (tokens - hit) * (hit + (tokens - hit) / 2)
        ttft_ms = self.slower * (DEFAULT.tok_ms * busy + DEFAULT.base_ms * steps + DEFAULT.pair_ms * pairs)
        ttft_ms += waited_s * 1e3
        self.now += ttft_ms / 1e3
        self.costs.first_token(flight, ttft_ms, self.now)
        duration_ms = ttft_ms + self.slower * DEFAULT.base_ms * (output - 1)
        self.now += (duration_ms - ttft_ms) / 1e3
        self.costs.finished(flight, Usage(tokens, output, hit), ttft_ms, duration_ms, self.now)
        self.now += 0.5

    @property
    def ratios(self):
        c = self.columns
        return [float(c.tok_ms[0]) / DEFAULT.tok_ms, float(c.base_ms[0]) / DEFAULT.base_ms]


def served(count, engine=None, **request):
    engine = engine or Engine()
    for _ in range(count):
        engine.serve(**request)
    return engine


class TestCostModel:
    def test_reports_correct_the_columns(self):
        assert served(100).ratios == pytest.approx([2.0, 2.0], rel=0.05)

    def test_the_engines_own_count_of_cached_tokens_counts(self):
        """The index believed nothing to be cached; the engine had nearly all of it."""
        assert served(100, tokens=4000, hit=3500).ratios == pytest.approx([2.0, 2.0], rel=0.15)

    def test_queued_prompts_teach_as_a_whole(self):
        """Three at once, served one by one: the last one's TTFT is the work of all three."""
        engine, tokens = Engine(), 2048 * 2
        one_ms = 2.0 * (DEFAULT.tok_ms * (tokens - 256) + DEFAULT.base_ms * 2 + DEFAULT.pair_ms * tokens * tokens / 2)
        for _ in range(60):
            flights = [engine.costs.sent(0, float(tokens), 0.0, engine.now) for _ in range(3)]
            began = engine.now
            for place, flight in enumerate(flights, 1):
                engine.now = began + place * one_ms / 1e3
                engine.columns.prefill_us[0] = 3 - place
                engine.costs.first_token(flight, place * one_ms, engine.now)
            for place, flight in enumerate(flights, 1):
                engine.costs.finished(flight, Usage(tokens, 1, 0), place * one_ms, place * one_ms, engine.now)
            engine.now += 1.0
        assert engine.ratios[TOK] == pytest.approx(2.0, rel=0.1)

    def test_stalls_do_not(self):
        engine = served(60)
        before = engine.ratios
        for waited_s in (5.0, 30.0, 2.0):
            engine.serve(waited_s=waited_s)
        engine.serve()
        assert engine.ratios == pytest.approx(before, rel=0.02)

    def test_the_next_one_after_a_lost_prefill_teaches_nothing(self):
        engine = served(60)
        before = engine.ratios
        lost = engine.costs.sent(0, 100_000.0, 0.0, engine.now)
        engine.now += 0.1
        behind = engine.costs.sent(0, 500.0, 0.0, engine.now)
        engine.costs.lost(lost, engine.now)
        engine.now += 0.3
        engine.costs.first_token(behind, 300.0, engine.now)
        engine.costs.finished(behind, Usage(500, 1, 0), 300.0, 300.0, engine.now)
        engine.serve(tokens=1000)
        engine.serve(tokens=1000)
        assert engine.ratios == pytest.approx(before, rel=0.02)

    def test_nor_do_those_behind_one_that_does_not_tell(self):
        """A client that reports no first tokens had its prompt prefilled before theirs."""
        engine = served(60)
        before = engine.ratios
        engine.costs.sent(0, 100_000.0, 0.0, engine.now)
        for _ in range(5):
            flight = engine.costs.sent(0, 500.0, 0.0, engine.now + 0.01)
            engine.now += 0.3
            engine.costs.first_token(flight, 290.0, engine.now)
            engine.costs.finished(flight, Usage(500, 1, 0), 290.0, 290.0, engine.now)
            engine.now += 0.5
        assert engine.ratios == pytest.approx(before, rel=0.02)

    def test_a_ttft_from_the_future_teaches_nothing(self):
        engine = Engine()
        flight = engine.costs.sent(0, 1000.0, 0.0, engine.now)
        engine.costs.first_token(flight, 5000.0, engine.now + 0.1)
        engine.costs.finished(flight, Usage(1000, 1, 0), 5000.0, 5000.0, engine.now + 0.2)
        following = engine.costs.sent(0, 1000.0, 0.0, engine.now + 1.0)
        engine.costs.first_token(following, 80.0, engine.now + 1.08)
        assert engine.ratios == [1.0, 1.0]

    def test_nothing_is_learned_where_it_is_off(self):
        assert served(100, Engine(learn=False)).ratios == [1.0, 1.0]

    def test_an_emulated_fleet_runs_faster_than_life(self):
        engine = Engine(slower=0.2, time_scale=10.0)  # twice as slow as a tenth
        assert served(100, engine).ratios == pytest.approx([0.2, 0.2], rel=0.1)


class TestState:
    def test_survives_a_restart(self):
        before, after = served(100), Engine()
        after.costs.restore(before.costs.dump())
        assert after.ratios == before.ratios
        later = Engine()
        later.costs = CostModel(later.columns)
        later.costs.restore(before.costs.dump())
        later.install()
        assert later.ratios == before.ratios, "also where the endpoint comes after the state"

    def test_goes_on_from_there(self):
        before, after = served(100), Engine()
        after.costs.restore(before.costs.dump())
        after.dice, after.now = before.dice, before.now
        dice = before.dice.getstate()
        served(10, before)
        before.dice.setstate(dice)
        served(10, after)
        assert after.ratios == pytest.approx(before.ratios, rel=1e-3)

    def test_a_new_engine_version_starts_from_the_old_one(self):
        engine = served(200)
        before = engine.ratios
        engine.install(version="2")
        assert engine.ratios == before
        engine.slower = 1.0
        served(15, engine)
        changed = engine.ratios
        assert changed == pytest.approx([1.0, 1.0], rel=0.2), "and soon believes what it sees"
        engine.install(version="1")
        assert engine.ratios == before, "each version has its own"
        engine.install(version="2")
        assert engine.ratios == changed

    def test_of_other_hardware_nothing_is_taken(self):
        engine = served(100)
        engine.install(prior=replace(DEFAULT, tok_ms=DEFAULT.tok_ms / 3))
        assert engine.ratios[TOK] == pytest.approx(1 / 3)

    @pytest.mark.parametrize(
        "change",
        [
            lambda saved: saved | {"format": 99},
            lambda saved: {"e@0 vllm 1": {"log_factor": 0.7, "observations": 9}},  # as it was kept before
            lambda saved: _spoilt(saved, 5, 1e300),  # a ratio
            lambda saved: _spoilt(saved, 6, float("nan")),
            lambda saved: _spoilt(saved, 10, -1.0),  # a variance
            lambda saved: _spoilt(saved, 11, 1e9),  # a covariance
            lambda saved: _spoilt(saved, 0, 0.0),  # a prior
            lambda saved: _with_numbers(saved, b"short"),
            lambda saved: [],
        ],
    )
    def test_what_cannot_be_is_refused_and_changes_nothing(self, change):
        engine = served(30)
        before, kept = engine.ratios, engine.costs.dump()
        with pytest.raises(ValueError, match=r"."):
            engine.costs.restore(msgspec.json.encode(change(msgspec.json.decode(kept))))
        assert (engine.ratios, engine.costs.dump()) == (before, kept)

    @pytest.mark.parametrize("state", [b"", b"\xff\x00", b"{", b"null"])
    def test_garbage_is_refused(self, state):
        engine = served(30)
        kept = engine.costs.dump()
        with pytest.raises(ValueError, match=r"."):
            engine.costs.restore(state)
        assert engine.costs.dump() == kept


async def test_a_scheduler_starts_with_whatever_was_saved():
    rig = Rig(desired_state("adaptive"))
    with capture_logs() as logs:
        await rig.scheduler._restore({"cache_salt_secret": b"x", "cost_model": b"{garbage", "history": b"\x00"})
    assert [(each["event"], each["key"]) for each in logs] == [
        ("learned_state_ignored", "cost_model"),
        ("learned_state_ignored", "history"),
    ]
    (slot,) = rig.endpoints(1)
    assert rig.columns.tok_ms[slot] == DEFAULT.tok_ms


def _with_numbers(saved, numbers):
    text = base64.b64encode(numbers).decode()
    return saved | {"endpoints": {key: each | {"numbers": text} for key, each in saved["endpoints"].items()}}


def _spoilt(saved, place, value):
    (endpoint,) = saved["endpoints"].values()
    numbers = list(struct.unpack("<25d", base64.b64decode(endpoint["numbers"])))
    numbers[place] = value
    return _with_numbers(saved, struct.pack("<25d", *numbers))


def test_first_tokens_without_end_in_one_step_are_not_all_remembered():
    """An engine far faster than it is believed to be: whatever it answers seems to come from one step."""
    columns = Columns()
    columns.base_ms[0], columns.budget_tokens[0] = 10.0, 2048.0
    timing = Timing(columns, lambda _slot, _observation: None)
    flights = [timing.sent(0, 100.0, 0.0, 1.0) for _ in range(1000)]
    for flight in flights:
        timing.first_token(flight, 1.0, 1.001)
    assert max(len(flight.period.members) for flight in flights) == 64
