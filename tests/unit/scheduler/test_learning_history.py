"""Output lengths and task weights, learned from what requests came to."""

import random

import msgspec
import numpy as np
import pytest
from fakes.rig import CHAT, LONG, SHORT, Rig, desired_state
from headway_scheduler.domain.report import Usage
from headway_scheduler.learning.history import History, task_weight
from headway_scheduler.learning.sketch import Sketch
from hypothesis import given
from hypothesis import strategies as st

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.99)
BIN = 2 ** (1 / 8)


def sketch_of(values):
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


class TestSketch:
    @given(st.lists(st.integers(0, 200_000), min_size=1, max_size=500), st.sampled_from(QUANTILES))
    def test_quantiles_as_numpy_has_them_to_within_a_bin(self, values, q):
        found = sketch_of(values).quantile(q)
        exact = float(np.quantile(values, q, method="inverted_cdf"))
        assert max(0.0, exact / BIN - 1) <= found <= exact * BIN + 1

    def test_of_an_answers_usual_lengths(self):
        dice = np.random.default_rng(1)
        values = np.floor(dice.lognormal(5.5, 0.8, 500))
        sketch = sketch_of(values)
        for q in QUANTILES:
            assert sketch.quantile(q) == pytest.approx(np.quantile(values, q), rel=0.08)
        assert sketch.mean == pytest.approx(values.mean())

    def test_decay_follows_change(self):
        sketch = sketch_of([100] * 5000)
        assert sketch.quantile(0.5) == pytest.approx(100, rel=0.09)
        for _ in range(2000):
            sketch.add(1000)
        assert sketch.quantile(0.5) == pytest.approx(1000, rel=0.09)
        assert sketch.mean == pytest.approx(1000, rel=0.05)

    def test_merging_is_like_having_seen_both(self):
        dice = random.Random(2)
        one, other = ([dice.randrange(1, 5000) for _ in range(200)] for _ in range(2))
        merged = sketch_of(one)
        merged.merge(sketch_of(other))
        assert merged == sketch_of(one + other)

    def test_empty(self):
        assert (Sketch().quantile(0.5), Sketch().mean) == (0.0, 0.0)

    @given(st.lists(st.integers(0, 10_000_000), max_size=2000))
    def test_stays_small_and_sound(self, values):
        sketch = sketch_of(values)
        assert sketch.is_sound()
        assert len(sketch.bins) <= 200
        assert sketch.weight < 512


class TestLengths:
    def test_by_hand_before_anything_came(self):
        history = History()
        assert [history.expected_output("a", "m", each, None) for each in (SHORT, CHAT, LONG)] == [32, 256, 800]
        assert history.expected_output("a", "m", LONG, None, 0.75) == 800
        assert history.expected_output("a", "m", LONG, 50, 0.75) == 50

    def test_by_tenant_model_and_class(self):
        history = History()
        for tokens in range(1, 401):
            history.finished("a", "m", CHAT, tokens, 1.0)
            history.finished("b", "m", CHAT, 1000, 1.0)
        assert history.expected_output("a", "m", CHAT, None) == pytest.approx(200.5)
        assert history.expected_output("a", "m", CHAT, None, 0.75) == pytest.approx(300, rel=0.05)
        assert history.expected_output("b", "m", CHAT, None) == 1000
        assert history.expected_output("a", "m", LONG, None) == 800
        assert history.expected_output("a", "n", CHAT, None) == 256

    def test_a_new_tenant_is_expected_to_be_as_the_others(self):
        history = History()
        history.finished("a", "m", CHAT, 77, 1.0)
        assert history.expected_output("new", "m", CHAT, None) == 77

    def test_nothing_where_it_is_off(self):
        history = History(learn=False)
        history.finished("a", "m", CHAT, 77, 1.0)
        assert history.expected_output("a", "m", CHAT, None) == 256


def experienced(short_ms=100.0, chat_ms=240.0, long_ms=4000.0, count=5000):
    history = History()
    for _ in range(count):
        history.served("m", SHORT, short_ms)
        history.served("m", CHAT, chat_ms)
        history.served("m", LONG, long_ms)
    return history


class TestWeights:
    def test_by_hand_at_first(self):
        for history in (History(), experienced(count=50)):
            for each in (SHORT, CHAT, LONG):
                assert history.weight("m", each) == history.weight("m", each, capped=False) == task_weight(each)

    def test_then_what_they_cost(self):
        history = experienced()
        assert history.weight("m", SHORT) == 1.0
        assert history.weight("m", CHAT) == pytest.approx(2.4, rel=0.02)
        assert history.weight("m", LONG) == 3.0
        assert history.weight("m", LONG, capped=False) == pytest.approx(40.0, rel=0.05)
        assert history.weight("other", LONG) == 3.0

    def test_never_below_one_in_article_mode(self):
        history = experienced(chat_ms=20.0)
        assert history.weight("m", CHAT) == 1.0
        assert history.weight("m", CHAT, capped=False) == pytest.approx(0.2, rel=0.05)

    def test_little_by_little(self):
        found = [experienced(count=count).weight("m", LONG, capped=False) for count in (50, 60, 100, 1000)]
        assert found == sorted(found)
        assert found[0] == 3.0
        assert found[-1] < 40.0

    def test_not_where_it_is_off(self):
        history = experienced()
        history.learn = False
        assert history.weight("m", CHAT, capped=False) == 1.5


def two_endpoints(**parameters):
    rig = Rig(desired_state("global_least_request"))
    rig.bind("global_least_request", parameters=parameters)
    rig.endpoints(2)
    return rig


def load(rig, number, count, task_class):
    """So many requests on one of the two."""
    other = f"10.0.0.{3 - number}:8000"
    for _ in range(count):
        assert rig.where(rig.route(task_class=task_class, excluded=frozenset({other}))) == str(number)


def teach(rig, count=400):
    for _ in range(count):
        rig.scheduler.history.served("m", SHORT, 100.0)
        rig.scheduler.history.served("m", LONG, 1500.0)


class TestGlobalLeastRequest:
    @pytest.mark.parametrize("mode", ["article", "learned"])
    def test_the_articles_example(self, mode):
        rig = two_endpoints(mode=mode)
        load(rig, 1, 5, LONG)
        load(rig, 2, 10, SHORT)
        assert [rig.columns.weight_micro[rig.slot(each)] for each in (1, 2)] == [15_000_000, 10_000_000]
        assert rig.where(rig.route(task_class=LONG)) == "2"

    @pytest.mark.parametrize(("mode", "chosen"), [("article", "1"), ("learned", "2")])
    def test_learned_weights_go_as_far_as_the_mode_lets_them(self, mode, chosen):
        """A LONG one costs 15 SHORT ones: against eight of those, two are less by the article, and more in truth."""
        rig = two_endpoints(mode=mode)
        teach(rig)
        load(rig, 1, 2, LONG)
        load(rig, 2, 8, SHORT)
        assert rig.where(rig.route(task_class=SHORT)) == chosen

    def test_article_is_the_default(self):
        rig = two_endpoints()
        teach(rig)
        load(rig, 1, 2, LONG)
        load(rig, 2, 8, SHORT)
        assert rig.where(rig.route(task_class=SHORT)) == "1"

    def test_a_reservation_keeps_its_weight(self):
        rig = two_endpoints(mode="learned")
        decision = rig.route(task_class=LONG)
        number = int(rig.where(decision))
        teach(rig)
        assert rig.counts(rig.slot(number))["uncapped_micro"] == 3_000_000
        rig.served_by(decision, f"10.0.0.{3 - number}:8000")
        assert rig.counts(rig.slot(3 - number))["uncapped_micro"] == 3_000_000, "moved as it is"
        rig.finish(decision)
        assert rig.is_empty()

    def test_reports_teach_the_weights(self):
        rig = Rig(desired_state("global_least_request"))
        rig.endpoints(1)
        for _ in range(200):
            for task_class, tokens in ((SHORT, 10), (LONG, 500)):
                decision = rig.route(task_class=task_class)
                rig.clock.now += 0.02
                rig.first_token(decision, ttft_ms=20.0)
                duration_ms = 20.0 + 10.0 * tokens
                rig.clock.now += tokens * 0.01
                rig.finish(decision, usage=Usage(100, tokens, 0), duration_ms=duration_ms)
        assert rig.scheduler.history.weight("m", LONG) == 3.0
        assert rig.scheduler.history.weight("m", LONG, capped=False) > 15


class TestState:
    def test_survives_a_restart(self):
        before, after = experienced(), History()
        for tokens in range(300):
            before.finished("a", "m", CHAT, tokens, 1.0)
        after.restore(before.dump())
        assert after.dump() == before.dump()
        assert after.weight("m", LONG, capped=False) == before.weight("m", LONG, capped=False)
        assert after.expected_output("a", "m", CHAT, None, 0.9) == before.expected_output("a", "m", CHAT, None, 0.9)

    @pytest.mark.parametrize(
        "state",
        [
            b"",
            b"[]",
            b'{"format": 2}',
            b'{"format": 1, "outputs": {"a": {"value": 3.0, "count": 1}}, "costs_ms": {"a": {}}}',
            msgspec.json.encode({"format": 1, "outputs": {"a": {"bins": {"3": -1.0}, "weight": -1.0}}}),
            msgspec.json.encode({"format": 1, "outputs": {"a": {"bins": {"3": 1.0}, "weight": 9.0}}}),
            msgspec.json.encode({"format": 1, "outputs": {"a": {"bins": {"99999": 1.0}, "weight": 1.0}}}),
            msgspec.json.encode({"format": 1, "costs_ms": {"m": {"value": -4.0, "count": 9}}}),
            msgspec.json.encode({"format": 1, "bytes_per_token": {"m": {"value": 0.0, "count": 9}}}),
        ],
    )
    def test_what_cannot_be_is_refused_and_changes_nothing(self, state):
        history = experienced(count=60)
        kept = history.dump()
        with pytest.raises(ValueError, match=r"."):
            history.restore(state)
        assert history.dump() == kept
